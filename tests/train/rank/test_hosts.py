"""Jobs over several hosts on one machine, made of namespaces: networks that fail, and folders that are not shared."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.train.kit.jobs import config_file, losses, wait_for_steps
from tests.train.launch.kit.hosts import (
    Job,
    elastic_torchrun,
    in_make_clusters,
    reason_against,
    tool,
    torchrun,
)

pytestmark = pytest.mark.skipif(bool(reason_against()), reason=reason_against() or "hosts can be made")

LONG = (
    "--train.steps", "2000", "--checkpoint.every", "2", "--validation.every", "0", "--run.sample_tokens", "0",
)  # fmt: skip


@pytest.fixture
def two_hosts() -> Iterator[Any]:
    with tool("hosts").Hosts(2) as hosts:
        yield hosts


def job(folder: Path, *more: str) -> tuple[str | Path, ...]:
    arguments = ("--parallel.engine", "shardwright", "--run.dir", folder / "run")
    return "train", config_file(folder), *arguments, *more


@in_make_clusters
def test_torchrun_trains_on_three_hosts(tmp_path: Path, plain_run: Path) -> None:
    """As Debian sets hosts up: each finds its own name at a loopback address, at which no other host finds it."""
    with tool("hosts").Hosts(3, names="own") as hosts:
        arguments = job(tmp_path, "--train.global_batch", "12", "--train.steps", "3")
        processes = [torchrun(hosts, number, *arguments) for number in range(3)]
        outputs = [process.communicate(timeout=180)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], outputs
    assert "on 3 ranks (cpu)" in outputs[0]
    assert len(losses(tmp_path / "run")) == 3


@pytest.mark.extensive("hosts of their own")
def test_hosts_without_a_shared_folder_are_refused(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    with tool("hosts").Hosts(2, own_folder=own) as hosts:
        arguments = job(tmp_path, "--run.dir", str(own / "run"))
        ended = Job(hosts, tmp_path, *arguments, per_host=2, seconds_to_appear=1).finish()
    assert [status for status, _ in ended] == [2, 2, 2, 2]
    errors = "".join(text for _, text in ended)
    assert errors.count("error:") == 1
    assert "not shared with rank 2 (host host-1); set run.dir to a folder" in errors


def test_two_hosts_learn_what_one_learns(tmp_path: Path, two_hosts: Any, plain_run: Path) -> None:
    """Each host has two ranks, which share memory; a group over both hosts must not."""
    ended = Job(two_hosts, tmp_path, *job(tmp_path), per_host=2).finish()
    assert [status for status, _ in ended] == [0] * 4, ended
    assert losses(tmp_path / "run") == pytest.approx(losses(plain_run), rel=1e-3)


@pytest.mark.extensive("hosts of their own")
@pytest.mark.parametrize(
    "how",
    ["lose", pytest.param("cut", marks=in_make_clusters), pytest.param("refuse", marks=in_make_clusters)],
)
def test_a_job_whose_host_is_lost_goes_on_with_the_rest(tmp_path: Path, two_hosts: Any, how: str) -> None:
    """`cut` loses packets, `refuse` answers with resets, `lose` ends the processes, too."""
    if how == "refuse" and tool("hosts").shutil.which("nft") is None:
        pytest.skip("nft is not installed")
    arguments = job(tmp_path, *LONG)
    running = Job(two_hosts, tmp_path, *arguments, timeout=4)
    wait_for_steps(tmp_path / "run", 5)
    began = time.monotonic()
    getattr(two_hosts, how)(1)
    ended = running.finish()
    assert time.monotonic() - began < 30
    assert [status for status, _ in ended] == [75, 247 if how == "lose" else 75], ended
    assert json.loads((tmp_path / "run/exit.json").read_text())["status"] == 75

    done = len(losses(tmp_path / "run"))
    rest = ("--train.steps", str(done + 2), "--continue")
    again = Job(two_hosts, tmp_path, *arguments, *rest, only=[0], port=29501).finish()
    assert [status for status, _ in again] == [0], again
    whole = Job(
        two_hosts, tmp_path, *arguments, "--run.dir", tmp_path / "whole", *rest, only=[0], port=29502
    ).finish()
    assert [status for status, _ in whole] == [0], whole
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "whole"), rel=1e-3)


@in_make_clusters
@pytest.mark.parametrize("nodes", ["2", "1:2"])
def test_torchrun_goes_on_when_a_host_is_lost(tmp_path: Path, two_hosts: Any, nodes: str) -> None:
    """With `2` it waits for the host, which comes back. With `1:2` it goes on with one."""
    arguments = job(tmp_path, *LONG, "--train.steps", "60", "--continue")
    options = {"env": {"SHARDWRIGHT_TIMEOUT": "10"}}
    first, second = (elastic_torchrun(two_hosts, each, nodes, *arguments, **options) for each in range(2))
    wait_for_steps(tmp_path / "run", 5)
    two_hosts.lose(1)
    second.communicate(timeout=30)
    if nodes == "2":
        two_hosts.start(1)
        second = elastic_torchrun(two_hosts, 1, nodes, *arguments, **options)
    output = first.communicate(timeout=180)[0]
    assert first.returncode == 0, output
    if nodes == "2":
        assert second.wait(60) == 0
    assert f"on {nodes[0]} rank" in output, output
    assert "from step" in output, output

    whole = job(tmp_path, *LONG, "--train.steps", "60", "--run.dir", str(tmp_path / "whole"))
    ended = Job(two_hosts, tmp_path, *whole, only=None if nodes == "2" else [0], port=29501).finish()
    assert {status for status, _ in ended} == {0}, ended
    expected = losses(tmp_path / "whole")
    assert losses(tmp_path / "run") == (expected if nodes == "2" else pytest.approx(expected, rel=1e-3))


@in_make_clusters
def test_three_hosts_then_two(tmp_path: Path) -> None:
    with tool("hosts").Hosts(3) as hosts:
        arguments = job(tmp_path, *LONG, "--train.global_batch", "12", "--continue")
        running = Job(hosts, tmp_path, *arguments, timeout=4)
        wait_for_steps(tmp_path / "run", 5)
        hosts.lose(2)
        assert [status for status, _ in running.finish()] == [75, 75, 247]
        rest = ("--train.steps", str(len(losses(tmp_path / "run")) + 2))
        again = Job(hosts, tmp_path, *arguments, *rest, only=[0, 1], port=29501).finish()
        assert [status for status, _ in again] == [0, 0], again
        whole = ("--run.dir", tmp_path / "whole", *rest)
        ended = Job(hosts, tmp_path, *arguments, *whole, only=[0], port=29502).finish()
        assert [status for status, _ in ended] == [0], ended
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "whole"), rel=1e-3)
