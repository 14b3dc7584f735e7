"""One process of a contender. It builds the step at the first question, and answers questions until one is None.

The answer to every question is ``(True, value)`` or ``(False, reason)``. Output goes to a file.
"""

from __future__ import annotations

import atexit
import functools
import gc
import linecache
import os
import sys
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.peers import agreement
from benchmarks.peers.contenders import CONTENDERS
from benchmarks.peers.shapes import Shape
from benchmarks.peers.step import Step, as_float


@dataclass(frozen=True)
class Job:
    """The settings of all processes of a contender. ``backend`` is gloo, or fake for one process of ``ranks``."""

    contender: str
    shape: Shape
    ranks: int
    adamw: str
    backend: str = "gloo"


class Rank:
    """The questions. All ranks of a contender get the same ones at the same time."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.rank = dist.get_rank()
        self.done = 0

    @functools.cached_property
    def step(self) -> Step:
        return CONTENDERS[self.job.contender].build(self.job.shape.model(), self.job.adamw)

    def tokens(self, step: int) -> torch.Tensor:
        return self.job.shape.tokens(step, self.rank, self.job.ranks)

    def numbers(self) -> list[tuple[float, float]]:
        """Loss and norm of the first steps."""
        found = []
        for number, weight in enumerate(agreement.WEIGHTS):
            loss, norm = self.step(self.tokens(number), weight)
            found.append((as_float(loss), as_float(norm)))
        self.done = len(found)
        gc.collect()
        gc.freeze()  # what was imported and built is not looked at again while steps are timed
        return found

    def wall(self, steps: int) -> list[float]:
        """Milliseconds of each step, which all ranks begin together."""
        return [self._timed(time.perf_counter_ns) for _ in range(steps)]

    def host(self, steps: int) -> list[float]:
        """Milliseconds of the processor, of all threads of this process."""
        return [self._timed(time.process_time_ns) for _ in range(steps)]

    def _timed(self, clock: Any) -> float:
        tokens, step = self.tokens(self.done), self.step
        self.done += 1
        dist.barrier()
        begun = clock()
        step(tokens, 1.0)
        return (clock() - begun) / 1e6

    def memory(self) -> tuple[int, int]:
        from benchmarks.peers import memory  # needs what the tests need

        return memory.of_a_step(lambda: self.step, self.tokens)


def reason_of(error: BaseException) -> str:
    """The error, and the last line of a package that is neither torch's nor this one's, if there is one."""
    text = f"{type(error).__name__}: {error}".strip().splitlines()[0]
    own = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "site-packages" in f.filename]
    frames = [f for f in frames if not f.filename.startswith(own)]
    if not frames:
        return text
    frame = frames[-1]
    place = frame.filename.rpartition("site-packages/")[2]
    line = linecache.getline(frame.filename, frame.lineno or 0).strip()
    return f"{text} ({place}:{frame.lineno}: {line})"


def work(job: Job, rank: int, store: str, questions: Connection, log: str) -> None:
    """The program of a contender's process."""
    with open(log, "w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    torch.set_num_threads(1)
    try:
        if job.backend == "fake":
            from torch.testing._internal.distributed.fake_pg import FakeStore

            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=job.ranks)
        else:
            dist.init_process_group(
                job.backend, rank=rank, world_size=job.ranks, init_method=f"file://{store}"
            )
        atexit.register(dist.destroy_process_group)
        process = Rank(job)
        while (question := questions.recv()) is not None:
            name, arguments = question
            questions.send((True, getattr(process, name)(*arguments)))
    except Exception as error:
        traceback.print_exc()
        questions.send((False, reason_of(error)))
        sys.exit(1)
