"""The time of a step: a program is replayed, with its streams, its waits and its host."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

from shardwright.planner.program import (
    HOST,
    OPTIMIZER,
    Alloc,
    Free,
    HostWait,
    Kernel,
    Mark,
    Phase,
    Program,
    Wait,
)
from shardwright.planner.rates import Rates, spread
from shardwright.planner.work import Work, work_of

COMPUTE = "compute"  #: the stream of the computation
CAPTURE = "capture"  #: the same inside a CUDA graph


@dataclass
class Timeline:
    """Where the time of a step goes.

    Attributes:
        seconds: of the step; the sum of what follows up to ``offloaded``.
        busy: seconds of the computation's stream, by kind of work (``products``, ``attention``, ``memory``,
            ``optimizer``), without what follows.
        beside: seconds that kernels take longer because collectives run beside them.
        waits: seconds in which the computation waits for collectives.
        host: seconds in which the device waits for the host.
        copies: seconds by which copies between host and device make the step longer.
        offloaded: seconds by which the host's computation, as of an offloaded optimizer, makes it longer.
        flops: operations of products and of attention.
        ideal: seconds that these take at the device's peak.
        communication: seconds of collectives, by the name of their stream, hidden or not.
    """

    seconds: float = 0.0
    busy: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    beside: float = 0.0
    waits: float = 0.0
    host: float = 0.0
    copies: float = 0.0
    offloaded: float = 0.0
    flops: float = 0.0
    ideal: float = 0.0
    communication: dict[str, float] = field(default_factory=lambda: defaultdict(float))


class _Queued(NamedTuple):
    """A kernel of the program.

    Attributes:
        number: among the different kernels.
        stream: of the kernel.
        optimizes: whether the optimizer runs.
        in_graph: whether a CUDA graph queues it, for which the host needs no time.
    """

    number: int
    stream: str
    optimizes: bool
    in_graph: bool


class Interval(NamedTuple):
    """The time of one kernel.

    Attributes:
        number: among the different kernels.
        stream: of the kernel.
        start, end: seconds since the step's begin.
    """

    number: int
    stream: str
    start: float
    end: float


@dataclass
class Recording:
    """The course of a step: what runs at which time.

    Attributes:
        spans: of the kernels, in the order of the host's program.
        moments: allocations, frees and phases in this order, with the seconds that the computation and the host have
            reached. They never go back.
    """

    spans: list[Interval] = field(default_factory=list)
    moments: list[tuple[Alloc | Free | Phase, float]] = field(default_factory=list)


_Event = _Queued | Mark | Wait | HostWait | Alloc | Free | Phase


@dataclass(frozen=True)
class Step:
    """The last step of a program, after which the states of optimizers exist: what its time depends on.

    Attributes:
        kernels: the different kernels, with their work.
        events: in the order of the host's program.
    """

    kernels: list[tuple[Kernel, Work]]
    events: list[_Event]

    @property
    def queued(self) -> list[_Queued]:
        """Its kernels, in the order in which the host queues them."""
        return [each for each in self.events if isinstance(each, _Queued)]

    @property
    def offloads(self) -> bool:
        """Whether the host of a device computes, or copies run between both."""
        return any(kernel.stream == HOST or work.kind == "copies" for kernel, work in self.kernels)

    @classmethod
    def of(cls, program: Program, with_memory: bool = False) -> Step:
        """Return the last step of a program. ``with_memory``: with allocations, frees and phases, for a recording.

        Raises ValueError if the program makes no second step.
        """
        numbers: dict[Kernel, int] = {}
        events: list[_Event] = []
        optimizes, has_graph = False, program.has_graph
        begin, end = program.last_step()
        if begin == end:
            raise ValueError("the program has no second step")
        for event in program.events[begin:end]:
            if isinstance(event, Kernel):
                number = numbers.setdefault(event, len(numbers))
                stream = COMPUTE if event.stream == CAPTURE else event.stream
                events.append(_Queued(number, stream, optimizes, has_graph and not optimizes))
            elif isinstance(event, Phase):
                optimizes = event.name == OPTIMIZER
            elif isinstance(event, (Mark, Wait)):
                events.append(event._replace(stream=COMPUTE) if event.stream == CAPTURE else event)
            elif isinstance(event, HostWait):
                events.append(event)
            if with_memory and isinstance(event, (Alloc, Free, Phase)):
                events.append(event)
        works = [(kernel, work_of(kernel)) for kernel in numbers]
        nothing = {number for number, (_, work) in enumerate(works) if work.kind == "nothing"}
        events = [e for e in events if not (isinstance(e, _Queued) and e.number in nothing)]
        return cls(works, events)


def replay(step: Step, rates: Rates) -> Timeline:
    """Return the time of a step."""
    if not step.offloads:
        return _replay(step, rates)
    found = _replay(step, rates, copies=False, offloaded=False)
    with_copies = _replay(step, rates, offloaded=False).seconds
    whole = _replay(step, rates).seconds
    found.copies, found.offloaded, found.seconds = with_copies - found.seconds, whole - with_copies, whole
    return found


def step_seconds(step: Step, rates: Rates) -> float:
    """Return the time of a step alone, which is found sooner."""
    return _replay(step, rates).seconds


def record(step: Step, rates: Rates) -> Recording:
    """Return the course of a step that was made with its memory."""
    recording = Recording()
    _replay(step, rates, recording=recording)
    return recording


def _replay(
    step: Step,
    rates: Rates,
    copies: bool = True,
    offloaded: bool = True,
    recording: Recording | None = None,
) -> Timeline:
    """Return the time of a step.

    ``copies``: copies between host and device take time. ``offloaded``: the host's computation takes time.
    """
    found = Timeline()
    node, longer = rates.figures.node, rates.shares["beside"] - 1
    seconds_of = [rates.seconds(kernel, work) for kernel, work in step.kernels]
    ideal_of = [rates.ideal(kernel, work) for kernel, work in step.kernels]
    host_of = [rates.host(kernel, work) for kernel, work in step.kernels]
    ready: dict[str, float] = defaultdict(float)
    links: dict[bool, float] = defaultdict(
        float
    )  #: until when collectives use them, by whether they cross nodes
    marks: dict[int, float] = {}
    recent: list[tuple[float, float]] = []  #: the times of the last collectives
    latest = 0.0  #: the largest end of these
    now = 0.0  #: of the host
    on_host = rates.figures.measured is not None and rates.figures.measured.on_host

    def idle(until: float) -> None:
        """Let the computation do nothing ``until`` then. Time in which the host has queued nothing is the host's."""
        begin = ready[COMPUTE]
        if until > begin:
            of_host = min(max(now - begin, 0.0), until - begin)
            found.host += of_host
            found.waits += until - begin - of_host
            ready[COMPUTE] = until

    for event in step.events:
        if isinstance(event, _Queued):
            number, stream, optimizes, in_graph = event
            kernel, work = step.kernels[number]
            seconds = seconds_of[number]
            if (stream == HOST and not offloaded) or (work.kind == "copies" and not copies):
                continue
            now += 0.0 if in_graph else host_of[number]
            if stream == HOST:
                start = now
                end = now = now + seconds
            elif work.kind == "communication":
                crosses = spread(*kernel.group, node)[0] > 1
                start = max(ready[stream], now, links[crosses])
                end = links[crosses] = start + seconds
                found.communication[stream] += seconds
                if stream == COMPUTE:
                    idle(end)
                else:
                    ready[stream] = end
                    recent = [*recent[-7:], (start, end)]
                    latest = max(stop for _, stop in recent)
            elif stream != COMPUTE:
                start = max(ready[stream], now)
                end = ready[stream] = start + seconds
            else:
                idle(now)
                start = ready[COMPUTE]
                over, end = 0.0, start + seconds
                if start < latest:
                    for begin, stop in recent:
                        if begin < end and start < stop:
                            over += min(stop, end) - max(begin, start)
                slower = longer * min(over, seconds)
                end = ready[COMPUTE] = start + seconds + slower
                found.busy["optimizer" if optimizes and work.kind == "memory" else work.kind] += seconds
                found.beside += slower
                found.flops += work.flops
                found.ideal += ideal_of[number]
            if recording is not None:
                recording.spans.append(Interval(number, stream, start, end))
            if on_host:  # which computes itself, and then goes on
                now = max(now, ready[stream])
        elif isinstance(event, Mark):
            marks[event.number] = max(ready[event.stream], now)
        elif isinstance(event, Wait):
            until = marks.get(event.mark, 0.0)
            if event.stream == COMPUTE:
                idle(until)
            else:
                ready[event.stream] = max(ready[event.stream], until)
        elif isinstance(event, HostWait):
            now = max(now, marks.get(event.mark, 0.0))
        elif recording is not None:
            recording.moments.append((event, max(now, ready[COMPUTE])))
    idle(max([now, *ready.values()]))
    found.seconds = ready[COMPUTE]
    return found
