"""Damaged and hostile checkpoints: every rank falls back to the one before, or one error says what is wrong."""

from __future__ import annotations

import os
import re
import shutil
import threading
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from shardwright import cli
from shardwright.checkpoint import INDEX, Damaged
from shardwright.checkpoint.load import collective_load
from shardwright.checkpoint.load.checkpoints import OwnCheckpoint
from shardwright.checkpoint.save import collective_save
from shardwright.checkpoint.storage import local_store
from shardwright.checkpoint.training import load_checkpoint
from shardwright.train.config import CheckpointConfig
from shardwright.train.errors import UserError
from shardwright.train.report import progress
from shardwright.train.report.reporter import Reporter
from shardwright.train.run.position import Position, saved_steps
from shardwright.train.run.stored_checkpoint import examine
from shardwright.train.step import loading
from shardwright.train.step.saving import checkpoint
from shardwright.train.step.saving.checkpoint import SaveFailedError
from shardwright.train.step.saving.saves import Saves
from tests.support import multirank
from tests.support.payloads import Payload, code_of_the_system, plant_beside, runs, saved_with
from tests.train.kit.damage import (
    DAMAGES,
    Job,
    flipped,
    on_first_rank,
    restored,
    sealed_again,
    what_is_missing,
)
from tests.train.kit.jobs import config_file, losses, ranks, train_here

FILES = (".metadata", "__0_0.distcp", "__1_0.distcp", "__values.distcp", INDEX)


@pytest.mark.extensive("every file in every way")
@multirank(2)
def test_any_damage_to_any_file_makes_all_ranks_fall_back(rank: int, world_size: int, tmp_path: Path) -> None:
    job = Job(tmp_path / "checkpoints")
    before, newest = job.save(1), job.save(2)
    assert sorted(file.name for file in newest.iterdir()) == sorted(FILES)
    on_first_rank(lambda: shutil.copytree(newest, tmp_path / "pristine"))
    assert job.load().step == 2 and job.is_at(2) and job.said == []
    for name in FILES:
        for kind, damage in DAMAGES.items():
            if (name, kind) == (".metadata", "of another step"):
                continue  # it has the same bytes in every step
            on_first_rank(lambda damage=damage, name=name: damage(newest / name, before / name))
            position = job.load()
            assert (position.step, position.samples) == (1, 4), (name, kind)
            (said,) = job.said
            assert said.startswith(f"{newest} is damaged (") and name in said, (name, kind, said)
            assert job.is_at(1), (name, kind)
            on_first_rank(lambda: restored(newest, tmp_path / "pristine"))
    # Both: one error, the same on all ranks, which names each.
    on_first_rank(lambda: flipped(newest / FILES[2], before))
    on_first_rank(lambda: (before / FILES[0]).unlink())
    with pytest.raises(
        UserError, match=r"found only damaged ones \(step-2: .*__1_0.*; step-1: no .metadata file"
    ):
        job.load()


@multirank(2)
def test_files_that_are_sound_but_of_another_checkpoint(rank: int, world_size: int, tmp_path: Path) -> None:
    """All of another step's, in whole or in part, and of another run of the same model."""
    job, other = Job(tmp_path / "checkpoints"), Job(tmp_path / "other")
    before, newest, foreign = job.save(1), job.save(2), other.save(2)
    on_first_rank(lambda: shutil.copytree(newest, tmp_path / "pristine"))
    with torch.no_grad():
        other.model[0].bias.fill_(9.0)
    foreign = checkpoint.save(other.checkpoints, other.model, other.optimizer, Position(2, 8))
    for source, names, expected in (
        (before, FILES, "index.json is of step 1"),
        (before, FILES[:-1], "is not the file that was saved"),
        (foreign, ("__0_0.distcp",), "is not the file that was saved"),
        (foreign, FILES[1:-1], "is not the file that was saved"),
    ):
        on_first_rank(lambda s=source, n=names: [shutil.copy(s / each, newest / each) for each in n] and None)
        assert job.load().step == 1 and job.is_at(1)
        assert expected in job.said[0]
        on_first_rank(lambda: restored(newest, tmp_path / "pristine"))
    assert job.load().step == 2 and job.is_at(2)


