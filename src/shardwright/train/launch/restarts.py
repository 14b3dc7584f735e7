"""A job starts again after an attempt has failed, if its settings allow it: on how many ranks, with which command line.

A restart goes on from the newest whole checkpoint. Before there is one, it begins from the start in the same folder.
Nothing here starts or watches processes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from shardwright.train.config.sections.fault import FaultConfig
from shardwright.train.errors import counted
from shardwright.train.run.exits import FAILED, TRY_AGAIN, Outcome
from shardwright.train.run.folder import RunFolder, newest_saved


class AttemptEnd(NamedTuple):
    """The end of an attempt that failed."""

    status: int
    reason: str
    step: int


@dataclass(frozen=True)
class Attempt:
    """One start of all ranks.

    Attributes:
        number: 1 for the first start.
        ranks: how many.
        arguments: their command line, without the program.
        devices: the GPUs for the ranks, as CUDA_VISIBLE_DEVICES has them; empty for those of this process.
    """

    number: int
    ranks: int
    arguments: tuple[str, ...]
    devices: tuple[str, ...] = ()

    def after(self, end: Outcome, ranks: int, folder: RunFolder, began: bool) -> Attempt:
        """Return the next attempt, with `ranks` ranks. With fewer, the GPU of the lost rank is left out.

        `began` says whether an attempt of this job has opened a session in the folder.
        """
        devices = self.devices
        if ranks < self.ranks and end.rank is not None:
            kept = list(devices or _visible_devices())
            del kept[end.rank : end.rank + 1]
            devices = tuple(kept)
        arguments = _arguments(folder, self.arguments) if began else self.arguments
        return Attempt(self.number + 1, ranks, arguments, devices)


def _visible_devices() -> list[str]:
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(number) for number in range(torch.cuda.device_count())]


def _arguments(folder: RunFolder, arguments: tuple[str, ...]) -> tuple[str, ...]:
    """Return the command line of a restart. It uses the run's stored configuration: CONFIG.toml may have changed."""
    debug = ("--debug",) if "--debug" in arguments else ()
    if goes_on(folder):
        return ("train", "--resume", str(folder.path), *debug)
    if folder.config_file.is_file():
        return ("train", str(folder.config_file), *debug)
    return arguments


def place_in_words(folder: RunFolder, ranks: int) -> str:
    """Return the step from which a restart goes on and its ranks, in words."""
    on = f"on {counted(ranks, 'rank')}"
    try:
        step = newest_saved(folder)
    except OSError:
        return f"resuming {on}"
    if step is None:
        return f"starting from the beginning {on}, since nothing is saved"
    return f"resuming from step {step} {on}"


def goes_on(folder: RunFolder) -> bool:
    """Return whether a restart goes on from a checkpoint. If a store does not answer now, the ranks ask it again."""
    try:
        return newest_saved(folder) is not None
    except OSError:
        return True


class Restarts:
    """The restarts of a job.

    Args:
        settings: of the job.
        can_run: says whether the job can run with a number of ranks.
    """

    def __init__(self, settings: FaultConfig, can_run: Callable[[int], bool]) -> None:
        self.settings, self.can_run = settings, can_run
        self.count = 0
        self._ends: list[AttemptEnd] = []

    def after(self, end: Outcome, step: int, ranks: int) -> tuple[int, str]:
        """Return the ranks of the next attempt, 0 for none, and why there is none, as the rest of "the job has ended".

        `step` is the last one that was done: by the rank that failed, if that is known, else in the record. `ranks` is
        the number of the attempt that ended.
        """
        if end.status not in (FAILED, TRY_AGAIN) or not self.settings.max_restarts:
            return 0, ""
        self._ends.append(AttemptEnd(end.status, end.reason, step))
        if again := same_again(self._ends):
            return 0, f": {again}"
        if self.count == self.settings.max_restarts:
            return 0, f" after {counted(self.count, 'restart')}"
        self.count += 1
        return self._ranks(end, ranks), ""

    def _ranks(self, end: Outcome, ranks: int) -> int:
        least = self.settings.least_ranks
        if not least or not end.lost:
            return ranks
        return next((fewer for fewer in range(ranks - 1, least - 1, -1) if self.can_run(fewer)), ranks)


def same_again(ends: Sequence[AttemptEnd]) -> str:
    """Return the reason for which a job does not start again: its last failures are the same; else empty. Attempts in
    between of which a rank was killed change nothing."""
    failures = [(without_numbers(each.reason), each.step) for each in ends if each.status == FAILED]
    if not ends or ends[-1].status != FAILED or failures[-1:] * 2 != failures[-2:]:
        return ""
    return f"the same error came twice after step {ends[-1].step}, so it does not start again"


def without_numbers(reason: str) -> str:
    """Return an error without what differs between two equal ones: addresses, sizes, ranks."""
    return re.sub(r"0x[0-9a-fA-F]+|\d+(\.\d+)?", "#", reason)
