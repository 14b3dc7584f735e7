#!/usr/bin/env python3
"""How long do saves and loads of checkpoints take, and how long does training wait, beside torch's own?

    python benchmarks/checkpoints.py [--ranks 1 2] [--gigabytes 1] [--rounds 5] [--only TEXT] [--folder /tmp]

The state is the float32 parameters of linear layers, sharded over the ranks. Every way saves it in each round; the next
round begins with the next way. A round before them is not timed, except for "first". Medians over rounds, each of the
slowest rank:

    blocked   seconds until the save returns, and training could go on
    first     the same in the first round, in which an asynchronous save gets its memory
    total     seconds until the checkpoint is on disk (fsync)
    save      bytes of all ranks by "total"
    load      bytes of all ranks by the time of a load. The files are in the system's cache
    memory    bytes at most beyond what was there before the first save, in parts of one rank's state, with the writer
              process. From a round of its own, sampled; memory that processes share counts once

"+ sha256" digests what was written and compares it at a load, which ours always do. torch.save writes a file of each
rank and cannot be read at another number of ranks. Nothing trains while a checkpoint is written. Results go to
benchmarks/results.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import multiprocessing
import os
import platform
import shutil
import statistics
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh

import shardwright as sw

WIDTH = 2048  #: of a layer: 16 MiB
Finish = Callable[[], object]


class Way(ABC):
    """One way to save and load."""

    name = ""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @abstractmethod
    def save(self, path: Path) -> Finish:
        """Begin to save. What it returns waits until the checkpoint is on disk."""

    @abstractmethod
    def load(self, path: Path) -> None:
        """Load what was saved into the model."""

    def close(self) -> None:  # noqa: B027  # most ways have nothing to end
        pass


class Ours(Way):
    name = "save_checkpoint"

    def save(self, path: Path) -> Finish:
        sw.save_checkpoint(path, self.model, generators=False)
        return nothing

    def load(self, path: Path) -> None:
        sw.load_checkpoint(path, self.model, generators=False)


class OursAsync(Ours):
    name = "AsyncCheckpoint"

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._checkpoints = sw.AsyncCheckpoint()

    def save(self, path: Path) -> Finish:
        self._checkpoints.save(path, self.model, generators=False)
        return self._checkpoints.wait

    def close(self) -> None:
        self._checkpoints.close()


class Torch(Way):
    name = "dcp.save"

    def save(self, path: Path) -> Finish:
        dcp.save({"model": get_model_state_dict(self.model)}, checkpoint_id=str(path))
        return nothing

    def load(self, path: Path) -> None:
        dcp.load({"model": get_model_state_dict(self.model)}, checkpoint_id=str(path))


class TorchDigested(Torch):
    name = "dcp.save + sha256"

    def save(self, path: Path) -> Finish:
        super().save(path)
        self._digests = digests(path)
        return nothing

    def load(self, path: Path) -> None:
        assert digests(path) == self._digests
        dist.barrier()
        super().load(path)


class TorchThread(Torch):
    name = "dcp.async_save, thread"
    kind = AsyncCheckpointerType.THREAD

    def save(self, path: Path) -> Finish:
        state = {"model": get_model_state_dict(self.model)}
        future: Any = dcp.async_save(state, checkpoint_id=str(path), async_checkpointer_type=self.kind)
        return getattr(future, "upload_completion", future).result  # type: ignore[no-any-return]


class TorchProcess(TorchThread):
    name = "dcp.async_save, process"
    kind = AsyncCheckpointerType.PROCESS


class OneFile(Way):
    name = "torch.save + sha256"

    def save(self, path: Path) -> Finish:
        path.mkdir(exist_ok=True)
        state = {name: value.to_local() for name, value in self.model.state_dict().items()}
        with open(path / str(dist.get_rank()), "wb") as stream:
            torch.save(state, stream)
            stream.flush()
            os.fsync(stream.fileno())
        self._digest = digest(path / str(dist.get_rank()))
        return nothing

    def load(self, path: Path) -> None:
        file = path / str(dist.get_rank())
        assert digest(file) == self._digest
        stored = torch.load(file, weights_only=True)
        for name, value in self.model.state_dict().items():
            value.to_local().copy_(stored[name])


WAYS: list[type[Way]] = [Ours, OursAsync, Torch, TorchDigested, TorchThread, TorchProcess, OneFile]


def nothing() -> None:
    pass


def digest(file: Path) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def digests(folder: Path) -> list[str]:
    """Digests of this rank's files; on the first rank also of the metadata."""
    rank = dist.get_rank()
    names = [each.name for each in folder.iterdir() if each.name.startswith(f"__{rank}_")]
    return [digest(folder / name) for name in sorted([*names, *([] if rank else [".metadata"])])]


