"""The collectives of a fully sharded step.

A :class:`Communicator` moves bytes for one process group on one device. It knows no units and parameters.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from shardwright.engine import heartbeat
from shardwright.engine.comm.division import Division
from shardwright.engine.comm.groups import make_group
from shardwright.engine.comm.meeting import meeting_of
from shardwright.engine.comm.shared_memory import Exchange, SharedMemoryCollectives
from shardwright.engine.comm.streams import Streams, streams_for
from shardwright.engine.compat.collectives import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    ReduceScatterOptions,
    all_gather_of,
    backend_for,
    reduce_scatter_of,
)
from shardwright.engine.compat.tensors import foreach_copy_


class Pending:
    """A running collective. :meth:`wait` orders the computation after it. Buffers in ``keep`` live until then."""

    __slots__ = ("_finish", "_keep", "_mark", "_streams", "_work")

    def __init__(
        self,
        streams: Streams,
        work: Any,
        mark: Any,
        keep: Any = None,
        finish: Callable[[], None] | None = None,
    ) -> None:
        self._streams = streams
        self._work = work
        self._mark = mark
        self._keep = keep
        self._finish = finish

    def __del__(self, ends: Callable[[], bool] = sys.is_finalizing) -> None:
        # A model may be collected while this runs. Its memory must not be used again before the end. When the
        # interpreter ends nobody uses it again, and the device's driver may have ended already, so that a call raises.
        # `ends` is an argument because names of the module may be gone by then.
        if getattr(self, "_keep", None) is not None and not ends():  # an interrupt may come inside __init__
            self._streams.join(self._mark)

    @property
    def mark(self) -> Any:
        """The mark after which later work on the device may be ordered."""
        return self._mark

    def collect(self) -> None:
        """Wait for it if that takes no time on the host, so that its buffers are free early."""
        if self._work is not None and self._work.is_completed():
            self.wait()

    def drop(self) -> None:
        """Wait for its end without the work that would follow, because nobody uses its results."""
        self._finish = None
        self.wait()

    def wait(self) -> None:
        # Cleared only after success: so an interrupted wait can be repeated, and buffers outlive the collective.
        if self._work is not None:
            self._work.wait()
            self._work = None
        self._streams.join(self._mark)
        finish, self._finish, self._keep = self._finish, None, None
        if finish is not None:
            finish()


def widened(
    targets: list[torch.Tensor], sources: list[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The same flat uint8 tensors as the widest integers that all pairs allow.

    An accelerator copies an element at a time, so bytes are slow. Memory must begin at a multiple of 8.
    """
    for dtype in (torch.int64, torch.int32, torch.int16):
        if all((t.storage_offset() | t.numel()) % dtype.itemsize == 0 for t in (*targets, *sources)):
            return [t.view(dtype) for t in targets], [t.view(dtype) for t in sources]
    return targets, sources


