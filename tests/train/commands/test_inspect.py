"""`shardwright inspect`: what it shows of checkpoints by any writer, and its exit statuses."""

from __future__ import annotations

import hashlib
import os
import pickle
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import shardwright as sw
from shardwright import cli
from shardwright.checkpoint import INDEX
from shardwright.checkpoint.format.index import index_text, parse_index
from tests.support.payloads import code_of_the_system, plant_beside
from tests.train.kit.damage import flipped

Inspect = Callable[..., tuple[int, str, str]]


@pytest.fixture
def inspect(capsys: pytest.CaptureFixture[str]) -> Inspect:
    def call(*arguments: str | Path) -> tuple[int, str, str]:
        capsys.readouterr()
        status = cli.main(["inspect", *map(str, arguments)])
        return status, *capsys.readouterr()

    return call


def test_a_checkpoint_of_a_run(sharded_run: Path, inspect: Inspect) -> None:
    folder = sharded_run / "checkpoints" / "step-8"
    status, out, err = inspect(folder)
    lines = out.splitlines()
    assert (status, err) == (0, "") and lines[0] == str(folder)
    assert lines[1] == "  format       shardwright, version 1; torch's distributed checkpoint reads it, too"
    assert lines[2].startswith("  written by   2 ranks, shardwright ") and ", torch " in lines[2]
    assert "  step         8, after 64 samples" in lines
    index = parse_index((folder / INDEX).read_bytes())
    assert lines[4].startswith(f"  tensors      {len(index.tensors)}, ")
    assert [line.split()[0] for line in lines[5:8]] == ["optimizer", "model", "generators"]
    assert "    extra: {'position': {'step': 8, 'samples': 64}}" in lines
    (generators,) = (line for line in lines if line.startswith("  generators "))
    assert "torch" in generators and generators.endswith(" of 2 ranks")
    assert "  the 8 largest tensors" in lines
    assert sum("float32 256 x 32  in 2 parts" in line for line in lines) == 6
    assert lines[-1].startswith("  check        whole: ") and lines[-1].endswith(
        "compared with their SHA-256"
    )
    everything = inspect(folder, "--tensors")[1].splitlines()
    assert "  all tensors" in everything and all(
        any(line.split()[:1] == [name] for line in everything) for name in index.tensors
    )
    assert "compared" not in inspect(folder, "--quick")[1].partition("--quick")[2]


