"""The checkpoints that a run keeps, its behaviour if one cannot be written, and their readers."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard

import shardwright as sw
from shardwright import cli
from shardwright.checkpoint import nested
from shardwright.checkpoint.format.archive import host_bytes
from shardwright.checkpoint.format.index import name_of, parse_index
from shardwright.checkpoint.save import collective_save
from shardwright.checkpoint.storage.local_files import LocalFiles
from shardwright.engine import RankGroup
from shardwright.train.config import CheckpointConfig
from shardwright.train.errors import UserError
from shardwright.train.models.build import build_model
from shardwright.train.report.reporter import Reporter
from shardwright.train.run.position import Position
from shardwright.train.step import loading
from shardwright.train.step.loading import verified_checkpoint
from shardwright.train.step.saving import checkpoint
from shardwright.train.step.saving.checkpoint import SaveFailedError
from shardwright.train.step.saving.saves import SOUND, Condition, Saves, steps_to_delete
from tests.checkpoint.kit.states import load_state
from tests.support import multirank
from tests.train.kit.damage import Job, flipped
from tests.train.kit.jobs import config_file, losses, ranks, run_record, steps_in, tiny, train_here, trainer
from tests.train.kit.parallel import take_steps


class Small:
    """A plain model with checkpoints in a folder."""

    def __init__(self, checkpoints: Path, features: int = 3) -> None:
        self.checkpoints = checkpoints
        self.model = nn.Linear(features, 2)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.reporter = Reporter([])

    def saves(self, **settings: Any) -> Saves:
        """As of a new session of the run."""
        return Saves(CheckpointConfig(**settings), self.checkpoints, self.reporter)

    def save(self, saves: Saves, step: int, last: bool = False) -> None:
        self.model(torch.ones(self.model.in_features)).sum().backward()
        self.optimizer.step()
        saves.save(self.model, self.optimizer, Position(step, step), last)

    def damage(self, step: int) -> None:
        """Without another length, so that only digests show it."""
        flipped(self.checkpoints / f"step-{step}" / "__0_0.distcp", self.checkpoints)


# -- which ones stay ---------------------------------------------------------------------------------------------------


def test_the_newest_stay_and_those_of_every_nth_step(tmp_path: Path) -> None:
    job = Small(tmp_path)
    saves = job.saves(keep=2, keep_every=4)
    for step in range(1, 11):
        job.save(saves, step)
    assert steps_in(tmp_path) == [10, 9, 8, 4]
    job.save(job.saves(keep=1), 11)
    assert steps_in(tmp_path) == [11]


def test_damaged_checkpoints_do_not_count(tmp_path: Path) -> None:
    """One whose bytes changed takes no place of a whole one, and goes when enough whole ones are newer."""
    job = Small(tmp_path)
    for step in range(1, 5):
        job.save(job.saves(keep=3), step)
    assert steps_in(tmp_path) == [4, 3, 2]
    job.damage(3)
    job.save(job.saves(keep=2), 5)
    assert steps_in(tmp_path) == [5, 4]
    job.damage(4)
    saves = job.saves(keep=2, keep_every=4)
    job.save(saves, 6)
    assert steps_in(tmp_path) == [6, 5, 4]
    job.save(saves, 7)
    job.save(saves, 8)
    assert steps_in(tmp_path) == [8, 7, 4]  # a step to keep for ever, damaged or not
    # After a fall-back from damaged ones to an older step.
    job.damage(8)
    job.save(job.saves(keep=1), 7)
    assert steps_in(tmp_path) == [7]


def test_nothing_is_read_if_nothing_is_to_delete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Small(tmp_path)
    for step in (1, 2, 3):
        job.save(job.saves(keep=5), step)
    compared: list[str] = []
    real = loading.verified_checkpoint

    def counted(folder: Path, *arguments: Any) -> Any:
        compared.append(folder.name)
        return real(folder, *arguments)

    monkeypatch.setattr(loading, "verified_checkpoint", counted)
    job.save(job.saves(keep=4), 4)
    assert compared == []
    saves = job.saves(keep=3)
    for step in (5, 6, 7):
        job.save(saves, step)
    assert compared == ["step-4", "step-3"]  # once, and none that this session has written
    assert steps_in(tmp_path) == [7, 6, 5]


@pytest.mark.parametrize("again", [False, True], ids=["a new step", "the same step"])
def test_bytes_that_change_on_their_way_to_the_disk_cost_no_older_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    job = Small(tmp_path)
    saves = job.saves(keep=1, on_save_failure="continue")
    job.save(saves, 1)
    before = (tmp_path / "step-1" / "index.json").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(
            LocalFiles,
            "drop_from_cache",
            lambda folder, file: flipped(folder.path / file, folder.path),
        )
        job.save(saves, 1 if again else 2)
    (failure,) = job.reporter.failed_saves
    assert "read back after it was written, __0_0.distcp is not the file that was saved" in failure
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
    assert (tmp_path / "step-1" / "index.json").read_bytes() == before
    verified_checkpoint(tmp_path / "step-1")
    job.save(saves, 2)
    assert steps_in(tmp_path) == [2]


# -- saves that fail ---------------------------------------------------------------------------------------------------


@multirank(2)
def test_a_rank_that_cannot_write_stops_or_delays_all(rank: int, world_size: int, tmp_path: Path) -> None:
    job = Job(tmp_path)

    def save(saves: Saves, step: int, failing: bool, last: bool = False) -> None:
        job.at(step)
        with pytest.MonkeyPatch.context() as patch:
            if failing and rank == 1:
                patch.setattr(os, "pwrite", _no_disk)
            saves.save(job.model, job.optimizer, Position(step, 4 * step), last)

    reporter = Reporter([])
    stops = Saves(CheckpointConfig(), tmp_path, reporter)
    save(stops, 1, failing=False)
    problem = (
        r"step-2: cannot write: rank 1: \S+/__1_0.distcp: Input/output error; earlier files are unchanged"
    )
    with pytest.raises(SaveFailedError, match=problem):
        save(stops, 2, failing=True)
    goes_on = Saves(CheckpointConfig(keep=1, on_save_failure="continue"), tmp_path, reporter)
    save(goes_on, 3, failing=True)
    assert len(reporter.failed_saves) == 1
    assert "checkpoint of step 3: " in reporter.failed_saves[0] and "rank 1" in reporter.failed_saves[0]
    dist.barrier()
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"] and job.load().step == 1
    save(goes_on, 4, failing=False)
    assert steps_in(tmp_path) == [4] and job.load().step == 4 and job.is_at(4)
    with pytest.raises(SaveFailedError, match="step-5: cannot write: rank 1"):
        save(goes_on, 5, failing=True, last=True)


@multirank(2)
def test_all_ranks_say_that_the_metrics_are_damaged(rank: int, world_size: int, tmp_path: Path) -> None:
    """Only the first one reads them, to find the best checkpoint."""

    class Best:
        def among(self, steps: Any) -> None:
            raise UserError("metrics.jsonl: line 3 is damaged", passes=True)

    job = Job(tmp_path)
    job.at(1)
    saves = Saves(CheckpointConfig(), tmp_path, Reporter([]), best=Best())  # type: ignore[arg-type]
    with pytest.raises(UserError) as error:
        saves.save(job.model, job.optimizer, Position(1, 4))
    assert str(error.value) == "metrics.jsonl: line 3 is damaged" and error.value.status == UserError.PASSING


@pytest.mark.parametrize("name", ["loss.png", "summary.txt"])
def test_a_run_whose_last_files_cannot_be_written_is_not_finished(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """A resume writes them."""
    config, folder = config_file(tmp_path), tmp_path / "run"
    (folder / name).mkdir(parents=True)
    assert train_here(config, "--run.dir", folder) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and f"{name}: cannot write: Is a directory" in error
    assert run_record(folder)["status"] == "failed" and steps_in(folder / "checkpoints")[0] == 8
    (folder / name).rmdir()
    assert train_here(config, "--resume", folder) == 0
    record = run_record(folder)
    assert (
        record["status"] == "finished" and record["results"]["train_loss"] > 0 and (folder / name).is_file()
    )
    assert len(losses(folder)) == 8
    assert train_here(config, "--resume", folder) == 2 and "set more steps" in capsys.readouterr().err


def _no_disk(*arguments: Any) -> int:
    raise OSError(5, os.strerror(5))


def test_a_failed_save_is_in_the_metrics_and_the_summary(
    tmp_path: Path, plain_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = collective_save.write_boxes

    def fails_once(folder: Path, *arguments: Any) -> Any:
        if "step-3" not in str(folder):
            return real(folder, *arguments)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "pwrite", _no_disk)
            return real(folder, *arguments)

    monkeypatch.setattr(collective_save, "write_boxes", fails_once)
    config, folder = config_file(tmp_path), tmp_path / "run"
    goes_on = ("--checkpoint.on_save_failure", "continue")
    assert train_here(config, "--run.dir", folder, *goes_on) == 0
    out = capsys.readouterr().out
    assert out.count("warning: checkpoint of step 3: ") == 1
    assert "  warning         checkpoint of step 3: " in folder.joinpath("summary.txt").read_text()
    assert steps_in(folder / "checkpoints") == [8, 6]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (failure,) = [line for line in lines if "save_failure" in line]
    assert failure["step"] == 3 and "__0_0.distcp: Input/output error" in failure["save_failure"]
    assert run_record(folder)["results"]["failed_saves"] == 1
    assert [line["loss"] for line in lines if line is not failure] == losses(plain_run)
    # Every reader of metrics, and a resume.
    assert cli.main(["compare", str(plain_run), str(folder), "--out", str(tmp_path / "compared")]) in (0, 2)
    assert train_here(config, "--resume", folder, "--train.steps", "9", *goes_on) == 0
    assert (folder / "metrics.jsonl").read_text().count("save_failure") == 1


def test_the_last_save_of_a_run_must_succeed(tmp_path: Path) -> None:
    """On two ranks, on a disk on which no checkpoint fits: the run goes to its end, and ends with an error."""
    folder, config = tmp_path / "run", config_file(tmp_path)
    arguments = ("train", config, "--parallel.engine", "ddp", "--run.dir", folder)
    goes_on = ("--checkpoint.on_save_failure", "continue")
    (status, err), (other, silent) = ranks(2, *arguments, *goes_on, largest_file=64_000)
    assert (status, other, silent) == (2, 2, "")
    assert err.startswith("error: ") and "step-8: cannot write: " in err and err.count("\n") == 1
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "save_failure" in line] == [3, 6]
    assert sum("loss" in line for line in lines) == 8
    assert run_record(folder)["status"] == "failed"
    assert list((folder / "checkpoints").iterdir()) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Any:
    disk = tmp_path / "disk"
    disk.mkdir()
    options = ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(options, capture_output=True).returncode:
        pytest.skip("only root can mount a small disk")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize(
    "reason", ["No space left on device: the checkpoint needs 1", "__0_0.distcp: No space left on device"]
)
def test_a_full_disk_keeps_what_is_on_it(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    if "__0_0" in reason:  # as if another program took the space in between
        monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(0, 0, 1 << 40))
    job = Small(small_disk, features=7_000)  # 168 KB with its moments
    saves = job.saves(keep=1, on_save_failure="continue")
    job.save(saves, 1)
    job.save(saves, 2)
    (failure,) = job.reporter.failed_saves
    assert reason in failure and "Free some space" in failure
    assert [path.name for path in small_disk.iterdir()] == ["step-1"]
    verified_checkpoint(small_disk / "step-1")


# -- readers -----------------------------------------------------------------------------------------------------------


def test_load_checkpoint_reads_the_checkpoint_of_a_run(tmp_path: Path, sharded_run: Path) -> None:
    """Saved by two ranks, into a plain model and an optimizer of the user's own, with the groups of the trainer."""
    folder = sharded_run / "checkpoints" / "step-8"
    model, expected = (build_model(tiny().model, 256) for _ in range(2))
    loading.load_weights(folder, expected)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.5)
    with pytest.warns(UserWarning, match="saved by 2 ranks"):
        extra = sw.load_checkpoint(folder, model, optimizer)
    assert extra["position"] == {"step": 8, "samples": 64}
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))
    assert {float(state["step"]) for state in optimizer.state.values()} == {8.0}
    assert {group["lr"] for group in optimizer.param_groups} == {1e-2}
    assert sw.load_checkpoint(folder, model, generators=False)["position"]["step"] == 8