@multirank(2)
def test_what_one_rank_alone_sees_is_agreed_on(rank: int, world_size: int, tmp_path: Path) -> None:
    """A folder that one rank's file system shows otherwise, a read that fails there, and a rank without memory."""
    job = Job(tmp_path / "checkpoints")
    newest = job.save(1) and job.save(2)

    def stale(folder: Path) -> Any:
        stored = examine(folder)
        if folder != newest:
            return stored
        opened = stored.checkpoint.opened
        other = replace(opened, description_file=opened.description_file._replace(fingerprint="?"))
        return replace(stored, checkpoint=replace(stored.checkpoint, opened=other))

    def unseen(folder: Path) -> Any:
        if folder == newest:
            raise Damaged("no index.json file")
        return examine(folder)

    def unreadable(opened: Any, *arguments: Any) -> None:
        if str(opened.place) == str(newest):
            raise Damaged("__0_0.distcp cannot be read: Input/output error")

    for module, name, stand_in, expected in (
        (loading, "examine", stale, "rank 1 reads another description of the checkpoint"),
        (loading, "examine", unseen, "rank 1: no index.json file"),
        (OwnCheckpoint, "verify", unreadable, "rank 1: __0_0.distcp cannot be read"),
    ):
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(module, name, stand_in)
            assert job.load().step == 1 and job.is_at(1)
            assert expected in job.said[0]
    for error, kind in ((OSError(5, "Input/output error"), None), (MemoryError("none left"), RuntimeError)):
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(
                    load_checkpoint, "read_state", _fails(load_checkpoint.read_state, newest, error)
                )
            if kind is None:
                assert job.load().step == 1 and job.is_at(1)
                assert re.search(r"rank 1: __._0.distcp cannot be read: Input/output error", job.said[0])
            else:
                with pytest.raises(kind, match="rank 1: MemoryError: none left"):  # not damage: no fall-back
                    job.load()
    assert job.load().step == 2 and job.is_at(2)


def _fails(read_state: Any, folder: Path, error: Exception) -> Any:
    """Reading tensors of this checkpoint fails with this error of the system."""

    def stand_in(opened: Any, *arguments: Any, **options: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            if str(opened.place) == str(folder):
                patch.setattr(os, "preadv", _raises(error))
            return read_state(opened, *arguments, **options)

    return stand_in


class Killed(BaseException):
    """Stands for the end of the process."""


@pytest.mark.extensive("each moment", but=("a new step",))
@pytest.mark.parametrize("again", [False, True], ids=["a new step", "the same step"])
def test_a_save_that_dies_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path, again: bool) -> None:
    """Stopped at each rename, sync and removal, also where the step is saved again over a folder that is there."""
    weights = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(weights.parameters())
    for moment in range(100):
        checkpoints = tmp_path / str(moment)
        saves = Saves(CheckpointConfig(keep=1), checkpoints, Reporter([]))
        for step in (1, 2):
            weights(torch.ones(3)).sum().backward()
            optimizer.step()
            saves.save(weights, optimizer, Position(step, step))
        assert saved_steps(checkpoints) == [2]
        newest = 2 if again else 3
        died = _dies_at(moment, lambda s=saves, n=newest: s.save(weights, optimizer, Position(n, n)))
        recovered = saved_steps(checkpoints, recover=True)
        assert recovered and recovered[-1] >= 2, moment
        for step in recovered:
            loading.verified_checkpoint(checkpoints / f"step-{step}")
        # The next save finds nothing in its way, and takes away what is left.
        saves.save(weights, optimizer, Position(4, 4))
        assert [path.name for path in checkpoints.iterdir()] == ["step-4"]
        if not died:
            assert recovered == [newest]
            break
    assert moment > 8


