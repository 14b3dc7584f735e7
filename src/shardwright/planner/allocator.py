"""A model of PyTorch's CUDA caching allocator: the bytes that it reserves for a program.

The rules are those of ``c10/cuda/CUDACachingAllocator.cpp`` of PyTorch 2.11 to 2.13, and of PyTorch's notes on CUDA
semantics; each has a test in ``tests/planner/test_allocator.py``. An allocation takes the smallest free block of its
stream that is large enough. Without one it takes memory of the device. On a full device the allocator first gives back
free blocks that may not be split, then all free memory, and tries again each time.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from shardwright.planner.program import GRAPH, Alloc, Event, Free

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
UNIT = 512  #: sizes are multiples of this
SMALL = MIB  #: the largest size that the pool of small blocks serves
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB  #: for sizes below ``LARGE``
LARGE = 10 * MIB  #: sizes from here get segments of their own, in multiples of ``LARGE_STEP``
LARGE_STEP = 2 * MIB
ADDRESSES = (1 << 21) * LARGE_SEGMENT  #: of an expandable segment; few of them have memory


class OutOfMemoryError(Exception):
    """Raised if an allocation does not fit, even after the cache is empty.

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
        collect_above: ``garbage_collection_threshold``, a part of the bytes that ``fraction`` allows; 0: never. PyTorch
            does not collect if ``fraction`` is 1.
        fraction: ``per_process_memory_fraction``, the part of the device's memory that may be reserved.
    """

    expandable: bool = False
    max_split: int | None = None
    divisions: int = 0
    collect_above: float = 0.0
    fraction: float = 1.0

    @classmethod
    def of(cls, variables: Mapping[str, str]) -> Rules:
        """Return the settings in environment variables.

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
    """Return the assignment of an environment variable that adds a setting, as a shell takes it."""
    name = _variable(variables)
    return f"{name}={','.join(filter(None, (variables.get(name), setting)))}"


def _flag(text: str) -> bool:
    return {"True": True, "False": False}[text]


def _part(text: str) -> float:
    part = float(text)
    if not 0 < part <= 1:
        raise ValueError
    return part


CONF = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"  #: the first one that is set counts
_SETTINGS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "expandable_segments": ("expandable", _flag),
    "max_split_size_mb": ("max_split", lambda text: int(text) << 20),
    "roundup_power2_divisions": ("divisions", int),
    "garbage_collection_threshold": ("collect_above", _part),
    "per_process_memory_fraction": ("fraction", _part),
}


class _Pool:
    """The free blocks of a stream, either small or large ones.

    Attributes:
        free: from the smallest block to the largest, with sizes and addresses.
        unmapped: addresses of expandable segments without memory, in their order.
        page: bytes of the device's memory in which an expandable segment grows.
        is_of_graph: whether a CUDA graph uses the blocks, so that nothing is given back. Nothing of any pool is given
            back while the graph is captured.
    """

    __slots__ = ("free", "is_of_graph", "is_small", "page", "unmapped")

    def __init__(self, is_small: bool, is_of_graph: bool) -> None:
        self.is_small, self.is_of_graph = is_small, is_of_graph
        self.page = SMALL_SEGMENT if is_small else LARGE_SEGMENT
        self.free: list[tuple[int, int, _Block]] = []
        self.unmapped: list[tuple[int, _Block]] = []

    def insert(self, block: _Block) -> None:
        if block.is_mapped:
            bisect.insort(self.free, (block.size, block.address, block))
        else:
            bisect.insort(self.unmapped, (block.address, block))

    def remove(self, block: _Block) -> None:
        if block.is_mapped:
            del self.free[bisect.bisect_left(self.free, (block.size, block.address))]  # type: ignore[type-var]
        else:
            del self.unmapped[bisect.bisect_left(self.unmapped, (block.address,))]  # type: ignore[type-var]


