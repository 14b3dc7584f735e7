"""Jobs that start again by themselves: after a killed rank and an error; and when they do not."""

from __future__ import annotations

import json
import random
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from shardwright import cli
from shardwright.train.config import FaultConfig
from shardwright.train.launch.restarts import Attempt, AttemptEnd, Restarts, without_numbers
from shardwright.train.launch.torchrun import GivenUpError, TorchrunLaunch, record_end
from shardwright.train.rank.rendezvous import fresh_store
from shardwright.train.run.exits import FAILED, TRY_AGAIN, USER_ERROR, Outcome
from shardwright.train.run.folder import RunFolder
from tests.train.kit.faults import environment
from tests.train.kit.jobs import (
    TINY,
    config_file,
    losses,
    ranks as run_ranks,
    read_exit,
    records,
    run,
    run_record,
)
from tests.train.launch.kit.forked import launch

FAULTY = ("--optimizer.name", "tests.train.kit.faults:ADAMW")
SHARDED = ("--parallel.engine", "shardwright")


def weights(run_folder: Path, step: int) -> dict[str, Any]:
    file = run_folder.parent / "weights.pt"
    dcp_to_torch_save(run_folder / "checkpoints" / f"step-{step}", file)
    state: dict[str, Any] = torch.load(file)["model"]
    return state


def ended(folder: Path) -> dict[str, Any]:
    content = read_exit(folder)
    assert content is not None
    return content


def sessions(folder: Path) -> list[tuple[int, int, int, int, str]]:
    return [
        (each["attempt"], each["ranks"], each["from_step"], each["to_step"], each["status"])
        for each in run_record(folder)["sessions"]
    ]


@pytest.mark.extensive("a job as long as a user's")
def test_a_killed_rank_changes_nothing(tmp_path: Path, sharded_run: Path) -> None:
    """Killed at step 5 after the save of step 3."""
    folder = tmp_path / "run"
    faults = environment(tmp_path / "faults", "0 5 SIGKILL")
    arguments = ("--nproc", "2", *SHARDED, *FAULTY, "--run.dir", folder, "--max-restarts", "2")
    status, out, err = run("train", config_file(tmp_path), *arguments, environment=faults)
    assert (status, err) == (0, "")
    (restart,) = [line for line in out.splitlines() if line.startswith("restart ")]
    assert restart.partition(" (log: ")[0] == (
        "restart 1 of 2: rank 0 of 2 was killed by SIGKILL (the system's out-of-memory killer sends this signal, too), "
        "after step 4; resuming from step 3 on 2 ranks"
    )
    undisturbed, resumed = weights(sharded_run, 8), weights(folder, 8)
    assert undisturbed.keys() == resumed.keys()
    assert all(torch.equal(undisturbed[name], resumed[name]) for name in undisturbed)
    assert losses(folder) == losses(sharded_run)
    assert [each["step"] for each in records(folder)] == list(range(1, 9))
    # Step 4 ran again. It is printed once, and its first line is kept.
    shown = [line.split()[1] for line in out.splitlines() if line.startswith("step ") and "loss" in line]
    assert shown == [f"{step}/8" for step in range(1, 9)]
    assert out.count("step 4 runs again; the figures are above") == 1
    dropped = (folder / "metrics.dropped.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in dropped] == [4]
    assert sessions(folder) == [(1, 2, 0, 4, "failed"), (2, 2, 3, 8, "finished")]
    assert "killed by SIGKILL" in run_record(folder)["sessions"][0]["ended_by"]
    exit_content = ended(folder)
    assert exit_content.keys() == {"status", "reason", "step", "saved", "rank", "attempt", "time"}
    assert (exit_content["status"], exit_content["step"], exit_content["attempt"]) == (0, 8, 2)


KINDS = ("SIGKILL", "SIGSEGV", "error", "exit")
STEPS = 6


@dataclass(frozen=True)
class Case:
    """A job in which one rank after another fails, each at another step."""

    ranks: int
    torchrun: bool
    faults: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.ranks}-{'torchrun' if self.torchrun else 'launcher'}-{'-'.join(self.faults)}".replace(
            " ", "."
        )


