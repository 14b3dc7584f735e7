"""A program: what one rank does with a device's memory and streams, event by event.

``tracing`` writes programs. Nothing here imports torch.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

STEP = "step"  #: the phase in which each step of a trainer begins; another one follows at once
OPTIMIZER, AFTER_OPTIMIZER = "optimizer", "after the optimizer"  #: phases in a step
#: Phases between steps.
VALIDATION, SAVE = "validation", "save"
HOST = "host"  #: in place of a stream: the block is in the host's memory
#: The stream of a block that a CUDA graph uses begins with this, and with the graph's number and a space. The memory
#: stays the graph's after the block is freed.
GRAPH = "graph "
#: The name of a copy between the memories of the host and of the device begins with this.
CROSSING = "pcie."
#: The name of fused attention that is not causal begins with this: each query sees all keys, or a mask decides, and
#: then the kernel computes all pairs, too.
ALL_PAIRS = "all_pairs."


class Alloc(NamedTuple):
    """The event that a block of memory is taken on a stream, or on the host."""

    block: int  #: its number, used once in a program
    nbytes: int
    stream: str
    owner: int  #: an index of :attr:`Program.owners`

    @property
    def on_host(self) -> bool:
        """Whether the block is in the host's memory, and not in the device's."""
        return self.stream == HOST


class Free(NamedTuple):
    """The event that a block is given back."""

    block: int


class Kernel(NamedTuple):
    """The event that work is queued on a stream."""

    name: str
    stream: str
    nbytes: int  #: of its tensors
    shapes: tuple[tuple[int, ...], ...]  #: of the first ones
    dtype: str
    #: The number of ranks of a collective, and the distance between neighbours.
    group: tuple[int, int] = (1, 1)


class Mark(NamedTuple):
    """The event that a stream marks its present place, for which others can wait."""

    number: int
    stream: str


class Wait(NamedTuple):
    """The event that a stream waits for a mark."""

    stream: str
    mark: int


class HostWait(NamedTuple):
    """The event that the host waits for a mark."""

    mark: int


class Phase(NamedTuple):
    """The event that a part of the run begins, such as ``build``, ``forward``, ``backward`` or ``optimizer``."""

    name: str


Event = Alloc | Free | Kernel | Mark | Wait | HostWait | Phase


class Owner(NamedTuple):
    """The reason why memory is taken.

    Attributes:
        group: ``parameters``, ``gradients``, ``optimizer``, ``slabs``, ``activations``, ``temporary`` or
            ``other``.
        unit: the parameter or the slab, by name; for what a step makes the module whose forward or backward makes it,
            empty outside of all modules.
        what: the kind of slab, or the operation with the shape and dtype of its result.
        line: file and line of the model's code, as ``losses.py:118``; empty if there is none.
        shape: dtype and shape of a tensor that has a name, or the parameters of a slab's unit with their shapes.
    """

    group: str
    unit: str
    what: str
    line: str
    shape: str = ""


def numbering() -> dict[Hashable, int]:
    """Return a dict that gives each key that is looked up the next number, from 0."""
    return defaultdict(itertools.count().__next__)


@dataclass
class Peak:
    """The moment of a program at which most bytes are live.

    Attributes:
        nbytes: live then.
        event: the index of the allocation that reaches it.
        phase: the phase of this event.
        owner: the owner of this allocation.
        by_owner: live bytes of each owner then.
    """

    nbytes: int
    event: int
    phase: str
    owner: Owner
    by_owner: dict[Owner, int] = field(repr=False)

    def by_group(self) -> dict[str, int]:
        """Live bytes of each group, the largest first."""
        groups: dict[str, int] = {}
        for owner, nbytes in self.by_owner.items():
            groups[owner.group] = groups.get(owner.group, 0) + nbytes
        return dict(sorted(groups.items(), key=lambda each: -each[1]))


@dataclass
class Program:
    """Events in the order of the host's program.

    Attributes:
        events: the events.
        owners: the owners that allocations name by their index.
        tokens: trained tokens of one rank in a step; 0: unknown.
        model_flops: operations of the model's formula for these tokens, forward and backward; 0: unknown.
        constants: blocks of numbers that the trace has computed. Their operations are no kernels if they are small.
    """

    events: list[Event] = field(default_factory=list)
    owners: list[Owner] = field(default_factory=list)
    tokens: float = 0
    model_flops: float = 0
    constants: set[int] = field(default_factory=set)

    @property
    def has_graph(self) -> bool:
        """Whether a CUDA graph does the work of its last step."""
        return any(isinstance(event, Alloc) and event.stream.startswith(GRAPH) for event in self.events)

    def phase_starts(self) -> Iterator[tuple[int, str]]:
        """Return the index and the name of each phase."""
        return ((i, event.name) for i, event in enumerate(self.events) if isinstance(event, Phase))

    def peak(self, first: int = 0, stop: int | None = None, on_host: bool = False) -> Peak:
        """Return the peak among the events from ``first`` to before ``stop``. Earlier events say what is live at
        ``first``.

        ``on_host``: of the host's memory, and not of the device's.

        Raises:
            ValueError: there is no allocation among them.
        """
        stop = len(self.events) if stop is None else stop
        now, best, at = 0, -1, -1
        sizes: dict[int, int] = {}
        for i, event in enumerate(self.events[:stop]):
            if isinstance(event, Alloc) and event.on_host == on_host:
                sizes[event.block] = event.nbytes
                now += event.nbytes
                if i >= first and now > best:
                    best, at = now, i
            elif isinstance(event, Free):
                now -= sizes.pop(event.block, 0)
        if at < 0:
            raise ValueError(f"there is no allocation among the events {first} to {stop}")
        last = self.events[at]
        assert isinstance(last, Alloc)
        by_owner: dict[Owner, int] = {}
        for alloc in self.live(at + 1):
            if alloc.on_host == on_host:
                owner = self.owners[alloc.owner]
                by_owner[owner] = by_owner.get(owner, 0) + alloc.nbytes
        phase = next((name for i, name in reversed(list(self.phase_starts())) if i <= at), "")
        return Peak(best, at, phase, self.owners[last.owner], by_owner)

    def peaks(self) -> dict[str, tuple[int, int]]:
        """By part of the run the most live bytes, of the device and of the host. Parts are ``step``, from the first
        forward on, ``validation`` and ``save``."""
        peaks: dict[str, tuple[int, int]] = {}
        live: dict[int, Alloc] = {}
        now = [0, 0]
        part = ""
        for event in self.events:
            if isinstance(event, Phase):
                if event.name in (VALIDATION, SAVE):
                    part = event.name
                elif part or event.name == "forward":
                    part = "step"
            elif isinstance(event, Alloc):
                live[event.block] = event
                now[event.on_host] += event.nbytes
            elif isinstance(event, Free):
                alloc = live.pop(event.block)
                now[alloc.on_host] -= alloc.nbytes
            if part:
                device, host = peaks.get(part, (0, 0))
                peaks[part] = max(device, now[0]), max(host, now[1])
        return peaks

    def live(self, stop: int | None = None) -> list[Alloc]:
        """Return the allocations before event ``stop`` that have not been freed there."""
        live: dict[int, Alloc] = {}
        for event in self.events[:stop]:
            if isinstance(event, Alloc):
                live[event.block] = event
            elif isinstance(event, Free):
                del live[event.block]
        return list(live.values())

    def with_further_steps(self, count: int) -> Iterator[list[Event]]:
        """Yield the events before the last step, those of it, of each further step, and the events after these.

        Blocks of further steps have new numbers, marks do not. There are no further steps if the program has a single
        one, or if the last one does not leave blocks as it has found them. Frees in the events after the steps have the
        numbers of the last further step.
        """
        first, stop = self.last_step()
        last = self.events[first:stop]
        taken = {event.block: event for event in last if isinstance(event, Alloc)}
        freed = {event.block for event in last if isinstance(event, Free)}
        found = freed - taken.keys()
        left: dict[Hashable, list[int]] = {}
        for block, alloc in taken.items():
            if block not in freed:
                left.setdefault(self._likeness(alloc), []).append(block)
        heirs: dict[int, int] = {}  # the blocks that a step leaves in the place of those that it has found
        for event in self.events[:first]:
            if (
                isinstance(event, Alloc)
                and event.block in found
                and (like := left.get(self._likeness(event)))
            ):
                heirs[event.block] = like.pop(0)
        if len(heirs) < len(found) or any(left.values()):
            count = 0
        yield self.events[:first]
        yield last
        number = len(self.events)
        names: dict[int, int] = {}
        for _ in range(count):
            before, names = names, {}
            step: list[Event] = []
            for each in last:
                if isinstance(each, Alloc):
                    names[each.block] = number = number + 1
                    step.append(each._replace(block=number))
                elif isinstance(each, Free):
                    heir = heirs.get(each.block)
                    step.append(Free(names[each.block] if heir is None else before.get(heir, heir)))
                else:
                    step.append(each)
            yield step
        yield [
            Free(names.get(each.block, each.block)) if isinstance(each, Free) else each
            for each in self.events[stop:]
        ]

    def _likeness(self, alloc: Alloc) -> Hashable:
        """Return a value that is equal for blocks of two steps if one is there in the place of the other."""
        return alloc.nbytes, alloc.stream, self.owners[alloc.owner]._replace(group="")

    def last_step(self) -> tuple[int, int]:
        """Return the first event of the last step, and the one after it; both 0 if there are no two steps.

        A trainer says where steps begin. In another loop they end with the optimizer.
        """
        phases = list(self.phase_starts())
        starts = [i for i, name in phases if name == STEP]
        if len(starts) > 1:
            return starts[-1], next((i for i, name in phases if name in (VALIDATION, SAVE)), len(self.events))
        following = [name for _, name in phases[1:]] + [""]
        ends = [
            i
            for (i, name), behind in zip(phases, following, strict=True)
            if name == AFTER_OPTIMIZER and behind != OPTIMIZER
        ]
        return (ends[-2], ends[-1]) if len(ends) > 1 else (0, 0)

    def without_passing(self, phase: str) -> Program:
        """Return the program without the blocks that are taken and freed in the first phase of this name."""
        starts = [*self.phase_starts(), (len(self.events), "")]
        first = next(i for i, (_, name) in enumerate(starts) if name == phase)
        inside = self.events[starts[first][0] : starts[first + 1][0]]
        freed = {event.block for event in inside if isinstance(event, Free)}
        gone = freed & {event.block for event in inside if isinstance(event, Alloc)}
        numbers: dict[int, int] = {}
        owners: dict[int, int] = {}
        events: list[Event] = []
        for event in self.events:
            if isinstance(event, (Alloc, Free)) and event.block in gone:
                continue
            if isinstance(event, Alloc):
                numbers[event.block] = len(events)
                owner = owners.setdefault(event.owner, len(owners))
                event = event._replace(block=len(events), owner=owner)
            elif isinstance(event, Free):
                event = Free(numbers[event.block])
            events.append(event)
        named = [self.owners[owner] for owner in owners]
        constants = {numbers[block] for block in self.constants if block in numbers}
        return Program(events, named, self.tokens, self.model_flops, constants)
