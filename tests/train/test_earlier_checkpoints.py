"""Checkpoints of versions up to 0.2, by torch's writer with a position.json: they resume, and damage is noticed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from shardwright import cli
from shardwright.checkpoint import folders
from shardwright.train.checkpoint import saved_steps
from shardwright.train.steps import Position
from tests.support import multirank
from tests.support.payloads import Payload, plant_beside, runs
from tests.train.damage import DAMAGES, Job, on_first_rank, restored
from tests.train.jobs import config_file, losses, ranks, train_here
from tests.train.kit.earlier import rewrite_as_before, save_alone, save_as_before, write_position

FILES = (".metadata", "__0_0.distcp", "__1_0.distcp", "position.json")


@pytest.mark.extensive("test_damage has the present form")
@multirank(2)
def test_any_damage_makes_all_ranks_fall_back(rank: int, world_size: int, tmp_path: Path) -> None:
    job = Job(tmp_path / "checkpoints")
    before, newest = save_as_before(job, 1), save_as_before(job, 2)
    assert sorted(file.name for file in newest.iterdir()) == sorted(FILES)
    on_first_rank(lambda: shutil.copytree(newest, tmp_path / "pristine"))
    job.at(5)
    assert job.load() == Position(2, 8) and job.is_at(2) and job.said == []
    for name in FILES:
        for kind in ("missing", "cut off", "flipped", "a link to the same"):
            on_first_rank(lambda kind=kind, name=name: DAMAGES[kind](newest / name, before / name))
            assert job.load() == Position(1, 4) and job.is_at(1), (name, kind)
            (said,) = job.said
            assert said.startswith(f"{newest} is damaged (") and name in said, (name, kind, said)
            on_first_rank(lambda: restored(newest, tmp_path / "pristine"))
    # The next save is in the new form; a resume falls back from it to the old one.
    after = job.save(3)
    assert job.load().step == 3 and job.is_at(3)
    on_first_rank((after / "index.json").unlink)
    assert job.load().step == 2 and job.is_at(2)
    assert job.said[0].startswith(f"{after} is damaged (index.json is missing beside __values.distcp")


@multirank(2)
def test_checkpoints_without_checksums_are_loaded_and_said(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    """As the first versions wrote them. Damage that torch meets while it reads makes all ranks fall back."""
    job = Job(tmp_path / "checkpoints")
    before, newest = save_as_before(job, 1), save_as_before(job, 2)
    for folder in (before, newest):
        step = int(folder.name.removeprefix("step-"))
        on_first_rank(lambda f=folder, s=step: write_position(f, Position(s, 4 * s), digests=False))
    assert job.load().step == 2 and job.is_at(2)
    assert job.said == [f"{newest} was saved without checksums; only the sizes of its files are compared"]
    file = newest / "__1_0.distcp"
    on_first_rank(lambda: file.write_bytes(bytes(file.stat().st_size)) and None)
    assert job.load().step == 1 and job.is_at(1)
    assert "could not read it: " in job.said[1]
    # Checksums that were there once do not go missing unnoticed.
    for before_key, key in (('"files":', '"fixes":'), ('"sha256":', '"sha257":')):
        save_as_before(job, 3)
        on_first_rank(
            lambda b=before_key, k=key: _replace(job.checkpoints / "step-3" / "position.json", b, k)
        )
        assert job.load().step == 1 and "position.json" in job.said[0]


def _replace(file: Path, before: str, after: str) -> None:
    head, tail = file.read_text().rsplit(before, 1)
    file.write_text(head + after + tail)


def test_a_run_of_the_old_form_goes_on(
    tmp_path: Path, plain_run: Path, sharded_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On one rank and on two, with the losses of the run that was never interrupted; and the old ones get deleted."""
    config = config_file(tmp_path)
    for source, engine, count in ((plain_run, "none", 1), (sharded_run, "shardwright", 2)):
        folder = tmp_path / engine
        shutil.copytree(source, folder)
        checkpoints = folder / "checkpoints"
        shutil.rmtree(checkpoints / "step-8")
        rewrite_as_before(checkpoints / "step-6")
        command = ("train", config, "--parallel.engine", engine, "--resume", folder, "--checkpoint.keep", "1")
        capsys.readouterr()
        if count == 1:
            assert cli.main([*map(str, command)]) == 0
            out = capsys.readouterr().out
            assert "the checkpoint of step 6 has no states of random generators: " in out
        else:
            assert ranks(2, *command) == [(0, ""), (0, "")]
        assert losses(folder) == losses(source)
        assert saved_steps(checkpoints) == [8]
    folder = tmp_path / "none"
    rewrite_as_before(folder / "checkpoints" / "step-8")
    texts = []
    for run in (plain_run, folder):
        capsys.readouterr()
        assert cli.main(["generate", str(run), "--prompt", "x", "--tokens", "5"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert cli.main(["export", str(folder), str(tmp_path / "exported")]) == 0
    assert "step 8," in capsys.readouterr().out


def test_code_does_not_run(tmp_path: Path, plain_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In metadata, and in values that are no tensors, which torch unpickles; with checksums that fit."""
    folder, evidence, config = tmp_path / "run", tmp_path / "evidence", config_file(tmp_path)
    shutil.copytree(plain_run, folder)
    newest = folder / "checkpoints" / "step-8"
    rewrite_as_before(newest)
    plant_beside(newest / ".metadata", evidence)
    write_position(newest, Position(8, 64))
    assert cli.main(["generate", str(folder), "--prompt", "x", "--tokens", "1"]) == 0
    expected = "step-8 is damaged (.metadata names tests.support.payloads._run, which"
    assert expected in capsys.readouterr().err and not evidence.exists()

    shutil.rmtree(newest)
    shutil.copytree(plain_run / "checkpoints" / "step-8", newest)
    rewrite_as_before(newest)
    metadata = folders.read_metadata(newest)
    values: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)  # type: ignore[union-attr]
        for name, entry in metadata.state_dict_metadata.items()
    }
    folders.load(newest, values, metadata, alone=True)
    key = next(name for name in values if name.endswith("step"))
    values[key] = Payload(evidence)
    shutil.rmtree(newest)
    optimizer: dict[str, Any] = {}
    for name, value in values.items():
        if name.startswith("optimizer."):
            parameter, _, state = name.removeprefix("optimizer.").rpartition(".")
            optimizer.setdefault(parameter, {})[state] = value
    model = {
        name.removeprefix("model."): value for name, value in values.items() if name.startswith("model.")
    }
    save_alone({"model": model, "optimizer": optimizer}, newest)
    assert runs(lambda: dcp.load({key: None}, checkpoint_id=newest, no_dist=True), evidence)
    write_position(newest, Position(8, 64))
    capsys.readouterr()
    assert train_here(config, "--resume", folder, "--train.steps", "9") == 2
    error = capsys.readouterr().err
    assert "found no tensor" in error and error.count("\n") == 1 and not evidence.exists()