# -- measuring ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """The settings of a measured run."""

    folder: str
    ranks: int
    layers: int
    rounds: int
    only: str


class Memory:
    """The most bytes that this process and its children have at once, beyond those at the start."""

    def __enter__(self) -> Memory:
        gc.collect()
        self.before, self.most, self._is_over = self._bytes(), 0, False
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self._thread.join()

    @property
    def beyond(self) -> int:
        return self.most - self.before

    def _look(self) -> None:
        while not self._is_over:
            self.most = max(self.most, self._bytes())
            time.sleep(0.02)

    def _bytes(self) -> int:
        pids = [os.getpid()]
        for pid in pids:
            try:
                pids += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
            except OSError:
                continue
        return sum(map(proportional_set, pids))


def proportional_set(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def measure(way: Way, folder: Path) -> tuple[float, float, float]:
    """Seconds of the slowest rank: blocked, total, of a load."""
    path = folder / "checkpoint"
    dist.barrier()
    start = time.perf_counter()
    finish = way.save(path)
    blocked = time.perf_counter() - start
    finish()
    total = time.perf_counter() - start
    dist.barrier()
    start = time.perf_counter()
    way.load(path)
    seconds = torch.tensor([blocked, total, time.perf_counter() - start])
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(path)
    dist.barrier()
    blocked, total, loading = seconds.tolist()
    return blocked, total, loading


def run_rank(rank: int, job: Job) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29711", "LOCAL_WORLD_SIZE": str(job.ranks)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(job.ranks), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    folder = Path(job.folder)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=job.ranks)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(job.layers)))
    sw.fully_shard(model, mesh=init_device_mesh("cpu", (job.ranks,)))
    nbytes = WIDTH * WIDTH * 4 * job.layers
    kinds = [each for each in WAYS if job.only in each.name]
    ways: list[Way] = []
    figures: dict[str, list[tuple[float, float, float]]] = {each.name: [] for each in kinds}
    memory: dict[str, float] = {}
    for kind in kinds:
        with Memory() as used:
            ways.append(kind(model))
            figures[kind.name].append(measure(ways[-1], folder))
        most = torch.tensor(float(used.beyond))
        dist.all_reduce(most, dist.ReduceOp.MAX)
        memory[kind.name] = most.item() * job.ranks / nbytes
    for turn in range(job.rounds):
        for number in range(len(ways)):
            way = ways[(turn + number) % len(ways)]
            figures[way.name].append(measure(way, folder))
    for way in ways:
        way.close()
    if rank == 0:
        report(job, nbytes, figures, memory)
    dist.barrier()
    sys.stdout.flush()
    for process in multiprocessing.active_children():
        process.kill()  # torch's writer process does not end otherwise
    os._exit(0)


def report(
    job: Job, nbytes: int, figures: dict[str, list[tuple[float, float, float]]], memory: dict[str, float]
) -> None:
    print(f"\n{job.ranks} ranks, {nbytes / 1e9 / job.ranks:.2f} GB each, medians of {job.rounds} rounds")
    print(
        f"{'':<26}{'blocked s':>10}{'first s':>9}{'total s':>9}{'save GB/s':>11}{'load GB/s':>11}{'memory':>8}"
    )
    for name, (first, *rounds) in figures.items():
        blocked, total, loading = (statistics.median(each) for each in zip(*rounds, strict=True))
        print(
            f"{name:<26}{blocked:>10.3f}{first[0]:>9.3f}{total:>9.3f}{nbytes / total / 1e9:>11.2f}"
            f"{nbytes / loading / 1e9:>11.2f}{memory[name]:>8.2f}"
        )
    if {Ours.name, OursAsync.name} <= figures.keys():
        ratios = [
            mine[0] / other[0]
            for mine, other in zip(figures[OursAsync.name][1:], figures[Ours.name][1:], strict=True)
        ]
        print(
            f"blocked by AsyncCheckpoint / save_checkpoint, median of the rounds: {statistics.median(ratios):.3f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of each rank")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="ways whose name contains this text")
    parser.add_argument("--folder", help="in which a folder is made and removed")
    args = parser.parse_args()
    version = torch.__version__.partition("+")[0]
    print(
        f"{platform.machine()} {platform.system()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, Python "
        f"{platform.python_version()}, torch {version}, shardwright {sw.__version__}",
        flush=True,
    )
    for ranks in args.ranks:
        layers = max(1, round(args.gigabytes * 1e9 / (WIDTH * WIDTH * 4))) * ranks
        with tempfile.TemporaryDirectory(dir=args.folder, ignore_cleanup_errors=True) as folder:
            mp.spawn(run_rank, (Job(folder, ranks, layers, args.rounds, args.only),), nprocs=ranks)
    print(f"load at the end {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