def real_parts(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same memory without complex numbers, which neither gloo nor NCCL know: twice as many elements in a row."""
    return [t.view(t.dtype.to_real()) if t.is_complex() else t for t in tensors]


class Communicator:
    """Collectives of one process group. The group's first collective creates the backend's communicator.

    Without a group it is for this rank alone: a gather copies, and a reduction does nothing.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, device: torch.device, streams: Streams | None = None
    ) -> None:
        """``streams``: of the device, unless it uses others."""
        self.group = group
        self.device = device
        self.ranks = dist.get_process_group_ranks(group) if group is not None else [dist.get_rank()]
        self.world_size = len(self.ranks)
        self.name = heartbeat.group_name(self.ranks)  #: on heartbeats
        self.rank = group.rank() if group is not None else 0
        self.streams = streams_for(device) if streams is None else streams
        # gloo's reduce-scatter is slow: an all-to-all and a local sum took 0.33 / 0.48 / 5.5 ms where it took
        # 0.66 / 3.8 / 12 ms for 64 KiB / 1 MiB / 12 MiB on two ranks; the local sum also rounds only once.
        self._gloo = group is not None and backend_for(group, device).name() == "gloo"
        self._gather_options = AllgatherOptions()
        self._gather_options.asyncOp = self.streams.asynchronous
        self._scatter_options = ReduceScatterOptions(), ReduceScatterOptions()  #: for sums, for averages
        for options, op in zip(self._scatter_options, (dist.ReduceOp.SUM, dist.ReduceOp.AVG), strict=True):
            options.reduceOp = op
            options.asyncOp = self.streams.asynchronous
        #: Whether :meth:`exchange` does anything. It does on gloo, where unequal sizes abort the process.
        self.exchanges = self._gloo and self.world_size > 1
        #: The meeting of the ranks. Copies of a communicator share it.
        self.meeting = meeting_of(group, device) if self.exchanges and group is not None else None

    def exchange(self, record: tuple[int, ...], limit: timedelta | None = None) -> list[list[int]] | None:
        """Send ``record`` to every rank. Returns the records of all ranks if they differ. See :meth:`Meeting.show`."""
        assert self.meeting is not None
        return self.meeting.show(record, limit)

    def begin(self, announce: Callable[[], None] | None, *collectives: Callable[[], Any]) -> Any:
        """Call ``announce``, if there is one, and begin collectives. Returns the work to wait for."""
        if announce is None or self.meeting is None:
            works = [collective() for collective in collectives]
            work = works[0] if len(works) == 1 else _Works(works)
        else:
            work = self.meeting.begin(announce, lambda: collectives)
        if self._gloo and not self.streams.asynchronous and work is not None:
            work.wait()  # on an accelerator's memory gloo queues nothing on the stream; the host copies
        return work

    def gather_row(self, mine: torch.Tensor) -> torch.Tensor:
        """Gather every rank's flat ``mine`` as rows, on the device and the current stream. Modes do not see it."""
        everyone = mine.new_empty(self.world_size * mine.numel())
        all_gather_of(backend_for(self.group, self.device))(everyone, mine).wait()
        return everyone.view(self.world_size, -1)

    def all_gather(
        self,
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
        casts: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], []),
        on_done: Callable[[], None] | None = None,
        announce: Callable[[], None] | None = None,
    ) -> Pending:
        """Gather byte tensors: ``outputs[i]`` holds every rank's ``inputs[i]``, rank after rank.

        ``casts`` are destinations and sources copied first, on the gather's own stream. All tensors must be
        uint8: one coalesced gather of mixed dtypes returns wrong data on gloo without an error. ``announce`` is
        called last before the collective; after it nothing can fail on this rank alone. It may raise.
        """
        with self.streams.fork("gather"):
            if casts[0]:
                foreach_copy_(*casts)
            if self.group is None:
                if outputs:
                    foreach_copy_(outputs, inputs)
                mark = self.streams.mark("gather")
                return Pending(self.streams, None, mark, keep=(outputs, inputs), finish=on_done)
            if self._gloo:
                ways = self._gather_on_gloo, SharedMemoryCollectives.gather
                return self._begin_on_host("gather", announce, *ways, (outputs, inputs), on_done)
            work = self.group.allgather_into_tensor_coalesced(outputs, inputs, self._gather_options)
        return Pending(
            self.streams, work, self.streams.mark("gather"), keep=(outputs, inputs), finish=on_done
        )

    def _gather_on_gloo(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> _OnGloo:
        """Gather large tensors straight into their outputs. The others share one gather, and are copied after it;
        gloo's coalesced gather makes the same copies inside.

        After a collective each worker thread of a gloo group writes the operation's name into one string without a
        lock. ``ALLGATHER_COALESCED`` has more than 15 characters, so it is on the heap, which two such writes
        corrupt. ``_ALLGATHER_BASE`` fits into the string itself. The engine issues short names only.
        """
        assert self.group is not None
        gather = all_gather_of(self.group)
        large, small = _by_size(inputs)
        collectives = [functools.partial(gather, outputs[i], inputs[i], self._gather_options) for i in large]
        if not small:
            return _OnGloo(collectives, _nothing, (inputs, outputs))
        targets, sources = [outputs[i] for i in small], [inputs[i] for i in small]
        flat = torch.cat(sources)
        gathered = torch.empty(self.world_size * flat.numel(), dtype=torch.uint8, device=self.device)
        collectives.append(functools.partial(gather, gathered, flat, self._gather_options))

        def unpack() -> None:
            rows = gathered.view(self.world_size, -1).split([t.numel() for t in sources], dim=1)
            foreach_copy_([t.view(self.world_size, -1) for t in targets], rows)

        return _OnGloo(collectives, unpack, (flat, gathered, inputs, outputs))

    def reduce_scatter(
        self,
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
        division: Division,
        announce: Callable[[], None] | None = None,
        after: Pending | None = None,
    ) -> Pending:
        """Sum each of ``inputs`` over the ranks. ``outputs[i]`` receives this rank's piece of the i-th sum, divided.

        All tensors are flat. An input has one piece for each rank, in rank order. ``announce`` is called last before
        the collective, as in :meth:`all_gather`. On an accelerator the collective is queued after the collective
        ``after``, or after the computation so far.
        """
        streams = self.streams
        with streams.fork("reduce") if after is None else streams.beside("reduce", after.mark):
            if division.before != 1.0:
                for tensor in inputs:
                    tensor.div_(division.before)
            if self._gloo:
                ways = self._scatter_on_gloo, SharedMemoryCollectives.reduce_scatter
                return self._begin_on_host("reduce", announce, *ways, (outputs, inputs, division))
            assert self.group is not None
            options = self._scatter_options[division.average]
            if inputs[0].is_complex():
                outputs, inputs = real_parts(outputs), real_parts(inputs)
            if len(inputs) == 1:
                work = reduce_scatter_of(self.group)(outputs[0], inputs[0], options)
            else:
                work = self.group.reduce_scatter_tensor_coalesced(outputs, inputs, options)
            return self._divided(work, "reduce", outputs, division, inputs)

    def all_reduce(
        self,
        tensor: torch.Tensor,
        division: Division,
        announce: Callable[[], None] | None = None,
        after: Pending | None = None,
    ) -> Pending:
        """Sum ``tensor`` over the ranks in place, divided; queued as in :meth:`reduce_scatter`, on its own stream."""
        assert self.group is not None
        streams = self.streams
        with streams.fork("all_reduce") if after is None else streams.beside("all_reduce", after.mark):
            if division.before != 1.0:
                tensor.div_(division.before)
            if self._gloo:
                ways = self._sum_on_gloo, SharedMemoryCollectives.all_reduce
                return self._begin_on_host("all_reduce", announce, *ways, (tensor, division))
            work = self.group.allreduce(real_parts([tensor]), self._options_of_sums(division))
            return self._divided(work, "all_reduce", [tensor], division, None)

    def _options_of_sums(self, division: Division) -> AllreduceOptions:
        options = AllreduceOptions()
        options.reduceOp = dist.ReduceOp.AVG if division.average else dist.ReduceOp.SUM
        options.asyncOp = self.streams.asynchronous
        return options

    def _divided(
        self, work: Any, stream: str, outputs: list[torch.Tensor], division: Division, keep: Any
    ) -> Pending:
        """The running collective, with the division that follows it."""
        keep = outputs, keep
        if division.after == 1.0:
            return Pending(self.streams, work, self.streams.mark(stream), keep=keep)
        if self.streams.asynchronous:
            mark = self.streams.mark(stream)
            return Pending(self.streams, work, mark, keep=keep, finish=lambda: division.finish(outputs))
        division.finish(outputs)
        return Pending(self.streams, work, self.streams.mark(stream), keep=keep)

    def _scatter_on_gloo(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], division: Division
    ) -> _OnGloo:
        """Exchange rows and sum what arrives. Large tensors are sent from where they are, the others from one copy.

        Of two ranks each sends one row and receives one, so that its own row takes no second memory.
        """
        assert self.group is not None
        n, pair, other = self.world_size, self.world_size == 2, 1 - self.rank
        options = AllToAllOptions()
        options.asyncOp = True
        collectives: list[Callable[[], Any]] = []
        sums: list[Callable[[], None]] = []
        large, small = _by_size(inputs)
        for several in [[i] for i in large] + ([small] if small else []):
            rows = [inputs[i].view(n, -1) for i in several]
            packed = rows[0] if len(rows) == 1 else torch.cat(rows, 1)
            sent = packed[other] if pair else packed
            received = torch.empty_like(sent)
            both = real_parts([received, sent])
            splits = [both[0].numel() if rank == other else 0 for rank in range(n)] if pair else []
            collectives.append(functools.partial(self.group.alltoall_base, *both, splits, splits, options))
            column = 0
            for output in (outputs[i] for i in several):
                place = (-1, column, output.numel())
                column += output.numel()
                if pair:
                    parts = packed[self.rank].narrow(*place), received.narrow(*place)
                    sums.append(functools.partial(division.sum_parts, parts, output))
                else:
                    sums.append(functools.partial(division.sum_rows, received.narrow(*place), output))

        def sum_up() -> None:
            for each in sums:
                each()

        return _OnGloo(collectives, sum_up, sums)

    def _sum_on_gloo(self, tensor: torch.Tensor, division: Division) -> _OnGloo:
        assert self.group is not None
        options = self._options_of_sums(division)
        collective = functools.partial(self.group.allreduce, real_parts([tensor]), options)
        return _OnGloo([collective], functools.partial(division.finish, [tensor]), tensor)

    def _begin_on_host(
        self,
        stream: str,
        announce: Callable[[], None] | None,
        on_gloo: Callable[..., _OnGloo],
        exchange: Callable[..., Exchange],
        given: tuple[Any, ...],
        on_done: Callable[[], None] | None = None,
    ) -> Pending:
        """Begin a collective of the tensors ``given``: through memory that all ranks share, if there is, or on gloo.

        On gloo it goes also if a rank has modes that count collectives: they are to see it. Ranks know this only after
        they agree.
        """
        if self.meeting is not None and self.streams.asynchronous:
            shared = self.meeting.shared_memory()
            if shared is not None:
                prepare = functools.partial(exchange, shared, *given)
                return self._begin_exchange(
                    stream, announce, functools.partial(on_gloo, *given), prepare, on_done
                )
        way = on_gloo(*given)
        work = self.begin(announce, *way.collectives)
        if self.streams.asynchronous:
            mark = self.streams.mark(stream)
            return Pending(
                self.streams, work, mark, way.keep, functools.partial(in_turn, way.finish, on_done)
            )
        way.finish()
        return Pending(self.streams, None, self.streams.mark(stream), way.keep, on_done)

    def _begin_exchange(
        self,
        stream: str,
        announce: Callable[[], None] | None,
        on_gloo: Callable[[], _OnGloo],
        prepare: Callable[[], Exchange],
        on_done: Callable[[], None] | None,
    ) -> Pending:
        meeting = self.meeting
        assert meeting is not None
        exchange = meeting.reached(prepare)
        watched: list[_OnGloo] = []

        def steps() -> Iterable[Callable[[], Any]]:
            number, is_watched = meeting.agreement
            if not is_watched:
                return exchange.steps(number)
            watched[:] = [on_gloo()]
            return watched[0].collectives

        work = meeting.begin(_nothing if announce is None else announce, steps)
        mark = self.streams.mark(stream)
        if not watched:
            return Pending(self.streams, work, mark, finish=on_done)
        way = watched[0]
        return Pending(self.streams, work, mark, way.keep, functools.partial(in_turn, way.finish, on_done))