def cases(seed: int = 21) -> list[Case]:
    """Each kind of failure with each launcher and several numbers of ranks; the rank and the step by chance."""
    draw = random.Random(seed)
    found = []
    for ranks, torchrun in ((1, False), (2, False), (3, False), (1, True), (3, True)):
        # torchrun takes seconds to start ranks again.
        kinds = KINDS[ranks > 1 :: 2] if torchrun else KINDS
        steps = draw.sample(range(1, STEPS + 1), len(kinds))
        faults = [f"{draw.randrange(ranks)} {step} {kind}" for step, kind in zip(steps, kinds, strict=True)]
        found.append(Case(ranks, torchrun, tuple(faults)))
    return found


def job(folder: Path, case: Case) -> tuple[int | None, str, str]:
    folder.mkdir()
    text = TINY.replace("global_batch = 8", "global_batch = 12").replace("steps = 8", f"steps = {STEPS}")
    config = config_file(folder, text.replace("every = 3", "every = 2"))
    restarts = ("--max-restarts", str(len(case.faults)))
    engine = SHARDED if case.ranks > 1 else ()
    arguments = ("train", config, *engine, *FAULTY)
    faults = environment(folder / "faults", *case.faults)
    if not case.torchrun:
        more = ("--nproc", str(case.ranks), "--run.dir", folder / "run", *restarts)
        return launch(folder, *arguments, *more, environment=faults)
    options = ("--standalone", "--nproc-per-node", str(case.ranks), "--monitor-interval", "0.1", *restarts)
    return launch(folder, *arguments, torchrun=options, environment=faults)


def run_of(folder: Path) -> Path:
    """The folder of the run. torchrun's command names none, so each attempt must find that of the first."""
    named = folder / "run"
    (found,) = [named] if named.exists() else (folder / "runs").iterdir()
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """By the number of ranks."""
    folders = {ranks: tmp_path_factory.mktemp("undisturbed") / str(ranks) for ranks in (1, 2, 3)}
    for ranks, folder in folders.items():
        assert job(folder, Case(ranks, False, ())) == (0, ANY, "")
    return {ranks: folder / "run" for ranks, folder in folders.items()}


@pytest.mark.extensive("each number of ranks and launcher")
@pytest.mark.parametrize("case", cases(), ids=str)
def test_failures_change_nothing(tmp_path: Path, undisturbed: dict[int, Path], case: Case) -> None:
    folder = tmp_path / "job"
    status, out, err = job(folder, case)
    assert status == 0, out + err
    run, reference = run_of(folder), undisturbed[case.ranks]
    expected, resumed = weights(reference, STEPS), weights(run, STEPS)
    assert expected.keys() == resumed.keys()
    assert all(torch.equal(expected[name], resumed[name]) for name in expected)
    assert losses(run) == losses(reference)
    assert [each["samples"] for each in records(run)] == [12 * step for step in range(1, STEPS + 1)]
    assert (ended(run)["status"], ended(run)["attempt"]) == (0, len(case.faults) + 1)
    # A rank that fails before the run begins is impossible here, so each attempt is a session.
    assert [each[0] for each in sessions(run)] == list(range(1, len(case.faults) + 2))
    assert [each[4] for each in sessions(run)] == ["failed"] * len(case.faults) + ["finished"]
    for step in range(1, STEPS + 1):
        assert out.count(f"step {step}/{STEPS}  loss") == 1


