"""The leases and the collectives of one early step of the first rank, with times, in a file of less than 1 MB.

The engine notes both in every step (``board.py``, ``memory/slab.py``); here is a listener for one step. Nothing here
plans or draws.
"""

from __future__ import annotations

import time
from contextlib import ExitStack, suppress
from typing import Literal

import torch

from shardwright import board as boards
from shardwright.memory import Slab
from shardwright.memory.slab import observe
from shardwright.strict_json import strict_json
from shardwright.train.config.catalog.hooks import TrainerHook
from shardwright.train.config.catalog.records import RunEnd, StepRecord
from shardwright.train.errors import UserError
from shardwright.train.run.folder import RunFolder
from shardwright.train.run.writing import write_text
from shardwright.train.step.trainer import Trainer

NOTED = 3
"""The step of a session that is noted. By then one step has run with the memory plan, and one in the usual order."""
MOST = 20_000
"""Notes that are kept. A note takes up to 45 bytes, so the file stays below 1 MB."""
KINDS: tuple[Literal["lease", "release", "begin", "wait", "end", "phase"], ...] = (
    "lease", "release", "begin", "wait", "end", "phase",
)  # fmt: skip
LEASE, RELEASE, BEGIN, WAIT, END, PHASE = range(6)


class NotesOfStep(TrainerHook):
    """Keeps the leases and collectives of step `NOTED` of the session. It is a listener, and an observer of slabs."""

    def __init__(self, trainer: Trainer, folder: RunFolder) -> None:
        self._trainer, self._folder = trainer, folder
        self._steps = 0  # of this session
        self._stack = ExitStack()
        self._names: dict[str, int] = {}
        self._notes: list[tuple[int, int, int, int, int]] = []
        self._total = self._began = 0
        self._in_collective = False

    def before_step(self, step: int) -> None:
        self._steps += 1
        if self._steps == NOTED:
            self._began = time.perf_counter_ns()
            self._stack.enter_context(boards.listening(self))
            self._stack.enter_context(observe(self))

    def end_step(self) -> None:
        self._stack.close()

    def after_step(self, record: StepRecord) -> None:
        if self._steps == NOTED:
            self._stack.close()
            content = {
                "step": record.step,
                "rank": self._trainer.world.rank,
                "device": self._trainer.world.device.type,
                "columns": ["microseconds", "kind", "unit", "name", "bytes"],
                "kinds": KINDS,
                "names": list(self._names),
                "left_out": max(self._total - MOST, 0),
                "notes": self._notes,
            }
            with suppress(OSError, UserError):  # a run does not end for its notes
                write_text(self._folder.notes_file, strict_json(content) + "\n")
            self._notes, self._names = [], {}

    def end(self, end: RunEnd) -> None:
        self._stack.close()

    def _note(self, kind: int, unit: str = "", name: str = "", nbytes: int = 0) -> None:
        self._total += 1
        if self._total <= MOST:
            at = (time.perf_counter_ns() - self._began) // 1000
            number = self._names.setdefault
            self._notes.append(
                (at, kind, number(unit, len(self._names)), number(name, len(self._names)), nbytes)
            )

    # -- a listener of the board ---------------------------------------------------------------------------------

    def at(self, phase: int, unit: str) -> None:
        self._note(PHASE, unit, boards.PHASES[phase])

    def enter(self, collective: str, group: str, nbytes: int, subject: str) -> None:
        self._note(BEGIN, subject, collective, nbytes)
        self._in_collective = True

    def await_result(self, collective: str, group: str, nbytes: int, subject: str) -> None:
        self._note(WAIT, subject, collective, nbytes)
        self._in_collective = True

    def leave(self) -> None:
        if self._in_collective:
            self._note(END)
        self._in_collective = False

    # -- an observer of slabs ------------------------------------------------------------------------------------

    def leased(self, slab: Slab) -> None:
        self._note(LEASE, slab.unit, slab.kind, slab.nbytes)

    def releases(self, slab: Slab) -> None:
        self._note(RELEASE, slab.unit, slab.kind, slab.nbytes)

    def resizes(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        pass

    def resized(self, storage: torch.UntypedStorage) -> None:
        pass
