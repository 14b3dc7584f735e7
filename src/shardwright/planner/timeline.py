"""The time of a step: a program is replayed, with its streams, its waits and its host."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from shardwright.planner.program import (
    HOST,
    SAVE,
    STEP,
    VALIDATION,
    Event,
    HostWait,
    Kernel,
    Mark,
    Phase,
    Program,
    Wait,
)
from shardwright.planner.rates import Rates, spread

COMPUTE = "compute"  #: the stream of the computation


@dataclass
class Timeline:
    """Where the time of a step goes.

    Attributes:
        seconds: of the step; the sum of what follows up to ``host``.
        busy: seconds of the computation's stream, by kind of work (``products``, ``attention``, ``memory``,
            ``optimizer``), without what follows.
        beside: seconds that kernels take longer because collectives run beside them.
        waits: seconds in which the computation waits for collectives.
        host: seconds in which the device waits for the host.
        flops: operations of products and of attention.
        ideal: seconds that these take at the device's peak.
        communication: seconds of collectives, by the name of their stream, hidden or not.
    """

    seconds: float = 0.0
    busy: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    beside: float = 0.0
    waits: float = 0.0
    host: float = 0.0
    flops: float = 0.0
    ideal: float = 0.0
    communication: dict[str, float] = field(default_factory=lambda: defaultdict(float))


def last_step(program: Program) -> list[Event]:
    """The events of the last step, after which the states of optimizers exist.

    Raises:
        ValueError: the program makes no second step.
    """
    starts = list(program.phase_starts())
    steps = [i for i, name in starts if name == STEP]
    if not steps:  # a loop of somebody's own: a step ends with its optimizer
        ends = [n for n, (_, name) in enumerate(starts) if name == "optimizer"]
        after = [starts[n + 1][0] for n in ends if n + 1 < len(starts)]
        if len(ends) < 2 or not after:
            raise ValueError("the program has no second step")
        begin = after[len(ends) - 2]
    else:
        begin = steps[-1]
    end = next((i for i, name in starts if i > begin and name in (VALIDATION, SAVE)), len(program.events))
    return program.events[begin:end]


def replay(events: Sequence[Event], rates: Rates, replays_graph: bool = False) -> Timeline:
    """Replay a step. ``replays_graph``: it is a CUDA graph, for which the host needs no time."""
    found = Timeline()
    shares, node = rates.shares, rates.figures.node
    host_of_operation, host_of_compiled = shares["host"], shares["host_compiled"]
    host_of_collective, longer = shares["host_collective"], shares["beside"] - 1
    known: dict[Kernel, tuple[str, float, float, float]] = {}
    ready: dict[str, float] = defaultdict(float)
    links: dict[bool, float] = defaultdict(float)  #: until when collectives use them, by whether they cross nodes
    marks: dict[int, float] = {}
    recent: list[tuple[float, float]] = []  #: the times of the last collectives
    now = 0.0  #: of the host
    optimizes = False

    def idle(until: float) -> None:
        """The computation does nothing until then: as long as the host has queued nothing, because of the host."""
        begin = ready[COMPUTE]
        if until > begin:
            of_host = min(max(now - begin, 0.0), until - begin)
            found.host += of_host
            found.waits += until - begin - of_host
            ready[COMPUTE] = until

    for event in events:
        if type(event) is Kernel:
            stream = event.stream
            if stream == HOST:
                continue
            facts = known.get(event)
            if facts is None:
                work, seconds = rates.seconds(event)
                ideal = work.flops / rates.peak(event.dtype) if work.kind in ("products", "attention") else 0.0
                facts = known[event] = work.kind, seconds, work.flops, ideal
            kind, seconds, flops, ideal = facts
            if kind == "nothing":
                continue
            if kind == "communication":
                now += 0.0 if replays_graph else host_of_collective
                crosses = spread(*event.group, node)[0] > 1
                start = max(ready[stream], now, links[crosses])
                end = links[crosses] = start + seconds
                found.communication[stream] += seconds
                if stream == COMPUTE:
                    idle(end)
                else:
                    ready[stream] = end
                    recent = [*recent[-7:], (start, end)]
                continue
            if not replays_graph:
                now += host_of_compiled if event.name.startswith("fused_") else host_of_operation
            if stream != COMPUTE:
                ready[stream] = max(ready[stream], now) + seconds
                continue
            idle(now)
            start = ready[COMPUTE]
            over = sum(max(0.0, min(end, start + seconds) - max(begin, start)) for begin, end in recent)
            slower = longer * min(over, seconds)
            ready[COMPUTE] = start + seconds + slower
            found.busy["optimizer" if optimizes and kind == "memory" else kind] += seconds
            found.beside += slower
            found.flops += flops
            found.ideal += ideal
        elif type(event) is Mark:
            marks[event.number] = max(ready[event.stream], now)
        elif type(event) is Wait:
            until = marks.get(event.mark, 0.0)
            if event.stream == COMPUTE:
                idle(until)
            else:
                ready[event.stream] = max(ready[event.stream], until)
        elif type(event) is HostWait:
            now = max(now, marks.get(event.mark, 0.0))
        elif type(event) is Phase:
            optimizes = event.name == "optimizer"
    idle(max(now, *ready.values()))
    found.seconds = ready[COMPUTE]
    return found
