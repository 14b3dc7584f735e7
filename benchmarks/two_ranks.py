"""Two ranks of this machine's CPU, each a process of one thread, that train small jobs on random tokens one by one."""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from shardwright.train.config import Config
from shardwright.train.data.dataset import Dataset
from shardwright.train.data.samples.batch import Batch
from shardwright.train.parallel.world import World
from shardwright.train.planning.absent_data import AbsentData, AbsentStream
from shardwright.train.step.trainer import Trainer

RANKS = 2
Measure = Callable[[int, Sequence[Any]], Mapping[str, Any]]
"""Measures jobs on this rank, in the group of both. The result can be written as JSON."""


@dataclass(frozen=True)
class Random(AbsentStream):
    """Samples of random tokens."""

    vocab: int = 1

    def batch(self, first: int, count: int) -> Batch:
        draw = torch.Generator().manual_seed(first)
        tokens = torch.randint(0, self.vocab, (count, self.seq_len + 1), generator=draw)
        return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), None, None)


def trainer_of(config: Config, rank: int) -> Trainer:
    """The trainer of this rank. Called by both ranks together."""
    world = World.of(config.parallel, rank, RANKS, torch.device("cpu"))
    data = AbsentData.of(config, RANKS)
    stream = Random(config.train.seq_len, False, vocab=data.vocab_size)
    data = AbsentData(stream, data.vocab_size)
    return Trainer(config, world, cast(Dataset, data), reads_weights=False)


def of_both(measuring: Callable[[], Measure], jobs: Sequence[Any]) -> list[dict[str, Any]]:
    """The results of both ranks, which measure at the same time. ``measuring`` is called before they join a group."""
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_run, args=(measuring, rank, folder, jobs)) for rank in range(RANKS)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
            if process.exitcode:
                raise SystemExit(f"a rank ended with status {process.exitcode}")
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(RANKS)]


def _run(measuring: Callable[[], Measure], rank: int, folder: str, jobs: Sequence[Any]) -> None:
    torch.set_num_threads(1)
    measure = measuring()
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{folder}/store", RANKS), rank=rank, world_size=RANKS,
        timeout=timedelta(minutes=10),
    )  # fmt: skip
    atexit.register(dist.destroy_process_group)
    found = measure(rank, jobs)
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