def _dies_at(moment: int, action: Any) -> bool:
    calls = 0

    def counted(real: Any) -> Any:
        def stand_in(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > moment:
                raise Killed
            return real(*arguments, **options)

        return stand_in

    with pytest.MonkeyPatch.context() as patch:
        for name in ("rename", "fsync", "unlink", "rmdir"):
            patch.setattr(os, name, counted(getattr(os, name)))
        patch.setattr(local_store, "_exchange", counted(local_store._exchange))
        # A process that was killed tidies nothing.
        patch.setattr(local_store.LocalSave, "abandon", lambda save, names: None)
        try:
            action()
        except Killed:
            return True
    return False


@multirank(2)
def test_a_save_that_fails_on_one_rank_fails_on_all(rank: int, world_size: int, tmp_path: Path) -> None:
    job = Job(tmp_path / "checkpoints")
    job.save(1)
    full, broken, unreadable = OSError(28, "x"), OSError(5, "x"), OSError(30, "x")
    for place, error, expected in (
        (1, full, r"rank 1: \S+/__1_0.distcp: x; earlier files are unchanged. Free some space"),
        (0, full, r"rank 0: \S+/__0_0.distcp: x; earlier files are unchanged. Free some space"),
        (1, broken, r"rank 1: \S+/__1_0.distcp: x"),
        (0, unreadable, r"rank 0: \S+/__0_0.distcp: x; .* Allow this user to write there"),
    ):
        with pytest.MonkeyPatch.context() as patch:
            if rank == place:
                error.strerror = os.strerror(error.errno)
                patch.setattr(os, "pwrite", _raises(error))
            expected = expected.replace(": x", f": {os.strerror(error.errno)}")
            with pytest.raises(SaveFailedError, match=expected):
                job.save(2)
        dist.barrier()
        assert [path.name for path in job.checkpoints.iterdir()] == ["step-1"]
        assert job.load().step == 1 and job.is_at(1)
    for place, module, name in (
        (0, collective_save, "write_descriptions"),
        (1, collective_save, "write_boxes"),
    ):
        with pytest.MonkeyPatch.context() as patch:
            if rank == place:
                patch.setattr(module, name, _raises(RuntimeError("no such thing")))
            with pytest.raises(RuntimeError, match="no such thing"):
                job.save(2)
        dist.barrier()
        assert [path.name for path in job.checkpoints.iterdir()] == ["step-1"]


def _raises(error: Exception) -> Any:
    def stand_in(*arguments: Any, **options: Any) -> Any:
        raise error

    return stand_in


@multirank(2)
def test_long_saves_and_loads_are_not_silent(rank: int, world_size: int, tmp_path: Path) -> None:
    job = Job(tmp_path / "checkpoints")
    job.save(1)
    spoken = threading.Event()

    def say(text: str) -> None:
        job.said.append(text)
        spoken.set()

    def slow(real: Any) -> Any:
        def stand_in(*arguments: Any, **options: Any) -> Any:
            assert spoken.wait(30)
            return real(*arguments, **options)

        return stand_in

    def saved() -> None:
        checkpoint.save(job.checkpoints, job.model, job.optimizer, Position(2, 8), say)

    def loaded() -> None:
        loading.load(job.checkpoints / "step-2", job.model, job.optimizer, say)

    for module, name, action, expected in (
        (collective_save, "write_boxes", saved, "saving"),
        (collective_save, "read_back", saved, "saving"),
        (OwnCheckpoint, "verify", loaded, "loading"),
        (collective_load, "read_boxes", loaded, "loading"),
    ):
        job.said.clear()
        spoken.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(progress, "EVERY", 0.01)
            patch.setattr(module, name, slow(getattr(module, name)))
            action()
        assert any(said.startswith(f"{expected} {job.checkpoints}/step-2: ") for said in job.said), job.said


# -- code in checkpoints -----------------------------------------------------------------------------------------------


def replaced(folder: Path, evidence: Path) -> None:
    """Code in place of the metadata, and in the metadata of a single rank, which torch falls back to."""
    for name in (".metadata", "__0.metadata"):
        (folder / name).write_bytes(code_of_the_system(evidence))


def planted(folder: Path, evidence: Path) -> None:
    """Metadata and values that torch reads as before, running code, with checksums that fit."""
    plant_beside(folder / ".metadata", evidence)
    (folder / "__values.distcp").write_bytes(saved_with(Payload(evidence)))
    sealed_again(folder)


def loads_with_torch(folder: Path) -> Any:
    def load() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                dcp.load({"model": {}}, checkpoint_id=folder, no_dist=True)
            except CheckpointException:
                pass  # after it has run the code

    return load


def test_code_in_checkpoints_runs_nowhere(
    tmp_path: Path, plain_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On resuming, in `generate`, and where checkpoints that were saved before are looked at to delete old ones."""
    config, evidence, folder = config_file(tmp_path), tmp_path / "evidence", tmp_path / "run"
    shutil.copytree(plain_run, folder)
    checkpoints = folder / "checkpoints"
    assert saved_steps(checkpoints) == [8, 6]
    replaced(checkpoints / "step-8", evidence)
    assert runs(loads_with_torch(checkpoints / "step-8"), evidence)
    expected = "step-8 is damaged (.metadata holds"
    assert cli.main(["generate", str(folder), "--prompt", "x", "--tokens", "1"]) == 0
    assert expected in capsys.readouterr().err and not evidence.exists()
    assert train_here(config, "--resume", folder) == 0
    assert expected in capsys.readouterr().out and not evidence.exists()
    assert losses(folder) == losses(plain_run) and what_is_missing(checkpoints / "step-8") is None
    replaced(checkpoints / "step-6", evidence)
    assert train_here(config, "--resume", folder, "--train.steps", "9") == 0
    assert saved_steps(checkpoints) == [9, 8] and not evidence.exists()
    # All attacked: one line, no traceback.
    for step in (9, 8):
        replaced(checkpoints / f"step-{step}", evidence)
    resume = ("train", config, "--resume", folder, "--train.steps", "10")
    for command in (("generate", folder, "--prompt", "x"), resume):
        capsys.readouterr()
        assert cli.main([str(each) for each in command]) == 2
        out, err = capsys.readouterr()
        *notices, last = (out + err).splitlines()
        assert last.startswith("error: ") and "found only damaged ones (step-9: .metadata" in last
        fallbacks = [
            notice.partition("; falling back to ")[2] for notice in notices if "is damaged" in notice
        ]
        assert fallbacks == ["step-8", ""]  # there is none before the last
    assert not evidence.exists()


def test_code_that_torch_would_run_is_never_read(tmp_path: Path, plain_run: Path) -> None:
    """With checksums that fit, so the checkpoint is whole for us: what torch unpickles is written for torch alone."""
    config, evidence, folder = config_file(tmp_path), tmp_path / "evidence", tmp_path / "run"
    shutil.copytree(plain_run, folder)
    newest = folder / "checkpoints" / "step-8"
    planted(newest, evidence)
    assert runs(loads_with_torch(newest), evidence)
    assert cli.main(["generate", str(folder), "--prompt", "x", "--tokens", "1"]) == 0
    assert train_here(config, "--resume", folder, "--train.steps", "9") == 0
    assert len(losses(folder)) == 9 and not evidence.exists()


@pytest.mark.extensive("a job of processes of its own")
def test_damage_under_several_ranks_is_a_line_and_a_fall_back(tmp_path: Path, sharded_run: Path) -> None:
    """Through the command line, where rank 0 alone prints."""
    config, folder = config_file(tmp_path), tmp_path / "run"
    shutil.copytree(sharded_run, folder)
    flipped(folder / "checkpoints" / "step-8" / "__values.distcp", folder)
    job = ("train", config, "--parallel.engine", "shardwright", "--resume", folder)
    assert ranks(2, *job) == [(0, ""), (0, "")]
    assert losses(folder) == losses(sharded_run)
    for step in saved_steps(folder / "checkpoints"):
        flipped(folder / "checkpoints" / f"step-{step}" / "__1_0.distcp", folder)
    (status, err), (other, silent) = ranks(2, *job, "--train.steps", "9")
    assert (status, other, silent) == (2, 2, "")
    assert (
        err.startswith("error: ")
        and err.count("\n") == 1
        and "__1_0.distcp is not the file that was saved" in err
    )