@multirank(2)
def test_fsdp2_reads_the_checkpoint_of_a_run(
    rank: int, world_size: int, tmp_path: Path, plain_run: Path
) -> None:
    """Saved by one rank, with torch's own reader, as a user of FSDP2 calls it."""
    folder = plain_run / "checkpoints" / "step-8"
    model, expected = (build_model(tiny().model, 256) for _ in range(2))
    loading.load_weights(folder, expected)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    weights, moments = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": weights, "optimizer": moments, "extra": {"position": {"step": 0}}}
    dcp.load(state, checkpoint_id=folder)
    assert state["extra"]["position"]["step"] == 8
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert all(torch.equal(value, expected.state_dict()[name]) for name, value in full.items())
    assert {float(each["step"]) for each in optimizer.state.values()} == {8.0}
    assert optimizer.param_groups[0]["lr"] == 1e-2


@pytest.mark.extensive("each number of ranks")
@multirank(1, 2, 3)
@pytest.mark.parametrize("strategy", ["zero3", "zero1"])
def test_any_number_of_ranks_gets_the_same_bits(
    rank: int, world_size: int, tmp_path: Path, sharded_run: Path, plain_run: Path, strategy: str
) -> None:
    """From checkpoints of one rank and of two, and from there into a new checkpoint: weights and optimizer."""
    settings = {"engine": "shardwright", "strategy": strategy, "layout": "ragged"}
    config = tiny(train={"global_batch": 12}, parallel=settings)
    for run in (plain_run, sharded_run):
        job = trainer(config, rank, world_size)
        source = run / "checkpoints" / "step-8"
        loaded = loading.load(source, job.model, job.optimizer)
        assert loaded.position == Position(8, 64)
        assert loaded.ranks == (1 if run == plain_run else 2) and loaded.generators
        copies = tmp_path / run.parent.name
        copy = checkpoint.save(copies, job.model, job.optimizer, loaded.position)
        assert _digests(copy) == _digests(source)


