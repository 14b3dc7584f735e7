"""Jobs that hang end with status 75 and name the rank: under our launcher, under torchrun, and with one rank."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardwright.engine import heartbeat
from shardwright.train.report import plan_picture
from shardwright.watching import HeartbeatReader
from tests.train.kit import faults
from tests.train.kit.jobs import config_file, train_here
from tests.train.launch.kit import stopped
from tests.train.launch.kit.forked import launch

STEPS = 5
ARGUMENTS = (
    "--train.steps", "9", "--fault.stall_seconds", "3", "--optimizer.name", "tests.train.kit.faults:ADAMW",
    "--validation.every", "0",
)  # fmt: skip
SHARDED = ("--parallel.engine", "shardwright")


def test_launcher_names_a_stopped_rank_and_the_job_restarts(tmp_path: Path) -> None:
    config, folder = config_file(tmp_path), tmp_path / "run"
    status, out, err = launch(
        tmp_path, "train", config, "--nproc", "2", *SHARDED, "--run.dir", folder, *ARGUMENTS, "--max-restarts", "1",
        environment=faults.environment(tmp_path / "faults", f"1 {STEPS} SIGSTOP"),
    )  # fmt: skip
    assert status == 0, err
    found = re.search(r"restart 1 of 1: the job hung: (.*), after step", out)
    assert found is not None, out
    assert re.match(
        r"rank 1: optimizer since \d+ s, step 5, process stopped \(T\), pid \d+; rank 0 waits", found[1]
    )
    for log in folder.glob("logs/*/rank-*.log"):
        if "attempt" not in str(log):
            assert "the job hangs in step 5: rank 1 is" in log.read_text()
    files = {path.name for path in folder.glob("hangs/*/*")}
    assert files == {
        "diagnosis.txt",
        *(f"rank-{rank}.{kind}.txt" for rank in (0, 1) for kind in ("ring", "stacks")),
    }
    assert "agreement" in (next(folder.glob("hangs/*/rank-0.stacks.txt"))).read_text()


def test_launcher_says_it_once_and_how_to_continue(tmp_path: Path) -> None:
    config, folder = config_file(tmp_path), tmp_path / "run"
    status, _, err = launch(
        tmp_path, "train", config, "--nproc", "2", "--parallel.engine", "ddp", "--run.dir", folder, *ARGUMENTS,
        environment=faults.environment(tmp_path / "faults", f"1 {STEPS} sleep"),
    )  # fmt: skip
    assert status == 75, err
    assert err.startswith(
        "error: the job hangs in step 5: rank 1 is behind the others, outside any collective\n  rank 1"
    )
    assert err.count("rank 1: optimizer since") == 1 and "Traceback" not in err
    assert f"stacks and latest actions of the ranks: {folder}/hangs/hang-" in err
    assert "step 3 is saved; to continue:" in err
    end = json.loads((folder / "exit.json").read_text())
    assert (end["status"], end["rank"]) == (75, 1)


@pytest.mark.extensive("it waits for a timeout")
def test_ranks_of_torchrun_name_a_rank_that_sleeps(tmp_path: Path) -> None:
    config, folder = config_file(tmp_path), tmp_path / "run"
    environment = faults.environment(tmp_path / "faults", f"1 {STEPS} sleep")
    status, _, err = launch(
        tmp_path, "train", config, *SHARDED, "--run.dir", folder, *ARGUMENTS,
        torchrun=["--standalone", "--nproc-per-node", "2"], environment=environment,
    )  # fmt: skip
    assert status != 0
    for rank in range(2):
        assert (
            f"rank {rank}: the job hangs in step 5: rank 1 is behind the others, outside any collective"
            in err
        ), err
    assert re.search(r"rank 1: optimizer since \d+ s", err)
    end = json.loads((folder / "exit.json").read_text())
    assert end["status"] == 75
    assert end["rank"] == 1
    assert end["reason"].startswith("the job hung: rank 1: optimizer")


@pytest.mark.extensive("it waits for a timeout")
def test_one_rank_that_sleeps_in_a_validation_ends(tmp_path: Path) -> None:
    config, folder = config_file(tmp_path), tmp_path / "run"
    status, _, err = launch(
        tmp_path, "train", config, "--nproc", "1", *SHARDED, "--run.dir", folder, *ARGUMENTS, "--validation.every", "5",
        environment=faults.environment(tmp_path / "faults", f"0 {STEPS} validation"),
    )  # fmt: skip
    assert status == 75, err
    headline = "the job hangs in the validation after step 5: rank 0 does not go on, outside any collective"
    assert f"\nerror: {headline}" in f"\n{err}"
    assert re.search(r"rank 0: forward of [\w.]+ in the validation since \d+ s\n", err), err
    assert "\nthe job has ended\nstep 3 is saved; to continue:\n" in err
    end = json.loads((folder / "exit.json").read_text())
    assert (end["status"], end["step"], end["saved"]) == (75, 5, 3)


DRAW = random.Random(7)
STOPS = [(place, DRAW.randrange(2)) for place in stopped.PLACES]
STOPPED = "tests.train.launch.kit.stopped"


@pytest.mark.extensive("each place waits for a timeout", but=("run_rank-1",))
@pytest.mark.parametrize(("place", "rank"), STOPS)
def test_launcher_names_a_rank_that_is_stopped_before_its_heartbeat_opens(
    tmp_path: Path, place: str, rank: int
) -> None:
    again = place == "watch"
    status, out, err = launch(
        tmp_path, "train", config_file(tmp_path), "--nproc", "2", *SHARDED, "--run.dir", tmp_path / "run",
        "--fault.stall_seconds", "300" if place == "join_world" else "2", "--train.steps", "2",
        *(("--max-restarts", "1") if again else ()),
        environment=stopped.environment(rank, place), imports=STOPPED, seconds=60,
    )  # fmt: skip
    where = rf"rank {rank}: start since \d+ s, process stopped \(T\), pid \d+; rank {1 - rank}: start since"
    if again:
        assert (status, err) == (0, "")
        assert re.search(f"^restart 1 of 1: the job hung: {where}", out, re.MULTILINE), out
        return
    assert status == 75, out + err
    head = f"error: the job hangs at the start of the job: rank {rank} is behind the others, outside any collective"
    assert err.startswith(f"{head}\n  rank {rank}: start since ")
    assert re.search(where, err.replace("\n  ", "; ")), err
    assert "has stopped the process." in err and "the job has ended" in err


@pytest.mark.extensive("each place waits for a timeout")
@pytest.mark.parametrize(("place", "rank"), [("import", 0), ("run_rank", 1), ("watch", 0)])
def test_ranks_of_torchrun_end_one_that_is_stopped_at_the_start(
    tmp_path: Path, place: str, rank: int
) -> None:
    """Real processes: a forked one shows the command line and the variables of its parent."""
    stop = f"import os\nif 'RANK' in os.environ: import {STOPPED}"
    if place == "import":
        condition = "os.environ.get('RANK') == '0' and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'"
        stop = f"import os, signal\nif {condition}: os.kill(os.getpid(), signal.SIGSTOP)"
    (tmp_path / "sitecustomize.py").write_text(stop)
    source = Path(__file__).parents[3]
    paths = os.pathsep.join(map(str, [tmp_path, source / "src", source]))
    environment = {
        **os.environ,
        "PYTHONPATH": paths,
        "OMP_NUM_THREADS": "1",
        **stopped.environment(rank, place),
    }
    arguments = (
        "-m", "shardwright", "train", config_file(tmp_path), *SHARDED, "--run.dir", tmp_path / "run",
        "--fault.stall_seconds", "4", "--train.steps", "2", "--validation.every", "0",
    )  # fmt: skip
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1")
    ended = subprocess.run(
        [sys.executable, *torchrun, *map(str, arguments)], env=environment, capture_output=True, text=True, timeout=120
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    head = f"error: the job hangs at the start of the job: rank {rank} is behind the others, outside any collective"
    assert f"{head}\n  rank {rank}: start since " in ended.stderr
    assert ended.stderr.count(head) == 1
    attempts = [
        each["ended_by"] for each in json.loads((tmp_path / "run/run.json").read_text())["sessions"][:-1]
    ]
    assert all(each.startswith(f"the job hung: rank {rank}: start since") for each in attempts)


def test_a_rank_may_take_its_time_to_draw_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks wait in the next step while the first one imports matplotlib."""
    patient = []

    def draw(*arguments: object) -> Any:
        assert heartbeat.own is not None
        patient.append(HeartbeatReader(heartbeat.own).last().patient)
        return plan_figure(*arguments)

    plan_figure: Any = plan_picture.plan_figure
    monkeypatch.setattr(plan_picture, "plan_figure", draw)
    config = config_file(tmp_path)
    arguments = (*SHARDED, "--parallel.memory", "arena", "--run.dir", tmp_path / "run", "--train.steps", "4")
    assert train_here(config, *arguments) == 0
    assert patient == [True]
