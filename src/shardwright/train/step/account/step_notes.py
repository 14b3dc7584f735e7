"""The leases, the collectives and the marks of streams of one early step of the first rank, with times, in a file of
less than 1 MB.

The engine notes leases and collectives in every step (``engine/heartbeat.py``, ``engine/memory/slab.py``), and orders
its streams in one place (``engine/comm/streams.py``); here is a listener for one step. Nothing here plans or draws.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any, Literal

import torch

from shardwright.common.json_text import strict_json
from shardwright.engine import heartbeat
from shardwright.engine.comm import DTENSOR, hears_dtensor, streams_for, watched
from shardwright.engine.memory import Slab, observe
from shardwright.train.config import ParallelConfig, TrainConfig
from shardwright.train.config.catalog.hooks import TrainerHook
from shardwright.train.config.catalog.records import RunEnd, StepRecord
from shardwright.train.errors import UserError
from shardwright.train.run.folder import RunFolder
from shardwright.train.run.writing import write_text
from shardwright.train.step.account.clock import Event
from shardwright.train.step.trainer import Trainer

NOTED = 3
"""The step of a session that is noted. By then one step has run with the memory plan, and one in the usual order."""
MOST = 20_000
"""Notes that are kept. A note takes up to 45 bytes, so the file stays below 1 MB."""
KINDS: tuple[Literal["lease", "release", "begin", "wait", "end", "phase", "stream"], ...] = (
    "lease", "release", "begin", "wait", "end", "phase", "stream",
)  # fmt: skip
LEASE, RELEASE, BEGIN, WAIT, END, PHASE, STREAM = range(7)
STREAMS = {"all-gather": "gather", "reduce-scatter": "reduce", "all-reduce": "all_reduce"}
"""The stream of a collective by its name, for waits on the CPU, where marks have no objects."""
NO_TIME = -1
"""In the place of the device's time of a mark that has none."""


def calls_dtensor(train: TrainConfig, parallel: ParallelConfig) -> bool:
    """Return whether a step calls collectives of DTensor that a listener can hear: not those inside compiled blocks."""
    return parallel.parts_of("layers") > 1 and train.compile == "none" and not train.cuda_graph


class NotesOfStep(TrainerHook):
    """Keeps the leases and collectives of step `NOTED` of the session. It is a listener, and an observer of slabs."""

    def __init__(self, trainer: Trainer, folder: RunFolder, event: Callable[[], Event] | None = None) -> None:
        """``event``: makes an event of the device that keeps its time. None: the device's own, if it is CUDA."""
        self._trainer, self._folder = trainer, folder
        if event is None and trainer.world.device.type == "cuda":
            event = functools.partial(torch.cuda.Event, enable_timing=True)
        self._event = event
        self._first: Event | None = None  #: at the begin of the step
        self._events: dict[int, Event] = {}  #: by the number of the note
        self._unit = self._collective = ""  #: of the collective that begins or is waited for
        self._phase_unit = ""
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
            self._stack.enter_context(heartbeat.listening(self))
            self._stack.enter_context(observe(self))
            streams = streams_for(self._trainer.world.device)
            self._captures = lambda: streams.capturing
            self._stack.enter_context(watched(streams, self.ordered))
            config = self._trainer.config
            if calls_dtensor(config.train, config.parallel):
                self._stack.enter_context(hears_dtensor(self))
            if self._event is not None:
                self._first = self._event()
                self._first.record()

    def end_step(self) -> None:
        self._stack.close()

    def after_step(self, record: StepRecord) -> None:
        if self._steps == NOTED:
            self._stack.close()
            self._read_events()
            content = {
                "step": record.step,
                "rank": self._trainer.world.rank,
                "device": self._trainer.world.device.type,
                "columns": ["microseconds", "kind", "unit", "name", "bytes, or microseconds of the device"],
                "kinds": KINDS,
                "names": list(self._names),
                "left_out": max(self._total - MOST, 0),
                "notes": self._notes,
            }
            with suppress(OSError, UserError):  # a run does not end for its notes
                write_text(self._folder.notes_file, strict_json(content) + "\n")
            self._notes, self._names, self._events = [], {}, {}

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

    # -- a listener of the heartbeat ---------------------------------------------------------------------------------

    def at(self, phase: int, unit: str) -> None:
        self._phase_unit = unit
        self._note(PHASE, unit, heartbeat.PHASES[phase])

    def enter(self, collective: str, group: str, nbytes: int, subject: str) -> None:
        self._unit, self._collective = self._unit_of(collective, subject), collective
        self._note(BEGIN, self._unit, collective, nbytes)
        self._in_collective = True

    def await_result(self, collective: str, group: str, nbytes: int, subject: str) -> None:
        self._unit, self._collective = self._unit_of(collective, subject), collective
        self._note(WAIT, self._unit, collective, nbytes)
        self._in_collective = True

    def _unit_of(self, collective: str, subject: str) -> str:
        """DTensor does not know units: its collectives are of the unit whose forward or backward runs."""
        return self._phase_unit if collective in DTENSOR.values() else subject

    def leave(self) -> None:
        if self._in_collective:
            self._note(END)
        self._in_collective = False
        self._unit = self._collective = ""

    # -- a listener of streams -----------------------------------------------------------------------------------

    def ordered(self, what: str, name: str, stream: Any) -> None:
        """See `shardwright.engine.comm.streams.Tell`."""
        name = name or STREAMS.get(self._collective, "")
        self._note(STREAM, self._unit or self._phase_unit, f"{what} {name}".strip(), NO_TIME)
        if self._event is None or stream is None or self._total > MOST or self._captures():
            return
        event = self._event()
        event.record(stream)
        self._events[len(self._notes) - 1] = event

    def _read_events(self) -> None:
        """Replace the device's times. The host waits here, once in a session, for the last event."""
        for place, event in self._events.items():
            assert self._first is not None
            try:
                event.synchronize()
                microseconds = round(self._first.elapsed_time(event) * 1000)
            except RuntimeError:
                return  # of the device: a run does not end for its notes
            # A stream may reach its mark before the computation begins the step.
            self._notes[place] = (*self._notes[place][:4], max(0, microseconds))

    # -- an observer of slabs ------------------------------------------------------------------------------------

    def leased(self, slab: Slab) -> None:
        self._note(LEASE, slab.unit, slab.kind, slab.nbytes)

    def releases(self, slab: Slab) -> None:
        self._note(RELEASE, slab.unit, slab.kind, slab.nbytes)

    def resizes(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        pass

    def resized(self, storage: torch.UntypedStorage) -> None:
        pass

    def exchanged(self, one: torch.UntypedStorage, two: torch.UntypedStorage) -> None:
        pass