def _digests(folder: Path) -> dict[str, str]:
    """The digest of each tensor of model and optimizer, whole."""
    index = parse_index((folder / "index.json").read_bytes())
    tensors = {
        each.path: torch.empty(each.shape, dtype=each.dtype)
        for name, each in index.tensors.items()
        if not name.startswith("generators.")
    }
    load_state(folder, nested(tensors), RankGroup(alone=True))
    return {
        name_of(path): hashlib.sha256(bytes(host_bytes(tensor)[0])).hexdigest()
        for path, tensor in tensors.items()
    }


# -- random generators, and later versions -----------------------------------------------------------------------------


def _draws() -> list[float]:
    return [*torch.rand(3).tolist(), random.random()]


@multirank(2)
def test_generators_go_on_at_the_same_number_of_ranks(rank: int, world_size: int, tmp_path: Path) -> None:
    job = trainer(tiny(parallel={"engine": "shardwright"}), rank, world_size)
    take_steps(job, 1)
    torch.manual_seed(rank)
    random.seed(rank)
    _draws()
    folder = checkpoint.save(tmp_path, job.model, job.optimizer, job.position)
    expected = _draws()
    loaded = loading.load(folder, job.model, job.optimizer)
    assert loading.continue_generators(loaded, 5, RankGroup()) is None
    assert _draws() == expected
    # As of another number of ranks: a seed of each rank, the same whenever it is loaded.
    other = replace(loaded, ranks=3)
    line = loading.continue_generators(other, 5, RankGroup())
    assert line == (
        "the checkpoint of step 1 was saved by 3 ranks and is loaded by 2 ranks: random generators do not go on where "
        "they were; each rank has a seed derived from run.seed, the step and the rank"
    )
    drawn = _draws()
    loading.continue_generators(other, 5, RankGroup())
    assert _draws() == drawn
    everyones: list[Any] = [None] * world_size
    dist.all_gather_object(everyones, drawn)
    assert everyones[0] != everyones[1]
    loading.continue_generators(other, 6, RankGroup())
    assert _draws() != drawn
    foreign = replace(loaded, generators={"torch": torch.zeros(3, dtype=torch.uint8)})
    assert "that cannot be restored" in (loading.continue_generators(foreign, 5, RankGroup()) or "")
    assert _draws() == drawn