@pytest.mark.extensive("a job that restarts three times")
def test_from_the_beginning_on_fewer_ranks_until_the_same_error_comes_twice(
    tmp_path: Path, sharded_run: Path
) -> None:
    folder = tmp_path / "run"
    faults = environment(tmp_path / "faults", "0 2 SIGKILL", "0 3 error", "0 3 error")
    arguments = ("--nproc", "2", *SHARDED, *FAULTY, "--run.dir", folder, "--max-restarts", "9")
    options = ("--fault.least_ranks", "1", "--checkpoint.every", "0")
    status, out, err = launch(
        tmp_path, "train", config_file(tmp_path), *arguments, *options, environment=faults
    )
    assert status == 1 and "restart 3" not in out
    assert "; starting from the beginning on 1 rank, since nothing is saved (log: " in out
    assert err.startswith("error: rank 0 of 1 failed with RuntimeError: planned at 0x")
    assert "; the job has ended: the same error came twice after step 2, so it does not start again" in err
    assert sessions(folder) == [(1, 2, 0, 1, "failed"), (2, 1, 0, 2, "failed"), (3, 1, 0, 2, "failed")]
    assert losses(folder) == pytest.approx(losses(sharded_run)[:2], rel=1e-6)
    exit_content = ended(folder)
    assert (exit_content["status"], exit_content["rank"], exit_content["step"]) == (1, 0, 2)
    assert exit_content["reason"].endswith(
        ": the same error came twice after step 2, so it does not start again"
    )


@pytest.mark.extensive("torchrun, where the launcher is enough")
def test_the_same_error_comes_twice_under_torchrun(tmp_path: Path) -> None:
    faults = environment(tmp_path / "faults", *["1 2 error"] * 4)
    options = ("--standalone", "--nproc-per-node", "2", "--monitor-interval", "0.1", "--max-restarts", "3")
    # Rank 0 may have recorded step 2, or not.
    arguments = ("train", config_file(tmp_path), *SHARDED, *FAULTY, "--run.dir", tmp_path / "run")
    status, _, err = launch(tmp_path, *arguments, torchrun=options, environment=faults)
    assert status == 1
    reason = (
        r"RuntimeError: planned at 0x\w+: the same error came twice after step 1, so it does not start again"
    )
    assert re.search(f"^error: {reason}$", err, re.MULTILINE)
    # torchrun has started the ranks four times.
    assert [each[0] for each in sessions(tmp_path / "run")] == [1, 2]
    for session in run_record(tmp_path / "run")["sessions"]:
        assert session["ended_by"].startswith("RuntimeError: planned at 0x")
    content = ended(tmp_path / "run")
    assert (content["status"], content["attempt"]) == (1, 2)
    assert re.fullmatch(reason, content["reason"])


@pytest.mark.extensive("a job of two attempts for each way of failing")
@pytest.mark.parametrize("kind", ["error", "exit", "SIGSEGV"])
@pytest.mark.parametrize("later", [False, True])
def test_the_step_of_the_failed_rank_decides(tmp_path: Path, kind: str, later: bool) -> None:
    """Rank 0 records the step in which rank 1 fails at first, and not when rank 1 fails again."""
    step = 2 + later
    faults = ["0 2 pass", *([] if later else ["0 2 sleep"]), *["0 3 sleep"] * later]
    variables = environment(tmp_path / "faults", f"1 2 {kind}", f"1 {step} {kind}", *faults)
    arguments = ("--nproc", "2", *SHARDED, *FAULTY, "--run.dir", tmp_path / "run", "--max-restarts", "9")
    options = ("--checkpoint.every", "0")
    config = config_file(tmp_path)
    status, out, err = launch(tmp_path, "train", config, *arguments, *options, environment=variables)
    assert ("restart 2" in out) == later
    assert ", after step 1; " in out
    if later:
        assert (status, err) == (0, "")
        assert ", after step 2; " in out
    else:
        assert status == 1
        assert "the same error came twice after step 1, so it does not start again" in err


