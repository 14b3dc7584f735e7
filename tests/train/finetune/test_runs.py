"""Runs with adapters through the front door: checkpoints, resume, the reference to the base."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader

import shardwright as sw
from shardwright import cli
from shardwright.train.config import load_config
from shardwright.train.errors import UserError
from shardwright.train.finetune.adapters import adapt
from shardwright.train.finetune.base import Base, base_of, check_same_base, read_base, write_base
from shardwright.train.finetune.finetuning import prepare
from shardwright.train.finetune.peft_files import write_adapters
from shardwright.train.models import hugging_face
from shardwright.train.models.build import build_model
from shardwright.train.run.folder import RunFolder
from tests.support import multirank, world_mesh
from tests.train.finetune.kit import build, randomised, settings
from tests.train.kit.jobs import config_file, losses, ranks, tiny, train_here, trainer

LORA = (
    "--finetune.method", "lora", "--finetune.rank", "4", "--finetune.dropout", "0.1",
    "--finetune.train_also", '["norm.weight"]',
)  # fmt: skip
OURS = ("--parallel.engine", "shardwright")


@multirank(2, timeout=40)
@pytest.mark.parametrize(
    ("what", "engine"),
    [("adapters", "shardwright"), ("adapters", "ddp"), ("base", "ddp"), ("base", "fsdp2")],
)
def test_files_that_are_missing_on_one_host(
    rank: int, world_size: int, what: str, engine: str, tmp_path: Path
) -> None:
    """Every rank ends with one error, with each engine."""
    own = {"method": "lora", "rank": 4, "adapters": str(tmp_path / str(rank)) if what == "adapters" else ""}
    job = trainer(tiny(finetune=own, parallel={"engine": engine}), rank, world_size)
    if rank == 0 and what == "adapters":
        model = build_model(job.config.model, 256)
        adapt(model, job.config.finetune, 0)
        names = hugging_face.key_map(job.config.model.shape())
        write_adapters(model, tmp_path / "0", job.config.finetune, key_map=names)
    dist.barrier()
    plain = job.engine.unwrapped(job.model)
    if what == "base":
        prepare(
            plain, job.config.for_building, tmp_path / f"base{rank}.json", False, job.world.mesh
        )  # rank 0 writes
    message = (
        "found no adapter_config.json in it" if what == "adapters" else "base1.json: expected the reference"
    )
    if rank == 0:
        message = f"Rank 1 failed, so all ranks stop. UserError: .*{message}"
    with pytest.raises(UserError, match=message):
        prepare(plain, job.config.for_building, tmp_path / f"base{rank}.json", what == "base", job.world.mesh)


@multirank(3)
def test_the_digest_is_that_of_the_values(rank: int, world_size: int, tmp_path: Path) -> None:
    own = settings(train_also=["norm.weight"])
    plain = build("hybrid", own)
    expected = base_of(plain, "here")
    assert "norm.weight" not in expected.digests and "layers.0.mixer.in_proj.weight" in expected.digests
    assert not any("lora" in name for name in expected.digests)
    for options in (
        {},
        {"layout": "ragged"},
        {"layout": sw.Ragged("element")},
        {"strategy": "ddp"},
        {"strategy": "zero2"},
    ):
        model = build("hybrid", own)
        for block in model.blocks():
            sw.fully_shard(block, mesh=world_mesh(3), **options)
        sw.fully_shard(model, mesh=world_mesh(3), **options)
        assert base_of(model, "here") == expected, options
    changed = build("hybrid", own)
    with torch.no_grad():
        weight = changed.layers[1].mixer.wq.weight
        weight[[0, 1]] = weight[[1, 0]]  # the same numbers in other places
    found = base_of(changed, "there")
    differing = [name for name in found.digests if found.digests[name] != expected.digests[name]]
    assert differing == ["layers.1.mixer.wq.weight"]
    if rank == 0:
        write_base(tmp_path / "base.json", expected)
    dist.barrier()
    assert read_base(tmp_path / "base.json") == expected
    check_same_base(tmp_path / "base.json", base_of(build("hybrid", own), "here"))
    with pytest.raises(
        UserError, match=r"\(from here\), found another one from there: layers\.1\.mixer\.wq\.weight is"
    ):
        check_same_base(tmp_path / "base.json", found)
    half = base_of(build("hybrid", settings(train_also=["norm.weight"], base_dtype="bfloat16")), "here")
    with pytest.raises(UserError, match=r"tok_embeddings\.weight is bfloat16 \[64, 16\]"):
        check_same_base(tmp_path / "base.json", half)


def test_ranks_with_other_values_are_found() -> None:
    model = randomised(build("llama", settings()))
    assert base_of(model, "x") == base_of(build("llama", settings()), "x")  # adapters do not count


def test_run_resume_and_generate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, whole, broken = config_file(tmp_path), tmp_path / "whole", tmp_path / "broken"
    assert train_here(config, *LORA, *OURS, "--run.dir", whole) == 0
    assert "trains 4,128 of 39,072 parameters" in capsys.readouterr().out
    assert train_here(config, *LORA, *OURS, "--run.dir", broken, "--train.steps", "4") == 0
    shrunk = tmp_path / "shrunk"
    shutil.copytree(broken, shrunk)
    assert train_here(config, *LORA, *OURS, "--resume", broken) == 0
    assert losses(broken) == losses(whole)
    # On two ranks, too: dropout depends on the sample alone.
    assert ranks(2, "train", config, *LORA, *OURS, "--resume", shrunk) == [(0, ""), (0, "")]
    assert losses(shrunk) == pytest.approx(losses(whole), rel=1e-5)
    newest = whole / "checkpoints" / "step-8"
    sizes = stored_sizes(newest)
    assert {name for name in sizes if name.startswith("model.") and "lora" not in name} == {
        "model.norm.weight"
    }
    steps = sum(name.endswith(".step") for name in sizes)
    own = sum(size for name, size in sizes.items() if not name.startswith("generators."))
    assert own - steps == 3 * 4128  # the trained parameters and their two moments
    capsys.readouterr()
    assert cli.main(["generate", str(whole), "--prompt", "import ", "--tokens", "5"]) == 0
    assert capsys.readouterr().out.startswith("import ")


def stored_sizes(folder: Path) -> dict[str, int]:
    """Elements of each tensor of a checkpoint."""
    entries = FileSystemReader(folder).read_metadata().state_dict_metadata
    return {name: entry.size.numel() for name, entry in entries.items() if hasattr(entry, "size")}


@pytest.mark.extensive("each engine")
def test_every_engine_trains_adapters(tmp_path: Path) -> None:
    config, alone = config_file(tmp_path), tmp_path / "none"
    assert train_here(config, *LORA, "--run.dir", alone) == 0
    for engine in ("ddp", "fsdp2", "shardwright"):
        run = tmp_path / engine
        arguments = ("train", config, *LORA, "--parallel.engine", engine, "--run.dir", run)
        assert ranks(2, *arguments) == [(0, ""), (0, "")]
        assert losses(run) == pytest.approx(losses(alone), rel=1e-5)
        assert read_base(run / "base.json") == read_base(alone / "base.json")


@pytest.mark.extensive("another run and its resume")
def test_adapters_of_a_model_with_tied_embeddings_are_read_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """torch leaves out a frozen parameter under one of its names, and stores it under the other."""
    config, run = config_file(tmp_path), tmp_path / "run"
    arguments = ("--model.tied_embeddings", "true", "--finetune.method", "lora", "--run.dir", run)
    assert ranks(2, "train", config, *arguments, *OURS, "--train.steps", "4") == [(0, ""), (0, "")]
    stored = stored_sizes(run / "checkpoints" / "step-4")
    assert all("lora" in name for name in stored if name.startswith("model."))
    capsys.readouterr()
    assert cli.main(["generate", str(run), "--prompt", "import ", "--tokens", "5"]) == 0
    assert train_here("--resume", run, "--train.steps", "6") == 0


@pytest.mark.extensive("another run")
def test_another_base_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, folder = config_file(tmp_path), tmp_path / "run"
    assert train_here(config, *LORA, "--run.dir", folder, "--train.steps", "3") == 0
    capsys.readouterr()

    def refused(words: str, *arguments: str) -> None:
        assert train_here(config, *LORA, *arguments, "--resume", folder) == 2
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 1, error

    refused("expected finetune.rank = 4 as in", "--finetune.rank", "8")
    refused("expected finetune.targets = none as in", "--finetune.targets", '["wq"]')
    file = RunFolder(folder).base_file
    good = file.read_text()
    content = json.loads(good)
    file.write_text(good.replace("run.seed = 0", "run.seed = 1"))
    refused("found a damaged file: base.json is not the file that was saved")
    file.unlink()
    refused("expected the reference to the base of this run, found no such file")
    base = content["parameters"]
    name = "layers.1.feed_forward.w2.weight"
    write_base(file, Base("elsewhere", {**base, name: "float32 [32, 64] 0000000000000000"}))
    refused(f"(from elsewhere), found another one from run.seed = 0: {name} is float32 [32, 64]")
    file.write_text(good)
    assert train_here(config, *LORA, "--resume", folder) == 0


@pytest.mark.extensive("another run")
def test_a_run_starts_from_adapters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_file(tmp_path)
    overrides = [(name.removeprefix("--"), value) for name, value in zip(LORA[::2], LORA[1::2], strict=True)]
    own = load_config(config, overrides)
    model = build_model(own.model, 256)
    adapt(model, own.finetune, 0)
    randomised(model)
    names = hugging_face.key_map(own.model.shape())
    write_adapters(model, tmp_path / "adapters", own.finetune, key_map=names)
    fresh, started = tmp_path / "fresh", tmp_path / "started"
    assert train_here(config, *LORA, *OURS, "--run.dir", fresh, "--train.steps", "2") == 0
    given = ("--finetune.adapters", str(tmp_path / "adapters"))
    assert train_here(config, *LORA, *OURS, *given, "--run.dir", started, "--train.steps", "2") == 0
    assert losses(started)[0] != pytest.approx(losses(fresh)[0], rel=1e-3)
    capsys.readouterr()
    elsewhere = (*LORA, "--parallel.engine", "fsdp2", *given, "--run.dir", tmp_path / "other")
    assert train_here(config, *elsewhere) == 2
    assert "parallel.engine: expected 'shardwright', 'ddp' or 'none' with" in capsys.readouterr().err
    wrong = ("--finetune.adapters", str(tmp_path / "nowhere"))
    assert train_here(config, *LORA, *OURS, *wrong, "--run.dir", tmp_path / "other") == 2
    assert "expected a folder of adapters, found no adapter_config.json" in capsys.readouterr().err
