"""Damaged and hostile checkpoints: every rank falls back to the one before, or one error says what is wrong."""

from __future__ import annotations

import os
import shutil
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from shardwright import cli
from shardwright.checkpoint import folders
from shardwright.train import checkpoint, patience, stored
from shardwright.train.checkpoint import saved_steps, what_is_missing
from shardwright.train.errors import UserError
from shardwright.train.stored import POSITION_FILE
from tests.support import multirank
from tests.support.payloads import Payload, code_of_the_system, plant_beside, runs
from tests.train.damage import (
    DAMAGES,
    Job,
    flipped,
    on_first_rank,
    restored,
    sealed_again,
    without_checksums,
)
from tests.train.jobs import config_file, losses, ranks, train_here

FILES = (".metadata", "__0_0.distcp", "__1_0.distcp", POSITION_FILE)


@multirank(2)
def test_any_damage_to_any_file_makes_all_ranks_fall_back(rank: int, world_size: int, tmp_path: Path) -> None:
    job = Job(tmp_path / "checkpoints")
    before, newest = job.save(1), job.save(2)
    assert sorted(file.name for file in newest.iterdir()) == sorted(FILES)
    on_first_rank(lambda: shutil.copytree(newest, tmp_path / "pristine"))
    assert job.load().step == 2 and job.is_at(2) and job.said == []
    for name in FILES:
        for kind, damage in DAMAGES.items():
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
    foreign = checkpoint.save(other.checkpoints, other.model, other.optimizer, stored.Position(2, 8), keep=2)
    data = (".metadata", "__0_0.distcp", "__1_0.distcp")
    for source, names, expected in (
        (before, FILES, "position.json is of step 1"),
        (before, data, "its SHA-256 differs"),
        (foreign, ("__0_0.distcp",), "its SHA-256 differs"),
        (foreign, (*data[1:],), "its SHA-256 differs"),
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
        found = stored.examine(folder)
        return found if folder != newest else stored.Stored(**{**vars(found), "fingerprint": "another"})

    def unseen(folder: Path) -> Any:
        if folder == newest:
            raise stored.Damaged("no position.json file")
        return stored.examine(folder)

    def unreadable(stored_in: Any, *arguments: Any) -> None:
        if stored_in.folder == newest:
            raise stored.Damaged("__0_0.distcp cannot be read: Input/output error")

    for name, stand_in, expected in (
        ("examine", stale, "rank 1 reads a position.json"),
        ("examine", unseen, "rank 1: no position.json file"),
        ("check_files", unreadable, "rank 1: __0_0.distcp cannot be read"),
    ):
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(checkpoint, name, stand_in)
            assert job.load().step == 1 and job.is_at(1)
            assert expected in job.said[0]
    for error, kind in ((OSError(5, "Input/output error"), None), (MemoryError("none left"), MemoryError)):
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(folders.Reader, "read_data", _fails(folders.Reader.read_data, newest, error))
            if kind is None:
                assert job.load().step == 1 and job.is_at(1)
                assert "rank 1 could not read it: OSError" in job.said[0]
            else:
                with pytest.raises(kind):  # which says nothing about the files: no fall-back
                    job.load()
    assert job.load().step == 2 and job.is_at(2)


def _fails(read_data: Any, folder: Path, error: Exception) -> Any:
    def stand_in(self: Any, *arguments: Any) -> Any:
        if Path(self.path) == folder:
            raise error
        return read_data(self, *arguments)

    return stand_in


@multirank(2)
def test_checkpoints_without_checksums_are_loaded_and_said(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    """As earlier versions wrote them. Damage that torch meets while it reads makes all ranks fall back."""
    job = Job(tmp_path / "checkpoints")
    before, newest = job.save(1), job.save(2)
    on_first_rank(lambda: [without_checksums(folder) for folder in (before, newest)] and None)
    assert job.load().step == 2 and job.is_at(2)
    assert job.said == [f"{newest} was saved without checksums; only the sizes of its files are compared"]
    on_first_rank(
        lambda: (newest / "__1_0.distcp").write_bytes(bytes((newest / "__1_0.distcp").stat().st_size))
    )
    assert job.load().step == 1 and job.is_at(1)
    assert "could not read it: " in job.said[1]
    # Checksums that were there once do not go missing unnoticed.
    job.save(3)
    position = job.checkpoints / "step-3" / POSITION_FILE
    for changed in ('"fixes":', '"sha257":'):
        on_first_rank(lambda changed=changed: _replace(position, changed))
        assert job.load().step == 1 and POSITION_FILE in job.said[0]
        job.save(3)


def _replace(file: Path, key: str) -> None:
    before = {'"fixes":': '"files":', '"sha257":': '"sha256":'}[key]
    head, tail = file.read_text().rsplit(before, 1)
    file.write_text(head + key + tail)


class Killed(BaseException):
    """Stands for the end of the process."""


def test_a_save_that_dies_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path, plain_run: Path) -> None:
    """Stopped at each rename, sync and removal, also where the step is saved again over a folder that is there."""
    source = plain_run / "checkpoints"
    position, digests = stored.Position(8, 64), stored.examine(source / "step-8").digests
    assert digests is not None
    data = {name: digest for name, digest in digests.items() if name.endswith(".distcp")}
    for again in (False, True):
        for moment in range(100):
            checkpoints = tmp_path / f"{again}-{moment}"
            shutil.copytree(source, checkpoints)
            partial, final = checkpoints / ".step-8.partial", checkpoints / "step-8"
            (shutil.copytree if again else shutil.move)(final, partial)
            (partial / POSITION_FILE).unlink()
            died = _dies_at(moment, lambda p=partial, f=final: checkpoint._finish(p, f, position, data, 5))
            whole = [
                s for s in saved_steps(checkpoints) if what_is_missing(checkpoints / f"step-{s}") is None
            ]
            assert whole == saved_steps(checkpoints) and 6 in whole, (again, moment)
            # The next save finds nothing in its way, and takes away what is left.
            checkpoint._make_room(partial, torch.nn.Linear(2, 2))
            assert {path.name for path in checkpoints.iterdir()} == {
                *(f"step-{s}" for s in whole),
                partial.name,
            }
            if not died:
                assert 8 in whole
                break
        assert moment > 4


def _dies_at(moment: int, action: Any) -> bool:
    calls = 0

    def counted(real: Any) -> Any:
        def stand_in(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > moment:
                raise Killed
            return real(*arguments)

        return stand_in

    with pytest.MonkeyPatch.context() as patch:
        for module, name in ((os, "replace"), (checkpoint, "_sync"), (checkpoint, "_remove")):
            patch.setattr(module, name, counted(getattr(module, name)))
        try:
            action()
        except Killed:
            return True
    return False


@multirank(2)
def test_a_save_that_fails_on_one_rank_fails_on_all(rank: int, world_size: int, tmp_path: Path) -> None:
    job = Job(tmp_path / "checkpoints")
    job.save(1)
    full = OSError(28, "No space left on device")
    broken = RuntimeError("no such thing")
    for place, name, error, expected in (
        (1, "digest_of", full, UserError),
        (0, "digest_of", full, UserError),
        (0, "position_text", broken, RuntimeError),
        (1, "digest_of", broken, RuntimeError),
    ):
        with pytest.MonkeyPatch.context() as patch:
            if rank == place:
                patch.setattr(checkpoint, name, _raises(error))
            with pytest.raises(expected, match="No space left" if error is full else "no such thing"):
                job.save(2)
        dist.barrier()
        assert saved_steps(job.checkpoints) == [1]
        assert job.load().step == 1 and job.is_at(1)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(dcp.FileSystemWriter, "write_data", _raises(full))
        with pytest.raises(UserError, match="cannot write: No space left"):
            job.save(2)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(dcp.FileSystemWriter, "write_data", _raises(broken))
        with pytest.raises(RuntimeError, match="rank 1 could not save it: RuntimeError: no such thing"):
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
        checkpoint.save(job.checkpoints, job.model, job.optimizer, stored.Position(2, 8), 5, say)

    def loaded() -> None:
        checkpoint.load(job.checkpoints / "step-2", job.model, job.optimizer, job.shapes, say)

    for module, name, action, expected in (
        (dcp, "save", saved, "saving"),
        (checkpoint, "digest_of", saved, "saving"),
        (checkpoint, "check_files", loaded, "comparing checksums of"),
        (folders, "load", loaded, "loading"),
    ):
        job.said.clear()
        spoken.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(patience, "EVERY", 0.01)
            patch.setattr(module, name, slow(getattr(module, name)))
            action()
        assert any(said.startswith(f"{expected} {job.checkpoints}/step-2: ") for said in job.said), job.said


# -- code in checkpoints -----------------------------------------------------------------------------------------------


def planted(folder: Path, evidence: Path) -> None:
    """Metadata that torch reads as before, running code, with checksums that fit."""
    plant_beside(folder / ".metadata", evidence)
    sealed_again(folder)


def replaced(folder: Path, evidence: Path) -> None:
    """Code in place of the metadata, and in the metadata of a single rank, which torch falls back to."""
    for name in (".metadata", "__0.metadata"):
        (folder / name).write_bytes(code_of_the_system(evidence))


ATTACKS = {
    planted: "step-8 is damaged (.metadata names tests.support.payloads._run, which",
    replaced: "(.metadata is not",
}


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
    config, evidence = config_file(tmp_path), tmp_path / "evidence"
    for attack, expected in ATTACKS.items():
        folder = tmp_path / attack.__name__
        shutil.copytree(plain_run, folder)
        checkpoints = folder / "checkpoints"
        assert saved_steps(checkpoints) == [8, 6]
        attack(checkpoints / "step-8", evidence)
        assert runs(loads_with_torch(checkpoints / "step-8"), evidence)
        assert cli.main(["generate", str(folder), "--prompt", "x", "--tokens", "1"]) == 0
        assert expected in capsys.readouterr().err and not evidence.exists()
        assert train_here(config, "--resume", folder) == 0
        assert expected in capsys.readouterr().out and not evidence.exists()
        assert losses(folder) == losses(plain_run) and what_is_missing(checkpoints / "step-8") is None
        attack(checkpoints / "step-6", evidence)
        assert train_here(config, "--resume", folder, "--train.steps", "9") == 0
        assert saved_steps(checkpoints) == [9, 8] and not evidence.exists()
        # All attacked: one line, no traceback.
        for step in (9, 8):
            attack(checkpoints / f"step-{step}", evidence)
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


def test_code_in_values_of_a_checkpoint_does_not_run(
    tmp_path: Path, plain_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Values that are no tensors, which torch unpickles: with metadata and checksums that fit."""
    folder, evidence = tmp_path / "run", tmp_path / "evidence"
    shutil.copytree(plain_run, folder)
    newest = folder / "checkpoints" / "step-8"
    metadata = folders.read_metadata(newest)
    optimizer = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)  # type: ignore[union-attr]
        for name, entry in metadata.state_dict_metadata.items()
    }
    folders.load(newest, optimizer, metadata, alone=True)
    key = next(name for name in optimizer if name.endswith("step"))
    optimizer[key] = Payload(evidence)  # type: ignore[assignment]
    shutil.rmtree(newest)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(optimizer, checkpoint_id=newest, no_dist=True)
        assert runs(lambda: dcp.load({key: None}, checkpoint_id=newest, no_dist=True), evidence)
    shutil.copy(plain_run / "checkpoints" / "step-8" / POSITION_FILE, newest)
    sealed_again(newest)
    config = config_file(tmp_path)
    assert train_here(config, "--resume", folder, "--train.steps", "9") == 2
    error = capsys.readouterr().err
    assert "found no tensor" in error and error.count("\n") == 1 and not evidence.exists()


def test_damage_under_several_ranks_is_a_line_and_a_fall_back(tmp_path: Path, sharded_run: Path) -> None:
    """Through the command line, where rank 0 alone prints."""
    config, folder, evidence = config_file(tmp_path), tmp_path / "run", tmp_path / "evidence"
    shutil.copytree(sharded_run, folder)
    planted(folder / "checkpoints" / "step-8", evidence)
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
    assert not evidence.exists()
