"""The parts of a step's time: forward, backward, optimizer, exposed communication, data, and the rest.

A clock runs in every step, and the parts add up to the step's seconds. On the CPU the host's time is divided: it does
all the work. On a GPU events on the computation's stream are read after the step's one wait for the device. Nothing
here waits, prints or writes.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any, Literal, Protocol

import torch

Part = Literal["forward", "backward", "optimizer", "communication", "data", "host"]
PARTS: tuple[Part, ...] = ("forward", "backward", "optimizer", "communication", "data", "host")


class StepClock:
    """The clock of a step on the CPU. It is a listener of the heartbeat: time in the engine's collectives is
    communication. It also hears those of DTensor, as of tensor parallelism, unless blocks are compiled.

    Attributes:
        follow: called with each part that the trainer begins, while a profiler runs.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.follow: Callable[[Part], None] | None = None
        self._now = now
        self._started = self._at = 0.0
        self._seconds = _nothing()
        self._part: Part = "host"
        self._around: Part | None = None  #: the part in which a collective runs; None: none runs

    def begin(self) -> None:
        """A step begins."""
        self._seconds = _nothing()
        self._part, self._around = "host", None
        self._started = self._at = self._now()

    def to(self, part: Part) -> None:
        """The step goes on with another part."""
        self._around = None
        self._switch(part)
        if self.follow is not None:
            self.follow(part)

    def _switch(self, part: Part) -> None:
        now = self._now()
        self._seconds[self._part] += now - self._at
        self._part, self._at = part, now

    def wait_begins(self) -> None:
        """The host is about to wait for the device, once in a step."""

    def wait_ends(self) -> None:
        """The device has done all work that was queued before the wait."""

    def end(self) -> tuple[float, dict[Part, float]]:
        """End the step; return its seconds, and those of each part."""
        self.to("host")
        return self._at - self._started, self._seconds.copy()  # collectives between steps change the original

    # -- a listener of the heartbeat ----------------------------------------------------------------------------

    def at(self, phase: int, unit: str) -> None:
        pass

    def enter(self, collective: str, group: str, nbytes: int, subject: str) -> None:
        if self._around is None:
            self._around = self._part
            self._switch("communication")

    def await_result(self, collective: str, group: str, nbytes: int, subject: str) -> None:
        self.enter(collective, group, nbytes, subject)

    def leave(self) -> None:
        if self._around is not None:
            around, self._around = self._around, None
            self._switch(around)

    def end_step(self) -> None:
        pass


class Event(Protocol):
    """An event of a device's stream that keeps its time."""

    def record(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, later: Any) -> float:
        """Milliseconds until a later event. Both are over."""


class DeviceClock(StepClock):
    """The clock of a step on a GPU, whose work runs later than the host queues it.

    From forward until the step's wait, the time of the computation's stream is divided. Before it the device ends the
    optimizer of the step before, and then idles; after the wait the host queues the optimizer while the device runs it.
    """

    def __init__(
        self, event: Callable[[], Event], waits: bool = True, now: Callable[[], float] = time.perf_counter
    ) -> None:
        """``event``: makes one. ``waits``: False if a CUDA graph has the waits for collectives inside."""
        super().__init__(now)
        self._event, self._waits = event, waits
        self._pool: list[Event] = []
        self._marks: list[tuple[Part, Event]] = []  #: begins of parts on the device
        self._ends = event(), event()  #: of the step before, and of this one
        self._has_end = False  #: whether the step before has one
        self._waited_at: float | None = None
        self._before_wait = _nothing()

    def begin(self) -> None:
        self._marks.clear()
        self._waited_at = None
        super().begin()

    def to(self, part: Part) -> None:
        super().to(part)
        if self._waited_at is None and (self._marks or part in ("forward", "backward")):
            self._mark(part)

    def _mark(self, part: Part) -> None:
        if len(self._marks) == len(self._pool):
            self._pool.append(self._event())
        event = self._pool[len(self._marks)]
        event.record()
        self._marks.append((part, event))

    def wait_begins(self) -> None:
        self.to("host")

    def wait_ends(self) -> None:
        self._switch(self._part)
        self._waited_at, self._before_wait, self._seconds = self._at, self._seconds, _nothing()

    def end(self) -> tuple[float, dict[Part, float]]:
        seconds, after_wait = super().end()
        earlier, latest = self._ends
        latest.record()
        self._ends = latest, earlier
        had_end, self._has_end = self._has_end, True
        if self._waited_at is None or not self._marks:
            return seconds, after_wait
        parts = after_wait
        on_device = 0.0
        for (part, event), (_, later) in itertools.pairwise(self._marks):
            elapsed = event.elapsed_time(later) / 1e3
            parts[part] += elapsed
            on_device += elapsed
        first = self._marks[0][1]
        # Until forward: the rest of the optimizer's work of the step before, then nothing.
        before = max(self._waited_at - self._started - on_device, 0.0)
        idle = min(before, max(earlier.elapsed_time(first) / 1e3, 0.0)) if had_end else before
        data = min(idle, self._before_wait["data"])
        parts["optimizer"] += before - idle
        parts["data"] += data
        parts["host"] += idle - data
        return seconds, parts

    # -- a listener of the heartbeat: on a device the begin of a collective is no wait ------------------------------

    def enter(self, collective: str, group: str, nbytes: int, subject: str) -> None:
        pass

    def await_result(self, collective: str, group: str, nbytes: int, subject: str) -> None:
        if self._waits and self._marks and self._waited_at is None and self._around is None:
            self._around = self._part
            self._mark("communication")

    def leave(self) -> None:
        if self._around is not None:
            self._mark(self._around)
            self._around = None


def clock_for(device: torch.device, cuda_graph: bool = False, reads_each: bool = True) -> StepClock:
    """Return the clock of steps on this device.

    Args:
        device: the device.
        cuda_graph: whether forward and backward are in a graph.
        reads_each: whether the host reads the numbers of a step before it queues the next one. If not, events of the
            device are not over where a step ends, and the parts are those of the host's time.
    """
    if device.type != "cuda" or not reads_each:
        return StepClock()
    return DeviceClock(lambda: torch.cuda.Event(enable_timing=True), not cuda_graph)


def _nothing() -> dict[Part, float]:
    return dict.fromkeys(PARTS, 0.0)
