"""A model of PyTorch's CUDA caching allocator: the bytes that it reserves for a program.

The rules are those of ``c10/cuda/CUDACachingAllocator.cpp`` of PyTorch 2.11 to 2.13, and of PyTorch's notes on CUDA
semantics; each has a test in ``tests/planner/test_allocator.py``. Three are simpler here. A free block inside an
expandable segment is taken before the segment's end also where PyTorch prefers the end. The cache gives back pages at
the end of such a segment alone. Garbage collection takes the oldest segments, and not those older than the mean.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from shardwright.planner.program import Alloc, Event, Free

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
UNIT = 512  #: sizes are multiples of this
SMALL = MIB  #: the largest size that the pool of small blocks serves
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB  #: for sizes below ``LARGE``
LARGE = 10 * MIB  #: sizes from here get segments of their own, in multiples of ``LARGE_STEP``
LARGE_STEP = 2 * MIB


class OutOfMemoryError(Exception):
    """An allocation does not fit, also after the cache is empty.

    Attributes:
        wanted: bytes of the segment that the device cannot give.
        reserved: bytes that are reserved.
        active: bytes of live blocks.
    """

    def __init__(self, wanted: int, reserved: int, active: int) -> None:
        super().__init__(f"{wanted} bytes more than {reserved} reserved ones, of which {active} are live")
        self.wanted, self.reserved, self.active = wanted, reserved, active


@dataclass(frozen=True)
class Rules:
    """Settings of ``PYTORCH_ALLOC_CONF``.

    Attributes:
        expandable: ``expandable_segments``.
        max_split: ``max_split_size_mb`` in bytes; None: every block may be split.
        divisions: ``roundup_power2_divisions``; 0: sizes are rounded to multiples of 512.
        collect_above: ``garbage_collection_threshold``, a part of the limit; 0: never.
    """

    expandable: bool = False
    max_split: int | None = None
    divisions: int = 0
    collect_above: float = 0.0

    @classmethod
    def of(cls, variables: Mapping[str, str]) -> Rules:
        """The settings in environment variables.

        Raises:
            ValueError: a setting that is not modelled here, or a value that PyTorch refuses.
        """
        name = _variable(variables)
        values: dict[str, Any] = {}
        for part in filter(None, variables.get(name, "").replace(" ", "").split(",")):
            key, _, text = part.partition(":")
            try:
                field, read = _SETTINGS[key]
                values[field] = read(text)
            except (KeyError, ValueError):
                raise ValueError(
                    f"{name}: expected settings of {', '.join(_SETTINGS)}, each with one value, found {part!r}, which "
                    "no plan covers"
                ) from None
        return cls(**values)


def _variable(variables: Mapping[str, str]) -> str:
    return next((each for each in CONF if variables.get(each)), CONF[-1])


def with_setting(variables: Mapping[str, str], setting: str) -> str:
    """The assignment of an environment variable that adds a setting, as a shell takes it."""
    name = _variable(variables)
    return f"{name}={','.join(filter(None, (variables.get(name), setting)))}"


def _flag(text: str) -> bool:
    return {"True": True, "False": False}[text]


CONF = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"  #: the first one that is set counts
_SETTINGS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "expandable_segments": ("expandable", _flag),
    "max_split_size_mb": ("max_split", lambda text: int(text) << 20),
    "roundup_power2_divisions": ("divisions", int),
}


class _Block:
    """A piece of a segment, between its neighbours."""

    __slots__ = ("address", "age", "is_used", "next", "pool", "previous", "segment", "size")

    def __init__(self, size: int, address: int, segment: int, pool: tuple[str, bool]) -> None:
        self.size, self.address, self.segment, self.pool = size, address, segment, pool
        self.previous: _Block | None = None
        self.next: _Block | None = None
        self.is_used = False
        self.age = 0  #: when it was freed

    @property
    def key(self) -> tuple[int, int]:
        return self.size, self.address


@dataclass
class Usage:
    """Bytes on a device.

    Attributes:
        requested: of live blocks, as they were asked for.
        active: of live blocks, as they were rounded.
        reserved: of segments.
    """

    requested: int = 0
    active: int = 0
    reserved: int = 0


class CachingAllocator:
    """Blocks and segments of one device.

    Args:
        rules: settings.
        limit: bytes that the device can give to segments; None: any number.

    Attributes:
        now, peak: usage, and the largest of each figure so far.
        live_at_peak: requested bytes when most was reserved.
        retries: how often the cache was emptied for an allocation.
    """

    def __init__(self, rules: Rules = Rules(), limit: int | None = None) -> None:
        self.rules, self.limit = rules, limit
        self.now, self.peak = Usage(), Usage()
        self.live_at_peak = 0
        self.retries = 0
        self._used: dict[
            int, tuple[_Block, int]
        ] = {}  #: by number, the block and the bytes that were asked for
        self._free: dict[tuple[str, bool], list[_Block]] = {}  #: by stream and smallness, from the smallest
        self._next_address = 1 << 40
        self._ends: dict[tuple[str, bool], _Block] = {}  #: the last block of each expandable segment
        self._time = 0

    def rounded(self, nbytes: int) -> int:
        """The size of a block for so many bytes."""
        divisions = self.rules.divisions
        if divisions > 1 and nbytes > UNIT * divisions:
            power = 1 << (nbytes.bit_length() - 1)
            if power == nbytes:
                return nbytes
            return _up(nbytes, max(power // divisions, UNIT))
        return max(UNIT, _up(nbytes, UNIT))

    def take(self, number: int, nbytes: int, stream: str = "") -> None:
        """Allocate ``nbytes`` on a stream under a number.

        Raises:
            OutOfMemoryError: the limit is reached.
        """
        self._time += 1
        size = self.rounded(nbytes)
        pool = stream, size <= SMALL
        block = self._fitting(pool, size) or self._new(pool, size)
        self._split(block, size)
        block.is_used = True
        self._used[number] = block, nbytes
        self.now.active += block.size
        self.now.requested += nbytes
        self._note_peak()

    def give_back(self, number: int) -> None:
        """Free the block of a number."""
        self._time += 1
        block, nbytes = self._used.pop(number)
        self.now.active -= block.size
        self.now.requested -= nbytes
        block.is_used = False
        block.age = self._time
        for other in (block.previous, block.next):
            if other is not None and not other.is_used:
                self._remove(other)
                self._merge(block, other)
        self._insert(block)

    def empty_cache(self) -> None:
        """Give free memory back to the device: whole segments, and the free ends of expandable ones."""
        for pool, free in self._free.items():
            for block in list(free):
                if self.rules.expandable:
                    self._unmap(pool, block)
                elif block.previous is None and block.next is None:
                    self._drop(block)

    # -- finding

    def _fitting(self, pool: tuple[str, bool], size: int) -> _Block | None:
        """The smallest free block of the pool that is large enough, if the rules allow it."""
        free = self._free.get(pool, [])
        i = bisect.bisect_left(free, (size, 0), key=lambda block: block.key)
        if i == len(free):
            return None
        block, limit = free[i], self.rules.max_split
        if limit is not None:
            if size < limit <= block.size:  # a large block is for large sizes
                return None
            if size >= limit and block.size >= size + LARGE_SEGMENT:  # it would not be split
                return None
        del free[i]
        return block

    def _new(self, pool: tuple[str, bool], size: int) -> _Block:
        if self.limit is not None and self.rules.collect_above:
            self._collect(size)
        return self._grow(pool, size) if self.rules.expandable else self._segment(pool, size)

    def _segment(self, pool: tuple[str, bool], size: int) -> _Block:
        nbytes = SMALL_SEGMENT if size <= SMALL else LARGE_SEGMENT if size < LARGE else _up(size, LARGE_STEP)
        self._reserve(nbytes)
        block = _Block(nbytes, self._next_address, self._next_address, pool)
        self._next_address += nbytes + GIB
        return block

    def _grow(self, pool: tuple[str, bool], size: int) -> _Block:
        """The free end of the pool's segment, with further pages."""
        page = SMALL_SEGMENT if pool[1] else LARGE_SEGMENT
        end, there = self._free_end(pool)
        more = _up(size - there, page)
        if not self._has_room(more):
            self._make_room()
            end, there = self._free_end(pool)  # the cache may have given it back
            more = _up(size - there, page)
        self._reserve(more)
        if end is not None and there:
            self._remove(end)
            end.size += more
            return end
        if end is None:
            address = self._next_address
            self._next_address += 1 << 44
            block = _Block(more, address, address, pool)
        else:
            block = _Block(more, end.address + end.size, end.segment, pool)
            block.previous, end.next = end, block
        self._ends[pool] = block
        return block

    def _free_end(self, pool: tuple[str, bool]) -> tuple[_Block | None, int]:
        """The last block of the pool's expandable segment, and its size if it is free."""
        end = self._ends.get(pool)
        return end, end.size if end is not None and not end.is_used else 0

    def _has_room(self, nbytes: int) -> bool:
        return self.limit is None or self.now.reserved + nbytes <= self.limit

    def _make_room(self) -> None:
        self.retries += 1
        self.empty_cache()

    def _reserve(self, nbytes: int) -> None:
        if not self._has_room(nbytes):
            self._make_room()
            if not self._has_room(nbytes):
                raise OutOfMemoryError(nbytes, self.now.reserved, self.now.active)
        self.now.reserved += nbytes
        self._note_peak()

    def _collect(self, size: int) -> None:
        """Free the oldest whole segments if too much is reserved."""
        assert self.limit is not None
        threshold = int(self.limit * self.rules.collect_above)
        if self.now.reserved <= threshold or self.rules.expandable:
            return
        whole = [
            block
            for free in self._free.values()
            for block in free
            if block.previous is None and block.next is None and not block.pool[1]
        ]
        for block in sorted(whole, key=lambda block: block.age):
            if self.now.reserved <= threshold:
                return
            self._drop(block)

    # -- blocks

    def _split(self, block: _Block, size: int) -> None:
        rest = block.size - size
        if block.pool[1] or self.rules.expandable:
            splits = rest >= UNIT
        else:
            limit = self.rules.max_split
            splits = (limit is None or size < limit) and rest > SMALL
        if not splits:
            return
        part = _Block(rest, block.address + size, block.segment, block.pool)
        part.previous, part.next = block, block.next
        if block.next is not None:
            block.next.previous = part
        block.next, block.size = part, size
        if self._ends.get(block.pool) is block:
            self._ends[block.pool] = part
        part.age = self._time
        self._insert(part)

    def _merge(self, block: _Block, other: _Block) -> None:
        if other is block.previous:
            block.address, block.previous = other.address, other.previous
            if other.previous is not None:
                other.previous.next = block
        else:
            block.next = other.next
            if other.next is not None:
                other.next.previous = block
        block.size += other.size
        if self._ends.get(block.pool) is other:
            self._ends[block.pool] = block

    def _insert(self, block: _Block) -> None:
        bisect.insort(self._free.setdefault(block.pool, []), block, key=lambda each: each.key)

    def _remove(self, block: _Block) -> None:
        free = self._free[block.pool]
        i = bisect.bisect_left(free, block.key, key=lambda each: each.key)
        assert free[i] is block
        del free[i]

    def _drop(self, block: _Block) -> None:
        self._remove(block)
        self.now.reserved -= block.size

    def _unmap(self, pool: tuple[str, bool], block: _Block) -> None:
        """Give back the whole pages inside a free block of an expandable segment, if it is the segment's end."""
        if self._ends.get(pool) is not block:
            return
        page = SMALL_SEGMENT if pool[1] else LARGE_SEGMENT
        kept = _up(block.address - block.segment, page) - (block.address - block.segment)
        if kept >= block.size:
            return
        self._remove(block)
        self.now.reserved -= block.size - kept
        block.size = kept
        if kept:
            self._insert(block)
        elif block.previous is not None:
            self._ends[pool], block.previous.next = block.previous, None
        else:
            del self._ends[pool]

    def _note_peak(self) -> None:
        now, peak = self.now, self.peak
        if now.reserved > peak.reserved:
            self.live_at_peak = now.requested
        peak.requested = max(peak.requested, now.requested)
        peak.active = max(peak.active, now.active)
        peak.reserved = max(peak.reserved, now.reserved)


def replay(events: Iterable[Event], rules: Rules = Rules(), limit: int | None = None) -> CachingAllocator:
    """The allocator after the allocations and frees of a program. Blocks of the host are not the allocator's."""
    allocator = CachingAllocator(rules, limit)
    on_host: set[int] = set()
    for event in events:
        if isinstance(event, Alloc):
            if event.on_host:
                on_host.add(event.block)
            else:
                allocator.take(event.block, event.nbytes, event.stream)
        elif isinstance(event, Free) and event.block not in on_host:
            allocator.give_back(event.block)
    return allocator


def _up(value: int, step: int) -> int:
    return -(-value // step) * step
