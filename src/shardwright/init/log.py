"""The record of a construction as plain data, and the plan of the entries that must run, in which order.

Tensors are views of memories, so aliases need no special care. Only operations that make or write a memory are entries.
This file runs no operation, and knows no modules, shards or states of generators.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

_indices = itertools.count()


class Memory:
    """The future content of one storage of deferred tensors.

    Attributes:
        storage: on the meta device; its size in bytes is that of the memory, and views of it are the tensors.
        device: its future device, or None for the device that ``materialize`` chooses.
        entries: the entries that make or write it, in recorded order.
        gone: after it was materialised, the reason why it can no longer be used.
    """

    __slots__ = ("device", "entries", "gone", "storage")

    def __init__(self, storage: torch.UntypedStorage, device: torch.device | None) -> None:
        self.storage = storage
        self.device = device
        self.entries: list[Entry] = []
        self.gone = ""


@dataclass(frozen=True, slots=True)
class View:
    """A deferred tensor, as part of its memory."""

    memory: Memory
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    conjugate: bool = False

    @property
    def whole(self) -> bool:
        """Whether a write to every element replaces all of the memory."""
        expected = 1
        for size, stride in sorted(zip(self.size, self.stride, strict=True), key=lambda pair: pair[1]):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return self.offset == 0 and expected * self.dtype.itemsize >= self.memory.storage.nbytes()


@dataclass(slots=True)
class Draw:
    """An entry's draw from a generator: after another entry, or from a known state."""

    after: Entry | None = None
    state: torch.Tensor | None = None  #: before the entry
    mark: bytes = b""  #: a hash of its begin in the generator's stream


@dataclass(eq=False, slots=True)
class Entry:
    """A recorded operation.

    Attributes:
        call: the function to run with ``args`` and ``kwargs``, in which a View replaces each deferred tensor.
        reads: memories whose content it needs.
        writes: memories that it makes or changes.
        fills: views that it writes completely without reading them.
        renews: memories whose old content it replaces completely.
        results: returned tensors that have new memories, by position.
        draws: its draws, by generator's stream.
        ends: needed or known states after this entry, by stream.
    """

    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: tuple[Memory, ...]
    writes: tuple[Memory, ...]
    renews: tuple[Memory, ...]
    results: tuple[tuple[int, View], ...]
    default_dtype: torch.dtype
    fills: tuple[View, ...] = ()
    draws: dict[Any, Draw] = field(default_factory=dict)
    ends: dict[Any, torch.Tensor | None] = field(default_factory=dict)
    index: int = field(default_factory=lambda: next(_indices))
    origin: bytes = b""  #: hash of the entry and of all that it depends on; set when needed

    @property
    def only_renews(self) -> bool:
        """Whether it can run only for its random numbers, on memory that is then dropped."""
        return len(self.renews) == len(self.writes)


def record(entry: Entry) -> None:
    """Add an entry to the memories that it writes."""
    for memory in entry.writes:
        memory.entries.append(entry)


@dataclass(slots=True)
class ReplayPlan:
    """The entries that must run, in recorded order. The results of those in ``drawn`` are dropped.

    The memories in ``unwritten`` have needed elements that no entry wrote.
    """

    entries: list[Entry]
    drawn: set[Entry]
    unwritten: set[Memory]


def plan(targets: Iterable[Memory], drawing: Iterable[Entry] = ()) -> ReplayPlan:
    """Plan the entries that make the content of ``targets``, and the draws that come before them.

    Args:
        targets: memories whose final content is needed.
        drawing: entries after which a generator's state is needed.
    """
    live: set[Memory] = set()
    forced: set[Entry] = set()
    needed: list[Entry] = []
    drawn: set[Entry] = set()
    candidates: list[tuple[int, Entry]] = []
    pushed: set[Entry] = set()

    def push(entries: Iterable[Entry], before: int) -> None:
        for entry in entries:
            if entry.index < before and entry not in pushed:
                pushed.add(entry)
                heapq.heappush(candidates, (-entry.index, entry))

    def want(memory: Memory, before: int) -> None:
        if memory not in live:
            live.add(memory)
            push(memory.entries, before)

    def force(entry: Entry, stream: Any) -> None:
        if entry.ends.get(stream) is None:
            forced.add(entry)
            push([entry], entry.index + 1)

    for memory in targets:
        want(memory, 1 << 62)
    for entry in drawing:
        forced.add(entry)
        push([entry], entry.index + 1)
    while candidates:
        entry = heapq.heappop(candidates)[1]
        pushed.discard(entry)
        is_live = not live.isdisjoint(entry.writes)
        if not is_live and entry not in forced:
            continue
        needed.append(entry)
        if is_live or not entry.only_renews:
            for memory in entry.writes:
                if memory not in entry.renews:
                    want(memory, entry.index)
            live.difference_update(entry.renews)
        else:
            drawn.add(entry)
        for memory in entry.reads:
            want(memory, entry.index)
        for stream, draw in entry.draws.items():
            if draw.state is None and draw.after is not None:
                force(draw.after, stream)
    return ReplayPlan(needed[::-1], drawn, live)


def touched(entry: Entry, drawn: bool) -> set[Memory]:
    """Memories that must exist while the entry runs."""
    return set(entry.reads) if drawn else {*entry.reads, *entry.writes}


def schedule(the: ReplayPlan) -> Iterator[Entry]:
    """Yield the entries of a plan in an order that gives the recorded results and holds little memory.

    Entries that draw from a generator keep their order. Other entries run as soon as their inputs exist. So one memory
    is finished, and can be dropped, before the next one begins.
    """
    waits: dict[Entry, int] = {}
    followers: dict[Entry, list[Entry]] = {entry: [] for entry in the.entries}
    writer: dict[Memory, Entry] = {}
    readers: dict[Memory, list[Entry]] = {}
    last: dict[Any, Entry] = {}
    for entry in the.entries:
        before = {last[stream] for stream in entry.draws if stream in last}
        before.update(writer[m] for m in entry.reads if m in writer)
        if entry not in the.drawn:
            for memory in entry.writes:
                before.update(readers.pop(memory, ()))
                if memory in writer:
                    before.add(writer[memory])
                writer[memory] = entry
        for memory in entry.reads:
            readers.setdefault(memory, []).append(entry)
        last.update(dict.fromkeys(entry.draws, entry))
        before.discard(entry)
        waits[entry] = len(before)
        for other in before:
            followers[other].append(entry)
    begun: set[Memory] = set()
    ready: list[tuple[bool, int, Entry]] = []

    def push(entry: Entry) -> None:
        fresh = begun.isdisjoint(touched(entry, entry in the.drawn))
        heapq.heappush(ready, (fresh, entry.index, entry))

    for entry in the.entries:
        if not waits[entry]:
            push(entry)
    while ready:
        entry = heapq.heappop(ready)[2]
        yield entry
        begun |= touched(entry, entry in the.drawn)
        for follower in followers[entry]:
            waits[follower] -= 1
            if not waits[follower]:
                push(follower)