class _OnGloo(NamedTuple):
    """Collectives of gloo that make one of the engine's."""

    collectives: Sequence[Callable[[], Any]]
    finish: Callable[[], None]  #: what makes the results, after them
    keep: Any  #: their memory


class _Works:
    """Several works of torch, to wait for together."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            if work is not None:
                work.wait()

    def is_completed(self) -> bool:
        return all(work is None or work.is_completed() for work in self._works)


#: Bytes of a rank from which a tensor has a gloo collective of its own. That needs no buffer beside the tensor, and
#: from about this size on the copies into and out of a buffer take longer than the start of a collective.
_LARGE = 1 << 17


def _by_size(tensors: Sequence[torch.Tensor]) -> tuple[list[int], list[int]]:
    """The indices of the tensors that have a gloo collective of their own, and of the others."""
    large = [i for i, tensor in enumerate(tensors) if tensor.nbytes >= _LARGE]
    return large, [i for i in range(len(tensors)) if i not in large]


def in_turn(first: Callable[[], None], second: Callable[[], None] | None) -> None:
    """Call both functions."""
    first()
    if second is not None:
        second()


def _nothing() -> None:
    """The announcement of ranks that have agreed before: nothing."""


#: By group and by streams.
_separate: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Streams, Communicator]] = (
    weakref.WeakKeyDictionary()
)


def separate(comm: Communicator) -> Communicator:
    """A communicator of a new process group over the same ranks, made once. Every rank of the group must call it."""
    if comm.group is None:
        return comm
    made = _separate.setdefault(comm.group, {})
    if comm.streams not in made:
        made[comm.streams] = _over(comm.ranks, comm)
    return made[comm.streams]


#: By group, by number of neighbours and streams.
_neighbours: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, Streams], Communicator]] = (
    weakref.WeakKeyDictionary()
)


def neighbours(comm: Communicator, size: int) -> Communicator:
    """A communicator over ``size`` neighbouring ranks, this one among them, made once.

    The ranks of ``comm`` are divided into groups of ``size`` neighbours; ``size`` divides their number. All ranks must
    call it.
    """
    assert comm.group is not None
    made = _neighbours.setdefault(comm.group, {})
    key = size, comm.streams
    if key not in made:
        first = comm.rank // size * size
        made[key] = _over(comm.ranks[first : first + size], comm)
    return made[key]


def _over(ranks: list[int], comm: Communicator) -> Communicator:
    assert comm.group is not None
    backend = backend_for(comm.group, comm.device).name()
    return Communicator(make_group(ranks, backend), comm.device, comm.streams)