def save_alone(state: dict[str, Any], folder: Path) -> None:
    """Write a state with torch's writer in one process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder, no_dist=True)


def test_a_run_and_its_damage(plain_run: Path, tmp_path: Path, inspect: Inspect) -> None:
    run = tmp_path / "run"
    shutil.copytree(plain_run, run)
    assert inspect(run)[0] == 0 and inspect(run / "checkpoints")[0] == 0
    newest = run / "checkpoints" / "step-8"
    flipped(newest / "__0_0.distcp", newest)
    status, out, err = inspect(run)
    assert status == 1 and f"{run}: 2 checkpoints" in out and str(run / "checkpoints" / "step-6") in out
    assert err.startswith(f"error: {run}: step-8 is damaged: __0_0.distcp is not the file that was saved: ")
    assert err.count("\n") == 1
    assert "  step-8 is damaged: " in out
    status, out, err = inspect(newest)
    assert (
        status == 1 and err.startswith(f"error: {newest} is damaged: __0_0.distcp ") and err.count("\n") == 1
    )
    assert inspect(run, "--quick")[0] == 0
    os.truncate(newest / "__values.distcp", 10)
    status, _, err = inspect(newest, "--quick")
    assert status == 1 and "__values.distcp holds 10 bytes" in err
    (newest / INDEX).write_text("{}")
    status, out, err = inspect(newest)
    assert (status, out) == (1, "") and "no readable index.json" in err and err.count("\n") == 1


def later_version(folder: Path) -> None:
    body = (folder / INDEX).read_text().rpartition('"sha256": "')[0].replace('"version": 1', '"version": 9')
    (folder / INDEX).write_text(f'{body}"sha256": "{hashlib.sha256(body.encode()).hexdigest()}"}}\n')


def emptied(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()


#: Damage of a checkpoint, whether its description can still be read, and the exit status.
DAMAGES: dict[str, tuple[Callable[[Path], object], bool, int]] = {
    "a byte": (lambda folder: flipped(folder / "__0_0.distcp", folder), True, 1),
    "a short file": (lambda folder: os.truncate(folder / "__0_0.distcp", 10), True, 1),
    "a lost file": (lambda folder: os.unlink(folder / "__values.distcp"), True, 1),
    "another description": (lambda folder: (folder / INDEX).write_text("{}"), False, 1),
    "a short description": (lambda folder: os.truncate(folder / INDEX, 100), False, 1),
    "no description": (lambda folder: os.unlink(folder / INDEX), False, 1),
    "neither description": (lambda folder: [os.unlink(folder / n) for n in (INDEX, ".metadata")], False, 1),  # type: ignore[func-returns-value]
    "nothing": (emptied, False, 1),
    "a later version": (later_version, False, 2),
}


@pytest.mark.parametrize("both", [False, True], ids=["the newest", "both"])
@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_hides_no_other(
    name: str, both: bool, plain_run: Path, tmp_path: Path, inspect: Inspect
) -> None:
    damage, is_readable, expected = DAMAGES[name]
    run = tmp_path / "run"
    shutil.copytree(plain_run, run)
    for step in (8, 6) if both else (8,):
        damage(run / "checkpoints" / f"step-{step}")
    status, out, err = inspect(run)
    assert status == expected and err.startswith("error: ") and "step-8" in err and err.count("\n") == 1
    lines = out.splitlines()
    assert lines[0] == f"{run}: 2 checkpoints"
    assert lines[1].startswith(f"  step-8 {'is damaged' if expected == 1 else 'cannot be examined'}: ")
    assert (
        lines[2].startswith(f"  step-6 {'is damaged' if expected == 1 else 'cannot be examined'}: ") == both
    )
    assert ("whole" in lines[2]) != both
    shown = 6 if not both else 8 if is_readable else None
    assert [line for line in lines if line.startswith(str(run / "checkpoints"))] == (
        [] if shown is None else [str(run / "checkpoints" / f"step-{shown}")]
    )
    assert any(line.startswith("  tensors ") for line in lines) == (shown is not None)


@pytest.mark.parametrize("lost", [INDEX, "parts"])
def test_damage_behind_a_url_hides_no_other(lost: str, inspect: Inspect) -> None:
    fsspec = pytest.importorskip("fsspec", reason="needs fsspec")
    files, url = fsspec.filesystem("memory"), f"memory://damaged-{lost}"
    for step in (1, 2):
        position = {"step": step, "samples": step}
        sw.save_checkpoint(f"{url}/step-{step}", nn.Linear(30, 4), extra={"position": position})
    doomed = INDEX if lost == INDEX else "__0_0"
    files.rm_file(next(each for each in files.find(f"/damaged-{lost}/step-2") if doomed in each))
    status, out, err = inspect(url)
    assert status == 1 and err.startswith(f"error: {url}: step-2 is damaged: ") and err.count("\n") == 1
    lines = out.splitlines()
    assert lines[0] == f"{url}: 2 checkpoints" and lines[2].endswith("  whole") and f"{url}/step-1" in lines


def test_folders_of_other_writers(plain_run: Path, tmp_path: Path, inspect: Inspect) -> None:
    """By torch's writer, and by `save_checkpoint` outside a run."""
    save_alone({"model": {"w": torch.zeros(3, 4)}, "rates": {"lr": 0.5}}, tmp_path / "dcp")
    status, out, err = inspect(tmp_path / "dcp")
    assert (status, err) == (0, "")
    assert "a folder of torch's distributed checkpoint" in out and "no digests" in out
    assert "1, pickled, so they are not read" in out and "float32 3 x 4" in out
    os.truncate(tmp_path / "dcp" / "__0_0.distcp", 10)
    status, _, err = inspect(tmp_path / "dcp")
    assert status == 1 and "__0_0.distcp holds 10 bytes" in err

    sw.save_checkpoint(tmp_path / "own", nn.Linear(2, 2), extra={"note": "x" * 300, "\x1b[31m": 1})
    status, out, _ = inspect(tmp_path / "own")
    assert status == 0 and "step " not in out and "\x1b" not in out
    assert max(map(len, out.splitlines())) < 130