def test_the_step_of_the_failed_rank_is_recorded_for_torchrun(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.launch_file.write_text('{"agents": ["a"], "attempt": 1, "ends": []}')
    for recorded in (1, 2):
        folder.metrics_file.write_text(f'{{"step": {recorded}}}\n')
        record_end(folder, Outcome(FAILED, f"at 0x{recorded}", 1, done=1))
    ends = json.loads(folder.launch_file.read_text())["ends"]
    assert [each["step"] for each in ends] == [1, 1]
    record_end(folder, Outcome(TRY_AGAIN, "lost"))
    assert json.loads(folder.launch_file.read_text())["ends"][-1]["step"] == 2


@pytest.mark.extensive("another job that restarts")
def test_a_mistake_in_a_job_that_goes_on_is_in_exit_json(tmp_path: Path) -> None:
    """As under torchrun or SLURM: the data are missing at the second start. A wrapper must not find the first end."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.json").write_text('{"status": "interrupted", "sessions": [{"status": "interrupted"}]}')
    (folder / "exit.json").write_text('{"status": 143}')
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    status, _, err = run(
        "train", config_file(tmp_path), "--run.dir", folder, "--continue", "--data.source", tmp_path / "none.txt",
        environment=place,
    )  # fmt: skip
    assert (status, ended(folder)["status"]) == (2, 2), err
    assert "none.txt" in ended(folder)["reason"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--fault.least_ranks", "5"), "fault.least_ranks: expected at most 2, the number of ranks, found 5"),
        (
            ("--fault.rewind_steps", "6", "--fault.on_spike", "rewind"),
            "fault.rewind_steps: expected rewind_steps + checkpoint.every <= train.steps = 8 with fault.on_spike = "
            "'rewind', found 6 + 3; no checkpoint would be old enough",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], words: str
) -> None:
    arguments = ("--nproc", "2", *SHARDED, "--run.dir", str(tmp_path / "run"), *options)
    assert cli.main(["train", str(config_file(tmp_path)), *arguments]) == 2
    shown = capsys.readouterr().err
    assert words in shown and shown.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_epochs_that_are_too_short_for_a_rewind_are_refused_on_all_ranks(tmp_path: Path) -> None:
    """The length of the run is known when its data is read; no step is made."""
    text, folder = tmp_path / "text.txt", tmp_path / "run"
    text.write_text(
        "the quick brown fox jumps over the lazy dog. " * 30
    )  # 42 samples with those of validation
    options = (
        *SHARDED, "--run.dir", folder, "--data.source", text, "--train.epochs", "1", "--fault.rewind_steps", "9",
        "--fault.on_spike", "rewind",
    )  # fmt: skip
    found = run_ranks(2, "train", config_file(tmp_path), *options)
    assert [status for status, _ in found] == [2, 2]
    errors = "".join(error for _, error in found)
    words = (
        r"fault\.rewind_steps: expected rewind_steps \+ checkpoint\.every <= train\.steps = [2-6] with "
        r"fault\.on_spike = 'rewind', found 9 \+ 3; no checkpoint would be old enough\n"
    )
    assert re.search(words, errors)
    assert errors.count("\n") == 1 and not (folder / "metrics.jsonl").exists()


def restarts(most: int, least_ranks: int = 0) -> Restarts:
    return Restarts(FaultConfig(max_restarts=most, least_ranks=least_ranks), lambda ranks: ranks != 3)


KILLED = Outcome(TRY_AGAIN, "rank 1 of 4 was killed by SIGKILL", 1, lost=True)
ERROR = Outcome(FAILED, "rank 1 of 4 failed with ValueError: at 0x7f00", 1)


def test_when_a_job_starts_again() -> None:
    assert restarts(0).after(KILLED, 4, 4) == (0, "")
    for status in (0, 2, 130, 143):
        assert restarts(3).after(Outcome(status, "that"), 4, 4) == (0, "")
    job = restarts(2)
    assert job.after(KILLED, 4, 4) == job.after(KILLED, 4, 4) == (4, "")
    assert job.after(KILLED, 4, 4) == (0, " after 2 restarts")


def test_the_same_error_at_the_same_step_comes_twice() -> None:
    job, again = restarts(9), Outcome(FAILED, "rank 0 of 4 failed with ValueError: at 0x8a00", 0)
    assert job.after(ERROR, 4, 4) == (4, "")
    assert job.after(ERROR, 5, 4) == (4, "")  # one step further
    assert job.after(Outcome(FAILED, "another"), 5, 4) == job.after(ERROR, 5, 4) == (4, "")
    assert job.after(KILLED, 5, 4) == (4, "")
    ranks, note = job.after(again, 5, 4)
    assert ranks == 0 and "same error came twice after step 5" in note
    assert without_numbers("of 512.5 bytes at 0xFF") == without_numbers("of 3 bytes at 0xa")


def test_fewer_ranks_if_one_is_lost() -> None:
    assert restarts(1, least_ranks=2).after(KILLED, 4, 4) == (2, "")  # 3 cannot run
    assert restarts(1, least_ranks=4).after(KILLED, 4, 4) == (4, "")
    assert restarts(1, least_ranks=2).after(ERROR, 4, 4) == (4, "")


def test_a_restart_leaves_out_the_device_of_the_lost_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    first = Attempt(1, 4, ("train", "job.toml", "--debug"))
    second = first.after(KILLED, 2, RunFolder(tmp_path), began=False)
    assert second == Attempt(2, 2, first.arguments, ("4", "6", "7"))
    assert first.after(KILLED, 4, RunFolder(tmp_path), began=False).devices == ()


def test_the_command_of_a_restart(tmp_path: Path) -> None:
    """A command that has not begun is tried as it was: the folder may have the configuration of an earlier job."""
    folder = RunFolder(tmp_path)
    first = Attempt(1, 2, ("train", "job.toml", "--resume", str(tmp_path), "--train.steps", "9", "--debug"))
    folder.config_file.write_text("")
    assert first.after(ERROR, 2, folder, began=False).arguments == first.arguments
    assert first.after(ERROR, 2, folder, began=True).arguments == (
        "train",
        str(folder.config_file),
        "--debug",
    )
    (folder.checkpoints / "step-3").mkdir(parents=True)
    resumed = ("train", "--resume", str(tmp_path), "--debug")
    assert first.after(ERROR, 2, folder, began=True).arguments == resumed


def test_launches_of_torchrun() -> None:
    """A launch goes on if one torchrun process is the same. A third attempt must not meet what ended two."""
    before = TorchrunLaunch(("a 1 100", "b 1 100"))
    assert TorchrunLaunch(("b 1 100", "c 7 300")).continues(before)
    assert not TorchrunLaunch(("a 1 200",)).continues(before)
    TorchrunLaunch(("a",), ends=(AttemptEnd(FAILED, "at 0x1", 4),)).check_worth()
    TorchrunLaunch(
        ("a",), ends=(AttemptEnd(FAILED, "at 0x1", 4), AttemptEnd(FAILED, "at 0x2", 5))
    ).check_worth()
    TorchrunLaunch(
        ("a",),
        ends=(AttemptEnd(FAILED, "at 0x1", 4), AttemptEnd(FAILED, "at 0x2", 4), AttemptEnd(TRY_AGAIN, "", 4)),
    ).check_worth()
    with pytest.raises(GivenUpError, match="at 0x2: the same error came twice after step 4"):
        TorchrunLaunch(
            ("a",),
            ends=(
                AttemptEnd(FAILED, "at 0x1", 4),
                AttemptEnd(TRY_AGAIN, "", 4),
                AttemptEnd(FAILED, "at 0x2", 4),
            ),
        ).check_worth()
    with pytest.raises(GivenUpError, match="a restart cannot help"):
        TorchrunLaunch(("a",), ends=(AttemptEnd(USER_ERROR, "wrong", 0),)).check_worth()


def test_attempts_share_a_store_but_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if a rank of the attempt before wrote that it was there, and got its answer."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(server.port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert fresh_store(server, 1, 2, 0.1) is server
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    with pytest.raises(RuntimeError, match=r"rank 0 did not answer within 0\.1 s"):
        fresh_store(client(server.port), 1, 2, 0.1)
    for attempt in range(3):
        with (
            ThreadPoolExecutor() as pool
        ):  # the others come first, and find what is left of the attempt before
            others = [pool.submit(fresh_store, client(server.port), rank, 3, 20.0) for rank in (1, 2)]
            time.sleep(0.1)
            first = fresh_store(client(server.port), 0, 3, 20.0)
            stores = [first, *(other.result() for other in others)]
        assert not any(store.check(["address"]) for store in stores)
        first.set("address", str(attempt))
        assert [store.get("address") for store in stores] == [str(attempt).encode()] * 3


def client(port: int) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", port, is_master=False)