def test_a_run_says_that_generators_start_again(
    tmp_path: Path, sharded_run: Path, plain_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for source, expected in ((sharded_run, 1), (plain_run, 0)):
        folder = tmp_path / source.parent.name
        shutil.copytree(source, folder)
        capsys.readouterr()
        assert train_here(config_file(tmp_path), "--resume", folder, "--train.steps", "9") == 0
        out = capsys.readouterr().out
        assert out.count("was saved by 2 ranks and is loaded by 1 rank: random generators") == expected
        assert out.count("random generators") == expected


def test_a_later_version_is_an_error_and_no_fall_back(
    tmp_path: Path, plain_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(plain_run, folder)
    index = folder / "checkpoints" / "step-8" / "index.json"
    body = index.read_bytes().rpartition(b'"sha256": "')[0].replace(b'"version": 1', b'"version": 7')
    index.write_bytes(body + b'"sha256": "' + hashlib.sha256(body).hexdigest().encode() + b'"}\n')
    resume = ("train", "--resume", folder, "--train.steps", "9")
    for command in (resume, ("generate", folder, "--prompt", "x"), ("inspect", folder)):
        capsys.readouterr()
        assert cli.main([*map(str, command)]) == 2
        out, err = capsys.readouterr()
        assert err.startswith("error: ") and err.count("\n") == 1 and "falling back" not in out
        assert "step-8: index.json has version 7 of the format" in err and "newer shardwright" in err
    (status, err), (other, silent) = ranks(2, "train", "--parallel.engine", "ddp", *resume[1:])
    assert (status, other, silent) == (2, 2, "") and "newer shardwright" in err and err.count("\n") == 1
    assert losses(folder) == losses(plain_run)


@pytest.mark.parametrize("seed", range(60))
def test_which_checkpoints_stay(seed: int) -> None:
    """Against the rule in words, for random steps, damages and settings."""
    draw = random.Random(seed)
    steps = sorted(draw.sample(range(1, 30), draw.randint(1, 9)), reverse=True)
    newest = draw.choice(steps)
    damaged = {step for step in steps if step != newest and draw.random() < 0.3}
    keep, every, best = draw.randint(1, 4), draw.choice([0, 0, 3, 5]), draw.choice([None, *steps])
    settings = CheckpointConfig(keep=keep, keep_every=every)
    asked: list[int] = []

    def condition(step: int) -> Condition:
        asked.append(step)
        return Condition("damaged", "bytes differ") if step in damaged else SOUND

    back = draw.choice([0, 0, 2, 7, 40])
    gone = steps_to_delete(steps, newest, best, settings, condition, back)
    whole = [step for step in steps if step <= newest and step not in damaged]
    far = [step for step in whole if step <= newest - back]
    oldest = min(whole[keep - 1], far[0]) if len(whole) >= keep and far else 0  # with fewer, nothing is old
    expected = {step for step in steps if (step > newest and step in damaged) or step < oldest}
    expected -= {step for step in expected if step <= newest and every and step % every == 0} | {best}
    assert set(gone) == expected and len(gone) == len(expected)
    assert len(asked) == len(set(asked))


@pytest.mark.parametrize("seed", range(80))
def test_a_rewind_is_possible_in_every_step_of_a_run_that_is_long_enough(seed: int) -> None:
    """It goes back to the same checkpoint as if none had been deleted, and no older one stays for it. After a rewind,
    which deletes those after its step, the run must go on for as many steps again."""
    draw = random.Random(seed)
    every, keep, back = draw.randint(1, 12), draw.randint(1, 4), draw.choice([0, 1, 5, 17, 40])
    settings = CheckpointConfig(keep=keep, keep_every=draw.choice([0, 0, 4 * every]))
    kept: list[int] = []  # newest first
    saved = set[int]()
    begin, step, best = 0, 0, None
    for _ in range(12 * every + 3 * back):
        step += 1
        old = [each for each in kept if each <= step - back]
        if step >= begin + max(back, 1) + every:  # before the save of this step
            assert old and old[0] == max(each for each in saved if each <= step - back), (step, kept)
        if old and draw.random() < 0.02:
            begin = step = old[0]
            kept = [each for each in kept if each <= step]
            saved = {each for each in saved if each <= step}
        if step % every == 0 and step not in kept:
            kept, saved = [step, *kept], saved | {step}
            best = step if draw.random() < 0.2 else best
            gone = steps_to_delete(kept, step, best, settings, lambda step: SOUND, back)
            kept = [each for each in kept if each not in gone]
            nth = settings.keep_every
            others = [each for each in kept if each != best and not (nth and each % nth == 0)]
            assert len(others) <= max(keep, -(-back // every) + 1)


def test_checkpoints_for_a_rewind_stay(tmp_path: Path) -> None:
    config, folder = config_file(tmp_path), tmp_path / "run"
    options = ("--checkpoint.every", "1", "--checkpoint.keep", "1", "--validation.every", "0")
    assert train_here(config, "--run.dir", folder, *options, "--fault.rewind_steps", "3") == 0
    assert steps_in(folder / "checkpoints") == [8, 7, 6, 5]