def test_wrong_use_is_status_2(tmp_path: Path, inspect: Inspect) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    for arguments, expected in (
        ((tmp_path / "nothing",), "found nothing at"),
        ((tmp_path / "file",), "found a file at"),
        ((tmp_path / "run",), "found none; the run has saved nothing"),
        ((), "the following arguments are required: PATH"),
        ((tmp_path, "--quik"), "did you mean --quick?"),
    ):
        status, out, err = inspect(*arguments)
        assert (status, out) == (2, "") and err.startswith("error: ") and expected in err, err
        assert err.count("\n") == 1
    status, _, err = inspect(tmp_path)
    assert status == 2 and "neither index.json nor .metadata, so it holds no checkpoint" in err


def test_hostile_folders_run_nothing_and_are_one_line(
    plain_run: Path, tmp_path: Path, inspect: Inspect
) -> None:
    evidence = tmp_path / "evidence"
    save_alone({"model": {"w": torch.zeros(3)}}, tmp_path / "dcp")

    def deep(folder: Path) -> None:
        path = folder / INDEX
        text = path.read_text().replace('["extra"]', "[" * 100_000 + "]" * 100_000)
        path.write_text(text)

    def many_keys(folder: Path) -> None:
        body = (folder / INDEX).read_text().rpartition('"sha256": "')[0]
        name = ".".join("k" * 5000)
        keys = ",".join('"k"' * 1 for _ in range(5000))
        body = body.replace('"extra": [["extra"]', f'"{name}": [[{keys}]')
        (folder / INDEX).write_text(f'{body}"sha256": "{hashlib.sha256(body.encode()).hexdigest()}"}}\n')

    def elsewhere(folder: Path) -> None:
        index = parse_index((folder / INDEX).read_bytes())
        text = index_text(index).replace("__0_0.distcp", "../__0_0.distcp")
        (folder / INDEX).write_text(text)

    def link(folder: Path) -> None:
        (folder / INDEX).rename(tmp_path / "elsewhere")
        (folder / INDEX).symlink_to(tmp_path / "elsewhere")

    def pipe(folder: Path) -> None:
        (folder / INDEX).unlink()
        os.mkfifo(folder / INDEX)

    def in_metadata(folder: Path) -> None:
        plant_beside(folder / ".metadata", evidence)

    def as_metadata(folder: Path) -> None:
        (folder / ".metadata").write_bytes(code_of_the_system(evidence))

    def huge(folder: Path) -> None:
        (folder / ".metadata").write_bytes(pickle.PROTO + b"\x04" + pickle.BINBYTES8 + b"\xff" * 7 + b"\x00")

    source = plain_run / "checkpoints" / "step-8"
    for number, (attack, folder) in enumerate(
        [(each, source) for each in (deep, many_keys, elsewhere, link, pipe)]
        + [(each, tmp_path / "dcp") for each in (in_metadata, as_metadata, huge)]
    ):
        copy = tmp_path / str(number)
        shutil.copytree(folder, copy)
        attack(copy)
        status, _, err = inspect(copy)
        assert status == 1 and err.startswith(f"error: {copy} is damaged: "), (attack, err)
        assert err.count("\n") == 1 and not evidence.exists()


def test_a_checkpoint_behind_a_url(inspect: Inspect) -> None:
    fsspec = pytest.importorskip("fsspec", reason="needs fsspec")
    files, url = fsspec.filesystem("memory"), "memory://inspected/step-3"
    sw.save_checkpoint(url, nn.Linear(30, 4), extra={"step": 3})
    status, out, err = inspect(url)
    assert (status, err) == (0, "") and out.splitlines()[0] == url
    assert "    extra: {'step': 3}" in out and "  check        whole: 3 files, " in out
    (parts,) = (name for name in files.find("/inspected") if "__0_0" in name)
    content = files.cat_file(parts)
    files.pipe_file(parts, content[:-1])
    status, _, err = inspect(url, "--quick")
    assert status == 1 and err.startswith(f"error: {url} is damaged: __0_0.") and err.count("\n") == 1
    files.pipe_file(parts, content[:500] + bytes([content[500] ^ 1]) + content[501:])
    assert inspect(url, "--quick")[0] == 0
    status, _, err = inspect(url)
    assert status == 1 and "is not the file that was saved" in err
    for wrong, problem in {
        "memory://inspected/none": "memory://inspected/none holds no whole checkpoint: a save was interrupted",
        "absent://a/b": "no file system for absent://",
        "memory://": "names no place for a checkpoint",
    }.items():
        status, out, err = inspect(wrong)
        assert status != 0 and not out and problem in err and err.count("\n") == 1