class _Block:
    """A piece of a segment, between its neighbours."""

    __slots__ = (
        "address",
        "age",
        "is_expandable",
        "is_mapped",
        "is_used",
        "next",
        "pool",
        "previous",
        "size",
    )

    def __init__(self, size: int, address: int, pool: _Pool, is_expandable: bool, is_mapped: bool) -> None:
        self.size, self.address, self.pool = size, address, pool
        self.is_expandable, self.is_mapped, self.is_used = is_expandable, is_mapped, False
        self.previous: _Block | None = None
        self.next: _Block | None = None
        self.age = 0  #: searches of large blocks before it became free

    @property
    def is_whole(self) -> bool:
        """Whether it is all of its segment."""
        return self.previous is None and self.next is None

    @property
    def room(self) -> int:
        """Its size, with the addresses behind it into which it can grow."""
        behind = self.next
        return self.size if behind is None or behind.is_mapped else self.size + behind.size

    def put_between(self, previous: _Block | None, behind: _Block | None) -> None:
        self.previous, self.next = previous, behind
        if previous is not None:
            previous.next = self
        if behind is not None:
            behind.previous = self


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
        allowed: bytes that ``rules.fraction`` allows; None: no such limit.

    Attributes:
        now, peak: usage, and the largest of each figure so far.
        live_at_peak: requested bytes when most was reserved.
        retries: how often all free memory was given back for an allocation; ``num_alloc_retries`` of PyTorch.
        live: by number, the live blocks and the bytes that were asked for.
    """

    def __init__(self, rules: Rules = Rules(), limit: int | None = None, allowed: int | None = None) -> None:
        self.rules, self.limit, self.allowed = rules, limit, allowed
        self.now, self.peak = Usage(), Usage()
        self.live_at_peak = 0
        self.retries = 0
        self.live: dict[int, tuple[_Block, int]] = {}
        self._pools: dict[tuple[str, bool], _Pool] = {}
        self._graphs: set[str] = set()
        self._next_address = 1 << 46
        self._searches = 0  #: of large blocks

    def rounded(self, nbytes: int) -> int:
        """Return the size of a block for a number of bytes."""
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
        size = self.rounded(nbytes)
        is_small = size <= SMALL
        pool = self._pools.get((stream, is_small))
        if pool is None:
            pool = self._new_pool(stream, is_small)
        block = self._fitting(pool, size) or self._new(pool, size)
        if self._splits(block, size):
            part = _Block(block.size - size, block.address + size, pool, block.is_expandable, True)
            part.put_between(block, block.next)
            block.size = size
            self._insert(part)
        block.is_used = True
        self.live[number] = block, nbytes
        now, peak = self.now, self.peak
        now.active += block.size
        now.requested += nbytes
        if now.reserved > peak.reserved:
            self.live_at_peak, peak.reserved = now.requested, now.reserved
        if now.active > peak.active:
            peak.active = now.active
        if now.requested > peak.requested:
            peak.requested = now.requested

    def give_back(self, number: int) -> None:
        """Free the block of a number."""
        block, nbytes = self.live.pop(number)
        self.now.active -= block.size
        self.now.requested -= nbytes
        block.is_used = False
        self._merge_with_neighbours(block)
        self._insert(block)

    def empty_cache(self) -> None:
        """Give free memory back to the device: whole segments, and whole pages of expandable ones."""
        for pool in self._pools.values():
            for _, _, block in () if pool.is_of_graph else list(pool.free):
                if block.is_expandable:
                    self._unmap(block)
                elif block.is_whole:
                    self._release(block)

    def forget_peak(self) -> None:
        """Count peaks from here on."""
        self.peak, self.live_at_peak = replace(self.now), self.now.requested

    # -- finding

    def _new_pool(self, stream: str, is_small: bool) -> _Pool:
        is_of_graph = stream.startswith(GRAPH)
        if is_of_graph:
            graph = stream.removeprefix(GRAPH).partition(" ")[0]
            if graph not in self._graphs:  # torch.cuda.graph empties the cache before a capture
                self._graphs.add(graph)
                self.empty_cache()
        pool = self._pools[stream, is_small] = _Pool(is_small, is_of_graph)
        return pool

    def _fitting(self, pool: _Pool, size: int) -> _Block | None:
        """Return the smallest free block of the pool that is large enough, if the rules allow it."""
        if not pool.is_small:
            self._searches += 1
        free = pool.free
        i = bisect.bisect_left(free, (size,))  # type: ignore[type-var]
        if i == len(free):
            return None
        block = free[i][2]
        if block.is_expandable:  # a block that can grow is as large as it can become
            while i + 1 < len(free) and free[i + 1][2].room < block.room:
                i += 1
                block = free[i][2]
        limit = self.rules.max_split
        if limit is not None:
            if size < limit <= block.size:  # a large block is for large sizes
                return None
            if size >= limit and block.size >= size + LARGE_SEGMENT:  # it would not be split
                return None
        del free[i]
        return block

    def _new(self, pool: _Pool, size: int) -> _Block:
        """Return a block in memory that the device gives."""
        if self.allowed is not None and self.rules.collect_above:
            self._collect(int(self.allowed * self.rules.collect_above))
        block = self._reserved(pool, size)
        if block is None and self._release_unsplit(pool, size):
            block = self._reserved(pool, size)
        if block is None and not pool.is_of_graph:
            self.retries += 1
            self.empty_cache()
            block = self._reserved(pool, size)
        if block is None:
            raise OutOfMemoryError(_segment_for(size), self.now.reserved, self.now.active)
        return block

    def _reserved(self, pool: _Pool, size: int) -> _Block | None:
        nbytes = _segment_for(size)
        if self.allowed is not None and self.now.reserved + nbytes > self.allowed:
            return None
        if self.rules.expandable:
            return self._grown(pool, size)
        if not self._has_room(nbytes):
            return None
        self.now.reserved += nbytes
        block = _Block(nbytes, self._next_address, pool, False, True)
        self._next_address += nbytes + GIB
        return block

    def _has_room(self, nbytes: int) -> bool:
        return self.limit is None or self.now.reserved + nbytes <= self.limit

    def _splits(self, block: _Block, size: int) -> bool:
        rest = block.size - size
        if block.pool.is_small or self.rules.expandable:
            return rest >= UNIT
        limit = self.rules.max_split
        return (limit is None or size < limit) and rest > SMALL

    # -- expandable segments

    def _grown(self, pool: _Pool, size: int) -> _Block | None:
        """Return a free block of an expandable segment, with further pages."""
        block = self._growing(pool, size)
        if not block.is_mapped and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            behind = block.next
            assert behind is not None
            if not self._map(behind, min(behind.size, size - block.size)):
                return None
            block = behind  # it has merged with the one before
        pool.remove(block)
        return block

    def _growing(self, pool: _Pool, size: int) -> _Block:
        """Return the first free block in the order of addresses that can have a size after it has got pages."""
        for _, block in pool.unmapped:
            first = block
            if (before := block.previous) is not None and not before.is_used:
                first = before
            room, each = 0, first
            while room < size and each is not None and not each.is_used:
                room += each.size
                each = each.next  # type: ignore[assignment]
            if room >= size:
                return first
        block = _Block(
            ADDRESSES, _up(self._next_address, LARGE_SEGMENT), pool, True, False
        )  # pages begin there
        self._next_address = block.address + 2 * ADDRESSES
        pool.insert(block)
        return block

    def _map(self, block: _Block, size: int) -> bool:
        """Give memory to the first bytes of a block without memory, in whole pages."""
        pool = block.pool
        nbytes = _up(size, pool.page)
        if not self._has_room(nbytes):
            return False
        pool.remove(block)
        block.is_mapped = True
        if nbytes < block.size:
            rest = _Block(block.size - nbytes, block.address + nbytes, pool, True, False)
            rest.put_between(block, block.next)
            block.size = nbytes
            pool.insert(rest)
        self._merge_with_neighbours(block)
        self._insert(block)
        self.now.reserved += nbytes
        return True

    def _unmap(self, block: _Block) -> None:
        """Take the memory of the whole pages inside a free block."""
        pool = block.pool
        first, stop = _up(block.address, pool.page), (block.address + block.size) // pool.page * pool.page
        if first >= stop:
            return
        pool.remove(block)
        if before := first - block.address:
            part = _Block(before, block.address, pool, True, True)
            part.put_between(block.previous, block)
            self._insert(part)
        if after := block.address + block.size - stop:
            part = _Block(after, stop, pool, True, True)
            part.put_between(block, block.next)
            self._insert(part)
        block.address, block.size, block.is_mapped = first, stop - first, False
        self._merge_with_neighbours(block)
        self.now.reserved -= stop - first
        if not block.is_whole:  # else the segment is gone
            pool.insert(block)

    # -- giving back

    def _release_unsplit(self, pool: _Pool, size: int) -> bool:
        """Give blocks of the pool back that are too large to be split: one that is as large as the size, or the largest
        ones until they are. Whether enough were given back."""
        limit = self.rules.max_split
        if limit is None:
            return False
        least = max(size, limit)
        i = bisect.bisect_left(pool.free, (least,))  # type: ignore[type-var]
        if i < len(pool.free) and not pool.free[i][2].is_expandable:
            self._release(pool.free[i][2])
            return True
        released = 0
        for _, _, block in reversed(pool.free[:i]):
            if released >= least or block.size < limit:
                break
            if not block.is_expandable:
                released += block.size
                self._release(block)
        return released >= least

    def _collect(self, threshold: int) -> None:
        """Free segments of large blocks if more is reserved: those that nobody took for longer than the mean."""
        target = self.now.reserved - threshold
        while target > 0:
            whole = [
                block
                for pool in self._pools.values()
                for _, _, block in pool.free
                if not (pool.is_small or pool.is_of_graph) and block.is_whole and not block.is_expandable
            ]
            if not whole:
                return
            mean = sum(self._searches - block.age for block in whole) / len(whole)
            for block in whole:
                if self._searches - block.age >= mean:
                    target -= block.size
                    self._release(block)

    def _release(self, block: _Block) -> None:
        block.pool.remove(block)
        self.now.reserved -= block.size

    # -- blocks

    def _insert(self, block: _Block) -> None:
        block.age = self._searches
        block.pool.insert(block)

    def _merge_with_neighbours(self, block: _Block) -> None:
        """Make one block of a block that is in no list and the free blocks beside it."""
        other = block.previous
        if other is not None and not other.is_used and other.is_mapped == block.is_mapped:
            other.pool.remove(other)
            block.address, block.size = other.address, other.size + block.size
            block.put_between(other.previous, block.next)
        other = block.next
        if other is not None and not other.is_used and other.is_mapped == block.is_mapped:
            other.pool.remove(other)
            block.size += other.size
            block.put_between(block.previous, other.next)


def replay(
    events: Iterable[Event], rules: Rules = Rules(), limit: int | None = None, allowed: int | None = None
) -> CachingAllocator:
    """Return the allocator after the allocations and frees of a program. Blocks of the host are not the allocator's."""
    allocator = CachingAllocator(rules, limit, allowed)
    run(allocator, events)
    return allocator


def run(allocator: CachingAllocator, events: Iterable[Event]) -> None:
    """Make the allocations and frees of further events."""
    used = allocator.live
    for event in events:
        if isinstance(event, Alloc):
            if not event.on_host:
                allocator.take(event.block, event.nbytes, event.stream)
        elif isinstance(event, Free) and event.block in used:
            allocator.give_back(event.block)


def _segment_for(size: int) -> int:
    return SMALL_SEGMENT if size <= SMALL else LARGE_SEGMENT if size < LARGE else _up(size, LARGE_STEP)


def _up(value: int, step: int) -> int:
    return -(-value // step) * step
