"""Tiny training jobs for the tests of the trainer: through the command line, in this process or in one of its own.

One rank runs here, which saves the seconds that starting an interpreter costs; several ranks start as a user starts
them. What a job must do is asserted in the tests, not here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shardwright import cli
from shardwright.train.config import Config

TINY = """
[run]
name = "tiny"
device = "cpu"
[model]
dim = 32
n_layers = 2
n_heads = 2
n_kv_heads = 1
ffn_dim = 64
max_seq_len = 64
[train]
steps = 8
seq_len = 32
global_batch = 8
micro_batch = 2
[optimizer]
lr = 1e-2
warmup_steps = 2
schedule = "constant"
[parallel]
engine = "none"
[validation]
every = 4
batches = 2
[checkpoint]
every = 3
[log]
tensorboard = false
"""


def tiny(**sections: dict[str, Any]) -> Config:
    """The tiny job's configuration with some values replaced: tiny(train={"steps": 2})."""
    import tomllib

    values = tomllib.loads(TINY)
    for name, section in sections.items():
        values.setdefault(name, {}).update(section)
    return Config.model_validate(values)


def config_file(folder: Path, text: str = TINY) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tiny.toml"
    path.write_text(text)
    return path


def train_here(config: Path, *arguments: str | Path) -> int:
    """`shardwright train` with one rank in this process; returns the exit status."""
    status = cli.main(["train", str(config), *map(str, arguments)])
    assert not dist.is_initialized()
    return status


def start(
    *arguments: str | Path, environment: dict[str, str] | None = None, **options: Any
) -> subprocess.Popen[str]:
    """`shardwright` as a process of its own."""
    source = Path(cli.__file__).parents[1]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(source), **(environment or {})}
    command = [sys.executable, "-m", "shardwright", *map(str, arguments)]
    return subprocess.Popen(
        command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


def finish(process: subprocess.Popen[str], timeout: float = 90) -> tuple[int, str, str]:
    """Status, stdout and stderr of a process, which is killed with its ranks if it takes too long."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()  # its ranks notice and leave
        out, err = process.communicate()
        raise AssertionError(f"no end after {timeout} s\n{out}\n{err}") from None
    return process.returncode, out, err


def run(
    *arguments: str | Path, environment: dict[str, str] | None = None, **options: Any
) -> tuple[int, str, str]:
    return finish(start(*arguments, environment=environment, **options))


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in records(folder)]


def wait_for(what: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def wait_for_steps(folder: Path, steps: int) -> None:
    """Until the job has written that many records."""
    file = folder / "metrics.jsonl"
    wait_for(lambda: file.exists() and file.read_text().count("\n") >= steps)


def rank_process(launcher: subprocess.Popen[str], rank: int) -> int:
    """Process id of a rank of a job."""
    import psutil

    for child in psutil.Process(launcher.pid).children():
        if child.environ().get("RANK") == str(rank):
            return int(child.pid)
    raise AssertionError(f"found no rank {rank}")
