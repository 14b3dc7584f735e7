"""Tiny training jobs for the tests of the trainer: through the command line, in this process or in others.

One rank runs here and several are forked, which saves the seconds that starting an interpreter costs, where what is
tested is not the launcher or the process itself: those start as a user starts them. What a job must do is asserted in
the tests, not here.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from base64 import b64decode
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwright import cli
from shardwright.checkpoint import list_checkpoints
from shardwright.train.config import Config
from shardwright.train.data.dataset import Dataset
from shardwright.train.launch.signals import StopRequest
from shardwright.train.parallel.world import World
from shardwright.train.run.folder import RunFolder
from shardwright.train.step.trainer import Trainer
from tests.support.pool import forkserver
from tests.train.kit.parallel import dataset_of

TINY = """
[run]
name = "tiny"
device = "cpu"
sample_tokens = 4
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
sinks = []
"""


def tiny(**sections: dict[str, Any]) -> Config:
    """The tiny job's configuration with some values replaced: tiny(train={"steps": 2})."""
    import tomllib

    values = tomllib.loads(TINY)
    for name, section in sections.items():
        values.setdefault(name, {}).update(section)
    return Config.model_validate(values)


HYBRID: dict[str, Any] = {
    "kind": "hybrid", "pattern": "ME*-", "mtp_pattern": "E", "dim": 32, "n_layers": None, "n_heads": 4,
    "n_kv_heads": 4, "head_dim": 8, "ffn_dim": 64, "mamba_heads": 4, "mamba_head_dim": 8, "mamba_groups": 2,
    "mamba_state": 6, "chunk_size": 16, "n_experts": 4, "top_k": 2, "expert_dim": 32, "shared_dim": 24,
    "max_seq_len": 64, "tied_embeddings": True, "balance_weight": 0.1,
}  # fmt: skip
"""A small `[model]` with every kind of layer."""


def trainer(config: Config, rank: int, world_size: int, dataset: Dataset | None = None) -> Trainer:
    """The trainer of one rank of a test's own process group, on random bytes unless there is another dataset."""
    world = World.of(config.parallel, rank, world_size, torch.device("cpu"))
    return Trainer(config, world, dataset or dataset_of(config))


def config_file(folder: Path, text: str = TINY) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tiny.toml"
    path.write_text(text)
    return path


#: A picture of one pixel.
BLANK = b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
)


@contextmanager
def blank_pictures() -> Iterator[None]:
    """Inside the context matplotlib writes one pixel in place of a picture, whose drawing takes as long as a tiny job.

    Pictures are drawn in `tests/train/report`, and by jobs in processes of their own.
    """

    def write(figure: object, file: Path, **options: object) -> None:
        file.write_bytes(BLANK)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("matplotlib.figure.Figure.savefig", write)
        yield


def train_here(config: Path, *arguments: str | Path) -> int:
    """`shardwright train` with one rank in this process; returns the exit status."""
    with blank_pictures():
        status = cli.main(["train", str(config), *map(str, arguments)])
    assert not dist.is_initialized()
    return status


def ranks(
    count: int,
    *arguments: str | Path,
    timeout: float = 180,
    largest_file: int = -1,
    folders: Sequence[Path] | None = None,
    environment: dict[str, str] | None = None,
) -> list[tuple[int | None, str]]:
    """`shardwright` on ranks with what torchrun sets, without our launcher: each one's status and stderr.

    Writes beyond ``largest_file`` bytes fail as on a full disk (EFBIG in place of ENOSPC). ``folders`` are the working
    folders of the ranks.
    """
    if largest_file >= 0:
        arguments = (*arguments, "--fault.stall_seconds", "0")  # heartbeats in shared memory are files, too
    # The store is hosted here, so that its port is the system's choice.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder, f"rank{rank}") for rank in range(count)]
        processes = []
        for rank, log in enumerate(logs):
            variables = {**shared, **(environment or {}), "RANK": str(rank), "LOCAL_RANK": str(rank)}
            processes.append(
                forkserver().Process(
                    target=_rank,
                    args=(variables, arguments, log, largest_file, folders[rank] if folders else Path()),
                    daemon=True,
                )
            )
            processes[-1].start()
        deadline = time.monotonic() + timeout
        for process in processes:
            process.join(deadline - time.monotonic())
            process.kill()  # those that have ended do not mind
            process.join()
        return [(process.exitcode, log.read_text()) for process, log in zip(processes, logs, strict=True)]


def _rank(
    variables: dict[str, str], arguments: tuple[str | Path, ...], log: Path, largest_file: int, folder: Path
) -> None:
    os.environ.update(variables)
    os.chdir(folder)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
    with blank_pictures():
        sys.exit(cli.main(list(map(str, arguments))))


def start(
    *arguments: str | Path,
    environment: dict[str, str] | None = None,
    command: Sequence[str] = (sys.executable, "-m", "shardwright"),
    **options: Any,
) -> subprocess.Popen[str]:
    """`shardwright` as a process of its own."""
    source = Path(cli.__file__).parents[2]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(source), **(environment or {})}
    return subprocess.Popen(
        [*command, *map(str, arguments)],
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def finish(process: subprocess.Popen[str], timeout: float = 240) -> tuple[int, str, str]:
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


def run_record(folder: Path) -> dict[str, Any]:
    """The content of run.json."""
    return json.loads((folder / "run.json").read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def run_config(folder: Path) -> Config:
    """The configuration that a run keeps."""
    return RunFolder(folder).config()


def profile_of(folder: Path, first: int, last: int, rank: int) -> Path:
    """The trace of a rank in these steps."""
    return folder / "profile" / f"steps_{first}_to_{last}_rank_{rank}.json.gz"


def steps_in(checkpoints: Path | str) -> list[int]:
    """The steps that have a checkpoint in a folder or at a URL, newest first."""
    return sorted((int(name.removeprefix("step-")) for name in list_checkpoints(checkpoints)), reverse=True)


def train_step(trainer: Trainer) -> Any:
    """A step that no signal disturbs."""
    return trainer.train_step(StopRequest())


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in records(folder)]


def wait_for(what: Callable[[], bool], seconds: float = 180) -> None:
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


def read_exit(folder: Path) -> dict[str, Any] | None:
    """The content of exit.json; None if there is no readable one."""
    try:
        content = json.loads((folder / "exit.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None
