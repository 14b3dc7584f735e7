"""SLURM: its variables, and a real cluster of two hosts that runs examples/slurm.sbatch."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardwright.train.errors import UserError
from shardwright.train.launch.slurm import first_host, tasks_per_node, variables_of_task
from tests.train.kit.jobs import config_file, losses, wait_for, wait_for_steps
from tests.train.launch.kit.hosts import in_make_clusters, plain_environment, reason_against, tool

SCRIPT = Path(__file__).parents[3] / "examples/slurm.sbatch"
TASK = {
    "SLURM_STEP_ID": "1", "SLURM_JOB_ID": "12", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "5", "SLURM_STEP_TASKS_PER_NODE": "2(x2),1", "SLURM_STEP_NODELIST": "gpu[07-09]",
}  # fmt: skip

needs_slurm = pytest.mark.skipif(bool(reason_against("slurm")), reason=reason_against("slurm") or "has SLURM")


def test_a_task_of_several_is_a_rank() -> None:
    assert variables_of_task(TASK) == {
        "RANK": "3", "WORLD_SIZE": "5", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1",
        "MASTER_ADDR": "gpu07", "MASTER_PORT": "12085",
    }  # fmt: skip
    last = {**TASK, "SLURM_PROCID": "4", "SLURM_LOCALID": "0", "SLURM_NODEID": "2"}
    assert variables_of_task(last)["LOCAL_WORLD_SIZE"] == "1"
    assert variables_of_task({**TASK, "MASTER_ADDR": "10.0.0.1"})["MASTER_ADDR"] == "10.0.0.1"


@pytest.mark.parametrize(
    "change",
    [
        {"RANK": "0", "WORLD_SIZE": "2"},  # a rank of torchrun in a task
        {"SLURM_STEP_NUM_TASKS": "1"},  # it may start ranks itself
        {"SLURM_STEP_ID": ""},  # a batch script has SLURM_PROCID, too
    ],
)
def test_other_processes_under_slurm_are_no_ranks(change: dict[str, str]) -> None:
    assert variables_of_task({**TASK, **change}) == {}


def test_lists_of_slurm() -> None:
    assert [first_host(each) for each in ("a", "b1,a1", "gpu[3,5]-x,c", "n[10-12,01]")] == [
        "a",
        "b1",
        "gpu3-x",
        "n10",
    ]
    assert tasks_per_node("2(x3),1") == [2, 2, 2, 1]
    assert tasks_per_node("2x3") == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NODELIST: expected a list of hosts, found ''"),
        ({"SLURM_LOCALID": "x"}, "SLURM_LOCALID: expected the number that srun sets, found 'x'"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2"}, "expected 5 tasks and a host 1, found 2"),
    ],
)
def test_variables_that_do_not_fit(change: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        variables_of_task({**TASK, **change})


def test_a_mistake_after_a_signal_does_not_start_the_job_again(tmp_path: Path) -> None:
    """The start before has saved and left. This one ends with a mistake before the ranks open the folder."""
    run = tmp_path / "runs/job-7"
    run.mkdir(parents=True)
    (run / "exit.json").write_text('{\n  "status": 143,\n  "reason": "stopped by SIGUSR1"\n}\n')
    for name, line in (("srun", "exit 2"), ("scontrol", f"touch {tmp_path}/requeued; exit 1")):
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\n{line}\n")
        program.chmod(0o755)
    variables = {
        **os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NAME": "job", "SLURM_JOB_ID": "7",
    }  # fmt: skip
    done = subprocess.run(
        ["bash", SCRIPT, "job.toml"], cwd=tmp_path, env=variables, capture_output=True, text=True
    )
    assert (done.returncode, (tmp_path / "requeued").exists()) == (2, False), done
    assert "ended with status 2" in done.stdout


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with tool("slurm").Cluster(2, seconds_lost=5) as cluster:
        yield cluster


class Batch:
    """A job of examples/slurm.sbatch on two hosts, one rank on each."""

    def __init__(self, cluster: Any, folder: Path, *arguments: str) -> None:
        self.cluster, self.folder = cluster, folder
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        options = ["--parsable", "--nodes=2", "--ntasks-per-node=1", f"--chdir={folder}"]
        command = [
            "sbatch",
            *options,
            str(SCRIPT),
            str(config_file(folder)),
            "--parallel.engine",
            "shardwright",
        ]
        process = cluster.popen(
            [*command, *arguments], env={**plain_environment(), "PATH": path}, stdout=-1, text=True
        )
        self.number = process.communicate(timeout=60)[0].strip()
        self.run = folder / f"runs/shardwright-{self.number}"

    def output(self) -> str:
        path = self.folder / f"shardwright-{self.number}.log"
        return path.read_text() if path.exists() else ""

    def state(self) -> str:
        found = re.search(r"JobState=(\w+)", self.cluster.run("scontrol", "show", "job", self.number).stdout)
        return found[1] if found else "unknown"

    def wait_for_end(self, seconds: float = 150) -> str:
        deadline = time.monotonic() + seconds
        while (state := self.state()) in ("PENDING", "RUNNING", "COMPLETING"):
            assert time.monotonic() < deadline, f"{state}\n{self.output()}\n{self.cluster.logs()}"
            time.sleep(0.3)
        return state


LONG = (
    "--train.steps", "400", "--checkpoint.every", "50", "--validation.every", "0", "--run.sample_tokens", "0",
)  # fmt: skip


@in_make_clusters
@needs_slurm
def test_a_signal_saves_and_the_job_starts_again(cluster: Any, tmp_path: Path) -> None:
    """As before a time limit: SIGUSR1 for the ranks. The script asks SLURM to start the job again."""
    job = Batch(cluster, tmp_path, *LONG)
    wait_for_steps(job.run, 20)
    assert cluster.run("scancel", "--signal=USR1", job.number).returncode == 0
    assert job.wait_for_end() == "COMPLETED", job.output()
    output = job.output()
    assert "SIGUSR1 received; saving after step " in output
    assert "ended with status 143 after 0 restarts" in output
    stopped = re.search(r"stopped by SIGUSR1 after step (\d+), which is saved", output)
    assert stopped is not None and f"from step {stopped[1]}; folder" in output
    assert "srun shardwright train --resume" in output or "shardwright train --resume" in output
    assert "ended with status 0 after 1 restarts" in output
    assert len(losses(job.run)) == 400


@in_make_clusters
@needs_slurm
def test_a_host_is_lost_and_comes_back(cluster: Any, tmp_path: Path) -> None:
    job = Batch(cluster, tmp_path, *LONG)
    wait_for(lambda: (job.run / "checkpoints/step-50").exists())
    cluster.hosts.lose(1)
    wait_for(lambda: "down" in " ".join(cluster.states()))
    cluster.hosts.start(1)
    cluster.start(1)
    assert job.wait_for_end() == "COMPLETED", job.output()
    assert re.search(r"from step [1-9]\d*; folder", job.output())
    assert len(losses(job.run)) == 400


@needs_slurm
def test_a_mistake_is_not_tried_again(cluster: Any, tmp_path: Path) -> None:
    job = Batch(cluster, tmp_path, "--train.steps", "none")
    assert job.wait_for_end() == "FAILED"
    assert job.output().count("error: command line: train.steps") == 1
    assert "ended with status 2 after 0 restarts" in job.output()
