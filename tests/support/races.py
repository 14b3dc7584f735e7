"""An accelerator simulated on the CPU: it tells which operations would race on streams of their own.

Everything runs at once and in the order of the program, as ever on the CPU. Beside it each stream has a vector clock,
which waiting for streams and events joins; every operation reads and writes ranges of bytes at the time of the stream
that is current; and two accesses to the same bytes of which one is a write must be ordered by these clocks. What is
known of the engine here is where it makes its streams and its collectives, and what its slabs are called.

What is offloaded lies in memory of the host: operations on that alone run there, at once, and the device's later ones
come after them; copies between the two run on the current stream, and the host waits for those that are blocking.

Memory is modelled as torch's CUDA allocator gives it: an allocation is a write on the stream that is current, since
earlier work of that stream may still use the memory, and its end is a write on the same stream, since later work of
that stream may get it. So are the lease and the release of a slab, whoever gives the memory.
"""

from __future__ import annotations

import bisect
import math
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.engine import Host
from shardwright.engine.comm import DeviceStreams, collectives, host_flag, use_streams
from shardwright.engine.memory import Slab, observe
from tests.support.effects import HOST_WAITS, PLAIN_DISPATCH, Plan, plan_of, tensors_in
from tests.support.streams import Clock, Device, HostStream, Stream


class Access(NamedTuple):
    """Bytes that an operation reads or writes."""

    low: int
    high: int
    stream: Stream
    time: int
    write: bool
    operation: str
    where: tuple[tuple[str, int], ...]  #: code and lines, the innermost first
    number: int  #: of the operation, counted over all streams

    def __str__(self) -> str:
        how = "write" if self.write else "read"
        return f"{how} by {self.operation} on {self.stream.name!r} ({_told(self.where)})"


class Block:
    """Memory as the allocator gave it, and who used it last."""

    __slots__ = ("accesses", "end", "maker", "on_host", "origin", "owner", "start")

    def __init__(self, start: int, end: int, origin: Stream, maker: str) -> None:
        self.start, self.end, self.origin, self.maker = start, end, origin, maker
        self.accesses: list[Access] = []
        self.on_host = isinstance(origin, HostStream)
        self.owner: weakref.ref[Any] | None = None  #: the storage that it was first seen with


@dataclass
class Lease:
    """A slab had this memory from one operation to another."""

    since: int
    until: float
    low: int
    high: int
    slab: str


class RaceError(AssertionError):
    """Operations are not ordered that must be."""


class NoMemoryError(AssertionError):
    """An operation was given a tensor whose memory has been released."""


