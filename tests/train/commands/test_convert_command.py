"""`shardwright convert`: a run's checkpoint for Hugging Face, the lines that it prints, and wrong uses in one line."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path

import pytest
import torch

import shardwright as sw
from shardwright import cli
from shardwright.checkpoint import open_stored
from shardwright.train.commands.export import export
from shardwright.train.run.position import step_folder
from tests.train.kit.jobs import steps_in


def newest(run: Path) -> Path:
    checkpoints = run / "checkpoints"
    return step_folder(checkpoints, steps_in(checkpoints)[0])


def values(path: Path) -> dict[str, torch.Tensor]:
    return {name: each.view().clone() for name, each in open_stored(path).items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_run_gets_the_names_of_hugging_face(
    plain_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, exported = tmp_path / "hf", tmp_path / "exported"
    source = str(newest(plain_run))
    capsys.readouterr()
    assert cli.main(["convert", source, str(out), "--to", "safetensors", "--dtype", "bfloat16"]) == 0
    printed = capsys.readouterr()
    assert (
        printed.err.startswith("left out: ") and "optimizer" in printed.err and printed.err.count("\n") == 1
    )
    assert printed.out.startswith(f"{out}: ") and "AutoModelForCausalLM" in printed.out
    export(plain_run, exported, dtype="bfloat16")
    assert same(values(out), values(exported))
    config, whole = (json.loads((each / "config.json").read_text()) for each in (out, exported))
    assert config.items() <= whole.items() and config["dtype"] == "bfloat16"
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16)
    assert torch.equal(model.lm_head.weight, values(out)["lm_head.weight"])


def test_stored_names_and_other_forms(
    plain_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = str(newest(plain_run))
    assert cli.main(["convert", source, str(tmp_path / "own.safetensors"), "--stored-names"]) == 0
    own = values(tmp_path / "own.safetensors")
    assert "tok_embeddings.weight" in own
    assert cli.main(["convert", source, str(tmp_path / "whole.pt")]) == 0
    assert same(torch.load(tmp_path / "whole.pt")["model"], own)
    assert cli.main(["convert", source, str(tmp_path / "ours"), "--to", "shardwright", "--key", "model"]) == 0
    rules = ["--key-map", "layers.*.attention.*=h.*.attn.*", "--key-map", "output.weight="]
    assert (
        cli.main(["convert", str(tmp_path / "ours"), str(tmp_path / "named"), "--to", "safetensors", *rules])
        == 0
    )
    named = values(tmp_path / "named")
    assert torch.equal(named["h.0.attn.wq.weight"], own["layers.0.attention.wq.weight"])
    assert "output.weight" not in named and len(named) == len(own) - 1
    assert "Traceback" not in capsys.readouterr().err


def test_wrong_uses_are_one_line(plain_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = str(newest(plain_run)), str(tmp_path / "out")
    cases = [
        ([source, out], "--to: expected one of shardwright, safetensors, dcp, torch, found none"),
        ([source, out, "--to", "zip"], "invalid choice: 'zip'"),
        ([source, out, "--to", "torch"], "ending in .pt, .pth, .bin"),
        ([source, f"{out}.pt", "--to", "dcp"], "expected a form for out.pt"),
        ([source, out, "--to", "dcp", "--dtype", "bfloat16"], "--dtype: expected --to safetensors"),
        ([source, f"{out}.safetensors", "--max-shard-size", "1 GB"], "expected a folder"),
        ([source, out, "--to", "safetensors", "--max-shard-size", "x"], "must be bytes"),
        ([source, out, "--to", "safetensors", "--key", "modle"], "no tensors under 'modle'; its keys are"),
        ([source, out, "--to", "safetensors", "--key-map", "a*=b"], "with as many \\*"),
        ([source, out, "--to", "safetensors", "--key-map", "output.weight=norm.weight"], "share the key 'norm.weight'"),
        ([source, out, "--to", "safetensors", "--key-map", "nowhere=x"], "the rule nowhere=x fits no tensor"),
        ([source, str(tmp_path), "--to", "dcp"], "exists. Choose another name"),
        ([source, str(tmp_path / "no" / "out"), "--to", "dcp"], "no such folder"),
        ([str(tmp_path / "nothing"), out, "--to", "dcp"], "a file or a folder of weights, found nothing there"),
        ([str(plain_run), out, "--to", "dcp"], "is a run. Give one of its checkpoints, such as .*step-"),
        ([source], "required: DESTINATION"),
    ]  # fmt: skip
    for arguments, problem in cases:
        assert cli.main(["convert", *arguments]) == 2, arguments
        printed = capsys.readouterr()
        assert printed.err.startswith("error: ") and printed.err.count("\n") == 1 and printed.out == ""
        assert re.search(problem, printed.err), printed.err
    assert list(tmp_path.iterdir()) == []


def test_damage_is_one_line_and_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sw.save_checkpoint(tmp_path / "c", torch.nn.Linear(30, 30))
    file = tmp_path / "c" / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    (tmp_path / "half.safetensors").write_bytes(b"\x10\0\0")
    for source, problem in (("c", "SHA-256"), ("half.safetensors", "not fully downloaded")):
        for form in ("torch", "dcp"):
            out = str(tmp_path / ("out.pt" if form == "torch" else "out"))
            assert cli.main(["convert", str(tmp_path / source), out, "--to", form]) == 1
            error = capsys.readouterr().err
            assert error.startswith("error: ") and problem in error and error.count("\n") == 1
    assert cli.main(["convert", str(tmp_path / "c"), str(tmp_path / "out"), "--to", "dcp", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c", "half.safetensors"]


def test_a_full_disk_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    sw.save_checkpoint(tmp_path / "c", torch.nn.Linear(30, 30))
    monkeypatch.setattr(os, "pwrite", full)
    assert cli.main(["convert", str(tmp_path / "c"), str(tmp_path / "out"), "--to", "safetensors"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "cannot write: No space left on device" in error and "Free some space" in error
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_urls_are_read_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fsspec = pytest.importorskip("fsspec", reason="needs fsspec")
    files, model = fsspec.filesystem("memory"), torch.nn.Linear(30, 4)
    ours, url, out = str(tmp_path / "ours"), "memory://converted/step-3", str(tmp_path / "out.safetensors")
    sw.save_checkpoint(ours, model, extra={"step": 3})
    assert cli.main(["convert", ours, url, "--to", "shardwright"]) == 0
    assert f"shardwright.load_checkpoint({url!r}, model) reads it" in capsys.readouterr().out
    other = torch.nn.Linear(30, 4)
    assert sw.load_checkpoint(url, other, generators=False) == {"step": 3}
    assert torch.equal(other.weight, model.weight)
    assert cli.main(["convert", url, out]) == 0
    assert torch.equal(values(Path(out))["weight"], model.weight)
    capsys.readouterr()
    before = files.find("/converted")
    for arguments, problem in {
        (ours, url, "--to", "shardwright"): f"{url} holds a whole checkpoint. It is not replaced",
        (ours, "memory://converted/dcp", "--to", "dcp"): "only shardwright is written to a URL, found dcp",
        ("memory://none/here", str(tmp_path / "none.pt")): "memory://none/here holds no whole checkpoint",
        ("absent://none/here", str(tmp_path / "none.pt")): "no file system for absent://",
    }.items():
        assert cli.main(["convert", *arguments]) != 0
        err = capsys.readouterr().err
        assert problem in err and err.count("\n") == 1
    assert files.find("/converted") == before and len(list(tmp_path.iterdir())) == 2
