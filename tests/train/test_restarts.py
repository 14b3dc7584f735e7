"""Jobs that start again by themselves: after a killed rank and an error; and when they do not."""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from shardwright.train.fresh_store import fresh_store
from shardwright.train.launches import GivenUpError, Launch
from shardwright.train.restarts import Attempt, Restarts, without_numbers
from shardwright.train.runs import RunFolder
from shardwright.train.sections.fault import FaultConfig
from shardwright.train.statuses import FAILED, TRY_AGAIN, USER_ERROR, End, read_exit
from tests.train.jobs import config_file, losses, records, run
from tests.train.kit.faults import environment

FAULTY = ("--optimizer.name", "tests.train.kit.faults:ADAMW")
SHARDED = ("--parallel.engine", "shardwright")


def weights(run_folder: Path, step: int) -> dict[str, Any]:
    file = run_folder.parent / "weights.pt"
    dcp_to_torch_save(run_folder / "checkpoints" / f"step-{step}", file)
    state: dict[str, Any] = torch.load(file)["model"]
    return state


def ended(folder: Path) -> dict[str, Any]:
    content = read_exit(RunFolder(folder))
    assert content is not None
    return content


def sessions(folder: Path) -> list[tuple[int, int, int, int, str]]:
    return [
        (each["attempt"], each["ranks"], each["from_step"], each["to_step"], each["status"])
        for each in RunFolder(folder).record()["sessions"]
    ]


def test_a_killed_rank_changes_nothing(tmp_path: Path, sharded_run: Path) -> None:
    """Killed at step 5 after the save of step 3."""
    folder = tmp_path / "run"
    faults = environment(tmp_path / "faults", "0 5 kill")
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
    assert "killed by SIGKILL" in RunFolder(folder).record()["sessions"][0]["ended_by"]
    exit_content = ended(folder)
    assert exit_content.keys() == {"status", "reason", "step", "saved", "rank", "attempt", "time"}
    assert (exit_content["status"], exit_content["step"], exit_content["attempt"]) == (0, 8, 2)


def test_from_the_beginning_on_fewer_ranks_until_the_same_error_comes_twice(
    tmp_path: Path, sharded_run: Path
) -> None:
    folder = tmp_path / "run"
    faults = environment(tmp_path / "faults", "0 2 kill", "0 3 error", "0 3 error")
    arguments = ("--nproc", "2", *SHARDED, *FAULTY, "--run.dir", folder, "--max-restarts", "9")
    options = ("--fault.least_ranks", "1", "--checkpoint.every", "0")
    status, out, err = run("train", config_file(tmp_path), *arguments, *options, environment=faults)
    assert status == 1 and "restart 3" not in out
    assert "; starting from the beginning, since nothing is saved on 1 rank (log: " in out
    assert err.startswith("error: rank 0 of 1 failed with RuntimeError: planned at 0x")
    assert "; the job has ended: the same error came twice after step 2, so it does not start again" in err
    assert sessions(folder) == [(1, 2, 0, 1, "failed"), (2, 1, 0, 2, "failed"), (3, 1, 0, 2, "failed")]
    assert losses(folder) == pytest.approx(losses(sharded_run)[:2], rel=1e-6)
    exit_content = ended(folder)
    assert (exit_content["status"], exit_content["rank"], exit_content["step"]) == (1, 0, 2)


def test_an_error_under_torchrun(tmp_path: Path, sharded_run: Path) -> None:
    """torchrun starts the same command again; rank 0 finds its folder, although the command names none."""
    faults = environment(tmp_path / "faults", "0 5 error")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "1", "-m", "shardwright", "train", str(config_file(tmp_path))]
    status, out, err = run(*SHARDED, *FAULTY, environment=faults, command=command, cwd=tmp_path)
    assert status == 0, err
    (folder,) = (tmp_path / "runs").iterdir()
    assert sessions(folder) == [(1, 2, 0, 4, "failed"), (2, 2, 3, 8, "finished")]
    assert losses(folder) == losses(sharded_run)
    undisturbed, resumed = weights(sharded_run, 8), weights(folder, 8)
    assert all(torch.equal(undisturbed[name], resumed[name]) for name in undisturbed)
    assert (ended(folder)["status"], ended(folder)["attempt"]) == (0, 2)
    assert out.count("step 4/8") == 1


def restarts(most: int, least_ranks: int = 0) -> Restarts:
    return Restarts(FaultConfig(max_restarts=most, least_ranks=least_ranks), lambda ranks: ranks != 3)


KILLED = End(TRY_AGAIN, "rank 1 of 4 was killed by SIGKILL", 1, lost=True)
ERROR = End(FAILED, "rank 1 of 4 failed with ValueError: at 0x7f00", 1)


def test_when_a_job_starts_again() -> None:
    assert restarts(0).after(KILLED, 4, 4) == (0, "")
    for status in (0, 2, 130, 143):
        assert restarts(3).after(End(status, "that"), 4, 4) == (0, "")
    job = restarts(2)
    assert job.after(KILLED, 4, 4) == job.after(KILLED, 4, 4) == (4, "")
    assert job.after(KILLED, 4, 4) == (0, " after 2 restarts")


def test_the_same_error_at_the_same_step_comes_twice() -> None:
    job, again = restarts(9), End(FAILED, "rank 0 of 4 failed with ValueError: at 0x8a00", 0)
    assert job.after(ERROR, 4, 4) == (4, "")
    assert job.after(ERROR, 5, 4) == (4, "")  # one step further
    assert job.after(End(FAILED, "another"), 5, 4) == job.after(ERROR, 5, 4) == (4, "")
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
    before = Launch(("a 1 100", "b 1 100"))
    assert Launch(("b 1 100", "c 7 300")).continues(before)
    assert not Launch(("a 1 200",)).continues(before)
    Launch(("a",), ends=((FAILED, "at 0x1", 4),)).check_worth()
    Launch(("a",), ends=((FAILED, "at 0x1", 4), (FAILED, "at 0x2", 5))).check_worth()
    Launch(("a",), ends=((FAILED, "at 0x1", 4), (FAILED, "at 0x2", 4), (TRY_AGAIN, "", 4))).check_worth()
    with pytest.raises(GivenUpError, match="at 0x2: the same error came twice after step 4"):
        Launch(("a",), ends=((FAILED, "at 0x1", 4), (TRY_AGAIN, "", 4), (FAILED, "at 0x2", 4))).check_worth()
    with pytest.raises(GivenUpError, match="a restart cannot help"):
        Launch(("a",), ends=((USER_ERROR, "wrong", 0),)).check_worth()


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
