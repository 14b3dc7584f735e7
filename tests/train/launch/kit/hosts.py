"""Ranks on several hosts, made of namespaces: forked, as a launcher starts them, or by real torchrun."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from shardwright import cli
from shardwright.train.rank import shared_folder
from shardwright.train.rank.hosts import INTERFACE_VARIABLE
from tests.support.pool import forkserver

TOOLS = Path(__file__).parents[4] / "tools"
PORT = 29500

in_make_clusters = pytest.mark.skipif(
    os.environ.get("SHARDWRIGHT_TEST_CLUSTERS") != "1", reason="it takes up to two minutes: run make clusters"
)
"""The mark of tests that start ranks several times by the real commands."""


@functools.cache
def tool(name: str) -> ModuleType:
    """The program `tools/NAME.py`, as a module."""
    specification = importlib.util.spec_from_file_location(f"tools_{name}", TOOLS / f"{name}.py")
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@functools.cache
def reason_against(name: str = "hosts") -> str:
    """Why there can be no hosts here (or no cluster of `slurm`); empty if there can."""
    return str(tool(name).reason_against())


class Job:
    """`shardwright` on hosts, `per_host` ranks on each. The logs are in `folder`.

    The ranks are forked and enter the namespaces of their hosts. If a host is lost, the status of its ranks is 247.
    """

    def __init__(
        self,
        hosts: Any,
        folder: Path,
        *arguments: str | Path,
        per_host: int = 1,
        timeout: float = 60,
        port: int = PORT,
        seconds_to_appear: float = shared_folder.SECONDS_TO_APPEAR,
        only: Sequence[int] | None = None,
    ) -> None:
        chosen = list(range(len(hosts.addresses)) if only is None else only)
        shared = {
            "WORLD_SIZE": len(chosen) * per_host, "LOCAL_WORLD_SIZE": per_host,
            "MASTER_ADDR": hosts.addresses[chosen[0]], "MASTER_PORT": port, "OMP_NUM_THREADS": 1,
        }  # fmt: skip
        shared["SHARDWRIGHT_TIMEOUT"] = timeout
        self.logs: list[Path] = []
        self.processes: list[ForkServerProcess] = []
        for place, number in enumerate(chosen):
            for local in range(per_host):
                rank = place * per_host + local
                variables = {**shared, "RANK": rank, "LOCAL_RANK": local, "GROUP_RANK": place}
                log = folder / f"rank{rank}.log"
                log.write_text("")
                self.logs.append(log)
                process = forkserver().Process(
                    target=_rank_on_host,
                    args=(hosts.process(number), variables, arguments, log, seconds_to_appear),
                    daemon=True,
                )
                process.start()
                self.processes.append(process)

    def finish(self, timeout: float = 120) -> list[tuple[int | None, str]]:
        """Status and stderr of each rank."""
        deadline = time.monotonic() + timeout
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        for process in self.processes:
            process.kill()
            process.join()
        texts = [_without_warnings(log.read_text()) for log in self.logs]
        return [(process.exitcode, text) for process, text in zip(self.processes, texts, strict=True)]


def _without_warnings(text: str) -> str:
    """Without torch's warnings about names of hosts, and the lines that say what a start does."""
    lines = text.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("[W") and not line.endswith(" s)\n"))


def _rank_on_host(
    process: int,
    variables: dict[str, Any],
    arguments: tuple[str | Path, ...],
    log: Path,
    seconds_to_appear: float,
) -> None:
    shared_folder.SECONDS_TO_APPEAR = seconds_to_appear
    folder = os.getcwd()
    namespaces = [
        os.open(f"/proc/{process}/ns/{kind}", os.O_RDONLY) for kind in ("net", "uts", "ipc", "pid", "mnt")
    ]
    for namespace in namespaces:
        if ctypes.CDLL(None, use_errno=True).setns(namespace, 0):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(namespace)
    child = os.fork()  # the namespace of processes is that of children
    if child:
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 255)
    os.chdir(folder)
    os.environ.pop(INTERFACE_VARIABLE, None)  # tests set it to the loopback
    os.environ.update({name: str(value) for name, value in variables.items()})
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
    os._exit(cli.main(list(map(str, arguments))))


def plain_environment() -> dict[str, str]:
    """The environment of a command that finds this package, and that chooses its network."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(cli.__file__).parents[2])}
    variables.pop(INTERFACE_VARIABLE, None)
    return variables


def torchrun(hosts: Any, number: int, *arguments: str | Path, **options: Any) -> subprocess.Popen[str]:
    """One rank on this host, by real torchrun, with all other hosts."""
    nodes = str(len(hosts.addresses))
    where = ("--nnodes", nodes, "--node-rank", str(number), "--master-addr", hosts.addresses[0])
    return _torchrun(hosts, number, (*where, "--master-port", str(PORT)), arguments, options)


def elastic_torchrun(
    hosts: Any, number: int, nodes: str, *arguments: str | Path, **options: Any
) -> subprocess.Popen[str]:
    """As :func:`torchrun`, with the rendezvous by which hosts leave and join. `nodes` is `2` or `1:2`."""
    where = ("--nnodes", nodes, "--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-id", "job")
    where += ("--rdzv-endpoint", f"{hosts.addresses[0]}:{PORT}", "--local-addr", hosts.addresses[number])
    options["env"] = {
        **plain_environment(),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        **options.get("env", {}),
    }
    return _torchrun(hosts, number, (*where, "--rdzv-conf", "last_call_timeout=5"), arguments, options)


def _torchrun(
    hosts: Any,
    number: int,
    where: Sequence[str],
    arguments: Sequence[str | Path],
    options: dict[str, Any],
) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", *where]
    command += ["-m", "shardwright", *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process: subprocess.Popen[str] = hosts.popen(
        number, command, **{"env": plain_environment(), **pipes, **options}
    )
    return process


def wait_until(what: Callable[[], bool], seconds: float = 60) -> float:
    """Wait for it. Returns the seconds that it took."""
    started = time.monotonic()
    while not what():
        assert time.monotonic() - started < seconds, "waited in vain"
        time.sleep(0.05)
    return time.monotonic() - started