class Simulator(TorchDispatchMode):
    """While it is entered, the engine takes the path of an accelerator, and races are collected.

        with Simulator() as simulator:
            ...  # fully_shard, train
        simulator.check()

    Shard models inside it, over a process group of the "fake" backend. Autograd's backward runs on the stream that is
    current, as on CUDA if forward has run on that one.

    Attributes:
        device: streams and events for the program under test; the one that computes is current at first.
        side: the engine's own streams, by name.
        races: what was found, as texts.
        operations: how many operations have run, by stream.
    """

    def __init__(self, streams: Callable[[torch.device], DeviceStreams] = DeviceStreams) -> None:
        super().__init__()
        self.streams: list[Stream] = []
        self.host: Clock = {}  #: what the host has waited for
        self.current = self.computation = Stream(self, "computation")
        self.host_stream = HostStream(self, "host")
        self.queries = 0
        self._offloads = False  #: whether there is memory of the host
        self.device = Device(self)
        self.races: dict[str, None] = {}
        self.operations: dict[str, int] = {}
        self._make_streams = streams
        self._number = 0
        self._plans: dict[Any, Plan] = {}
        self._starts: list[int] = []
        self._blocks: dict[int, Block] = {}
        self._owned: dict[int, Block] = {}  #: by storage
        self._watched: dict[int, weakref.ref[Any]] = {}
        self._leases: list[Lease] = []
        self._open: weakref.WeakKeyDictionary[Slab, Lease] = weakref.WeakKeyDictionary()

    # -- the engine on it

    def __enter__(self) -> Simulator:
        self._patches = pytest.MonkeyPatch()
        patch = self._patches.setattr
        module_of = torch.get_device_module
        patch(
            torch,
            "get_device_module",
            lambda device=None: (
                self.device if torch.device(device or "cpu").type == "cpu" else module_of(device)
            ),
        )
        made = self._make_streams(torch.device("cpu"))
        self.side: dict[str, Stream] = made._side
        for name, stream in self.side.items():
            stream.name = name
        self._seams = ExitStack()
        self._seams.enter_context(use_streams(torch.device("cpu"), made))
        self._seams.enter_context(observe(self))
        backend_for = collectives.backend_for
        patch(collectives, "backend_for", lambda group, device: _Backend(self, backend_for(group, device)))
        patch(dist, "all_to_all_single", self._asynchronous(dist.all_to_all_single))
        patch(torch.Tensor, "tolist", self._tolist(torch.Tensor.tolist))
        patch(Host, "zeros", self._zeros(Host.zeros))
        patch(host_flag, "host_memory", self._zeros(host_flag.host_memory))
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._seams.close()
        self._patches.undo()
        self._watched.clear()  # what ends from now on is not looked at

    def check(self) -> None:
        if self.races:
            told = "\n".join(list(self.races)[:6])
            raise RaceError(f"{len(self.races)} races:\n{told}")

    def resizes(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        self._number += 1
        self._end(storage._cdata, "the release of memory")

    def resized(self, storage: torch.UntypedStorage) -> None:
        self._block_of(storage, "the allocation of memory")

    def exchanged(self, one: torch.UntypedStorage, two: torch.UntypedStorage) -> None:
        blocks = [self._owned.pop(storage._cdata, None) for storage in (one, two)]
        for storage, block in zip((two, one), blocks, strict=True):
            if block is not None:
                self._owned[storage._cdata] = block
                self._watch(storage)
                block.owner = self._watched[storage._cdata]

    def _zeros(self, zeros: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def zeros_(*given: Any) -> torch.Tensor:
            self._offloads = True
            with self.device.stream(self.host_stream):
                return zeros(*given)

        return zeros_

    def _on_host(self, tensors: list[torch.Tensor]) -> list[bool]:
        found = [self._find(t.data_ptr()) for t in tensors if t.numel()]
        return [block is not None and block.on_host for block in found]

    def _tolist(self, tolist: Callable[..., Any]) -> Callable[..., Any]:
        def tolist_(tensor: torch.Tensor) -> Any:
            if type(tensor) is torch.Tensor and tensor.device.type == "cpu":
                host = all(self._on_host([tensor]))
                with self.device.stream(self.host_stream if host else self.current):
                    self.run("tolist", [], [tensor])
                    self.current.synchronize()
            return tolist(tensor)

        return tolist_

    def leased(self, slab: Slab) -> None:
        if slab not in self._open:
            kind, end = f"{slab.kind} of {slab.unit or 'a unit'}", slab.address + slab.nbytes
            self._open[slab] = Lease(self._number, math.inf, slab.address, end, kind)
            self._leases.append(self._open[slab])
            self._own(slab, "a lease", True)

    def releases(self, slab: Slab) -> None:
        self._own(slab, "a release", False)
        if slab in self._open:
            self._open.pop(slab).until = self._number

    def _own(self, slab: Slab, operation: str, stays: bool) -> None:
        """All use of a slab lies between its lease and its release, whoever gives the memory."""
        block = self._find(slab.address)
        if block is not None and slab.nbytes:
            self._number += 1
            low, high, now = slab.address, slab.address + slab.nbytes, self.current
            access = Access(low, high, now, now.tick(), True, operation, _where(), self._number)
            self._add(block, access, stays)

    def _asynchronous(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        """An asynchronous collective runs on a stream of its group, after what the current one has queued so far."""
        streams: dict[Any, Stream] = {}

        def call(*args: Any, group: Any = None, async_op: bool = False, **options: Any) -> Any:
            if not async_op:
                return collective(*args, group=group, **options)
            stream = streams.setdefault(group, Stream(self, "collectives"))
            stream.wait_stream(self.current)
            with self.device.stream(stream):
                collective(*args, group=group, **options)
            return stream.record_event()

        return call

    # -- operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(t, FakeTensor) for t in types):  # DTensor asks for shapes by them
            return func(*args, **kwargs)
        if any(t.__torch_dispatch__ is not PLAIN_DISPATCH for t in types):
            return NotImplemented  # subclasses first become calls on plain tensors
        if not self._offloads:
            return self._run_operation(func, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            given = [t for value in (args, *kwargs.values()) for t in tensors_in(value)]
            places = self._on_host(given)
        if any(places):
            if not all(places):
                self._check_mixed(func, args, kwargs, given)
            else:
                with self.device.stream(self.host_stream):
                    return self._run_operation(func, args, kwargs)
        return self._run_operation(func, args, kwargs, any(places))

    def _forget_stale(self, results: Iterator[torch.Tensor], given: list[torch.Tensor]) -> None:
        """New memory is not what another tensor had there, whose end nobody saw: that may have been the host's."""
        known = {t.untyped_storage().data_ptr() for t in given}
        for tensor in results:
            start = tensor.untyped_storage().data_ptr()
            block = self._find(start) if start not in known else None
            if block is not None and block.on_host != (self.current is self.host_stream):
                self._forget(block)

    def _check_mixed(self, func: Any, args: Any, kwargs: Any, given: list[torch.Tensor]) -> None:
        """Devices refuse operations on tensors of both, but for copies, and numbers of the host."""
        name = func._schema.name
        numbers = all(t.ndim == 0 for t in given if self._on_host([t]) == [False])
        if name not in ("aten::copy_", "aten::_foreach_copy_") and not numbers and not func.is_view:
            raise RaceError(f"{name} mixes tensors of the host and of the device: {_told(_where())}")

    def _run_operation(self, func: Any, args: Any, kwargs: Any, mixed: bool = False) -> Any:
        plan = self._plans.get(func)
        if plan is None:
            plan = self._plans[func] = plan_of(func)
        name = func._schema.name
        with torch._C.DisableTorchFunctionSubclass():
            writes, reads = (
                [t for i, key in part for t in tensors_in(args[i] if i < len(args) else kwargs.get(key))]
                for part in plan
            )
            if name.startswith("c10d::"):
                self._refuse_asynchronous(func, args, kwargs)
            self.run(name, writes, reads)
            result = func(*args, **kwargs)
            if name.startswith("c10d::") and "reduce_scatter" in name:
                for output, given in zip(writes, reads, strict=True):
                    output.copy_(given.view(-1)[: output.numel()])  # the fake backend leaves what was there
            if self._offloads:
                self._forget_stale(tensors_in(result), [*writes, *reads, *tensors_in(args)])
            for tensor in (*tensors_in(result), *writes):
                self._block_of(tensor.untyped_storage(), name)
        blocking = mixed and not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
        if name in HOST_WAITS or (blocking and "copy_" in name):
            self.current.synchronize()
        return result

    def _refuse_asynchronous(self, func: Any, args: Any, kwargs: Any) -> None:
        for i, argument in enumerate(func._schema.arguments):
            if argument.name == "async_op":
                asked = args[i] if i < len(args) else kwargs.get("async_op", argument.default_value)
                if asked:
                    raise RaceError(
                        f"{func._schema.name} was not issued on the current stream: async_op=True"
                    )

    def run(self, operation: str, writes: list[torch.Tensor], reads: list[torch.Tensor]) -> None:
        """An operation runs on the current stream."""
        if not writes and not reads:
            return  # a view, or new memory
        self._number += 1
        self.operations[self.current.name] = self.operations.get(self.current.name, 0) + 1
        time, where = self.current.tick(), _where()
        for tensors, write in ((reads, False), (writes, True)):
            for tensor in tensors:
                if tensor.numel():
                    storage = tensor.untyped_storage()
                    if not storage.nbytes():
                        told = f"{operation} {'writes' if write else 'reads'} released memory"
                        raise NoMemoryError(f"{told}: {tuple(tensor.shape)}, {_told(where)}")
                    block = self._block_of(storage, "unseen code")
                    low = tensor.data_ptr()
                    high = low + _extent(tensor)
                    access = Access(low, high, self.current, time, write, operation, where, self._number)
                    self._add(block, access)

    def _add(self, block: Block, access: Access, stays: bool = True) -> None:
        """Compare an access with those before it, and remember it if it ``stays``."""
        clock, kept = access.stream.clock, []
        for other in block.accesses:
            overlaps = other.low < access.high and access.low < other.high
            if overlaps and (access.write or other.write) and clock.get(other.stream.number, 0) < other.time:
                self._tell(block, other, access)
            # What comes after this access and not after the other one races with this one.
            covered = access.low <= other.low and other.high <= access.high
            if not (covered and (access.write or (other.stream is access.stream and not other.write))):
                kept.append(other)
        if stays:
            kept.append(access)
            block.accesses = kept

    def _tell(self, block: Block, first: Access, second: Access) -> None:
        low = max(first.low, second.low)
        names = list(dict.fromkeys(self._owner(block, access, low) for access in (first, second)))
        nbytes = min(first.high, second.high) - low
        owner = ", then ".join(names)
        self.races.setdefault(f"{first} and {second} are not ordered: {nbytes} bytes of {owner}")

    def _owner(self, block: Block, access: Access, address: int) -> str:
        for lease in reversed(self._leases):
            if lease.since <= access.number <= lease.until and lease.low <= address < lease.high:
                return lease.slab
        return block.maker

    # -- memory

    def _find(self, address: int) -> Block | None:
        i = bisect.bisect_right(self._starts, address) - 1
        block = self._blocks[self._starts[i]] if i >= 0 else None
        return block if block is not None and address < block.end else None

    def _block_of(self, storage: torch.UntypedStorage, operation: str) -> Block:
        """The memory of a storage; what was not known yet is allocated now, on the current stream."""
        start, nbytes = storage.data_ptr(), storage.nbytes()
        block = self._find(start)
        if block is not None and start + nbytes <= block.end:
            if block.owner is None or (
                (owner := block.owner()) is not None and owner.data_ptr() == block.start
            ):
                return block
            self._forget(block)  # it ended where nobody saw it, and this memory is new
        where = _where()
        block = Block(start, start + nbytes, self.current, f"what {operation} made ({_told(where)})")
        if not nbytes:
            return block
        for stale in [b for s in self._starts if (b := self._blocks[s]).start < block.end and start < b.end]:
            self._forget(stale)  # it ended where nobody saw it
        bisect.insort(self._starts, start)
        self._blocks[start] = self._owned[storage._cdata] = block
        self._watch(storage)
        block.owner = self._watched[storage._cdata]
        self._add(block, Access(start, block.end, self.current, self.current.tick(), True,
                                f"{operation} (allocation)", where, self._number))  # fmt: skip
        return block

    def _watch(self, storage: torch.UntypedStorage) -> None:
        number, ref = storage._cdata, weakref.ref(self)

        def ended(_: Any) -> None:
            simulator = ref()
            if simulator is not None and simulator._watched.pop(number, None) is not None:
                simulator._end(number, "the end of a tensor")

        if number not in self._watched:
            self._watched[number] = weakref.ref(storage, ended)

    def _end(self, number: int, operation: str) -> None:
        block = self._owned.pop(number, None)
        if block is None or self._blocks.get(block.start) is not block:
            return
        stream = block.origin
        self._number += 1
        access = Access(
            block.start, block.end, stream, stream.tick(), True, operation, _where(), self._number
        )
        self._add(block, access)
        self._forget(block)

    def _forget(self, block: Block) -> None:
        del self._blocks[block.start]
        del self._starts[bisect.bisect_left(self._starts, block.start)]


class _Backend:
    """A backend whose collectives are seen, though they do not pass through the dispatcher."""

    def __init__(self, simulator: Simulator, backend: Any) -> None:
        self._simulator, self._backend = simulator, backend

    def name(self) -> str:
        return self._backend.name()

    def _allgather_base(self, output: torch.Tensor, given: torch.Tensor) -> Any:
        self._simulator.run("_allgather_base", [output], [given])
        return self._backend._allgather_base(output, given)


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from the first element of a tensor to behind its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _where() -> tuple[tuple[str, int], ...]:
    found: list[tuple[str, int]] = []
    frame: Any = sys._getframe(2)
    while frame is not None and len(found) < 4:
        file = frame.f_code.co_filename
        if ("shardwright/" in file or "tests/engine" in file) and not file.endswith("support/races.py"):
            found.append((file, frame.f_lineno))
        frame = frame.f_back
    return tuple(found)


def _told(where: tuple[tuple[str, int], ...]) -> str:
    return " < ".join(f"{file.rpartition('/')[2]}:{line}" for file, line in where)
