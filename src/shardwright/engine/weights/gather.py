"""A gather: from a unit's shards to its full weights. A tuple of small stages, then one collective into the slab.

Stages are made once, for a layout and a transport. Only features that a unit uses have a stage. In one dtype on one
mesh axis there is no stage. Communicators apply codecs (``comm``).
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable
from typing import Protocol

import torch

from shardwright.engine.base.home import HEADER, Place
from shardwright.engine.base.offload import HostReads
from shardwright.engine.base.settings import Transport
from shardwright.engine.comm import Communicator, Pending, widened
from shardwright.engine.compat.dtensor import subclasses_dispatch
from shardwright.engine.compat.tensors import foreach_copy_
from shardwright.engine.layout import Run, UnitLayout
from shardwright.engine.memory import Owner, Slab
from shardwright.engine.tensors.cut import Cut
from shardwright.engine.tensors.parameter import ManagedParameter
from shardwright.engine.tensors.ranks import Ranks
from shardwright.engine.weights.coding import encoding_gathers
from shardwright.engine.weights.ledger import NEVER

#: Whether foreach operations on sharded parameters increase a version counter (``ShardedTensor``). If they do not,
#: gathered weights are used only in their root call.
edits_are_seen = subclasses_dispatch

Moves = tuple[list[torch.Tensor], list[torch.Tensor]]  #: destinations and sources
_NO_MOVES: Moves = ([], [])


class Parcel:
    """The state of a gather while it is issued: stages change it, and the last collective uses it."""

    __slots__ = ("casts", "epoch", "inputs", "nbytes", "outputs", "place")

    def __init__(self, gather: Gather, place: Place, epoch: int) -> None:
        self.place = place
        self.epoch = epoch  #: the epoch of the gathered weights
        self.outputs = gather.outputs
        self.inputs = gather.inputs
        self.nbytes = gather.nbytes
        self.casts = _NO_MOVES  #: copies before the next collective, on its stream


class Stage(Protocol):
    """A stage before the last collective of a gather."""

    def begin(self, parcel: Parcel) -> None: ...

    def end(self) -> None:
        """Called after the gather was waited for."""


class Hop:
    """A collective of an outer mesh axis, into separate memory."""

    def __init__(
        self,
        comm: Communicator,
        inputs: list[torch.Tensor],
        outputs: list[torch.Tensor],
        slab: Slab,
        kept: bool,
        detail: int,
    ) -> None:
        self.comm = comm
        self.inputs = inputs
        self.outputs = outputs
        self.slab = slab
        self.detail = detail  #: as of the :class:`Gather`
        self.kept = kept  #: whether the result is kept until the weights change
        self.epoch = NEVER  #: the epoch of the kept weights
        self._pending: Pending | None = None  #: kept until the end, because it holds the buffers

    def serves(self, epoch: int) -> bool:
        """Whether the kept result is valid, so that this stage gathers nothing."""
        return self.kept and self.epoch == epoch and edits_are_seen

    def begin(self, parcel: Parcel) -> None:
        casts, parcel.casts = parcel.casts, _NO_MOVES
        if self.serves(parcel.epoch):
            return
        self.slab.lease()
        self.epoch = NEVER
        place = parcel.place
        announce = place.home.agreement.announce_gather(
            place.number, self.comm, self.slab.nbytes, self.detail
        )
        pending = self.comm.all_gather(self.outputs, self.inputs, casts, None, announce)
        if self.comm.streams.asynchronous:
            pending.wait()  # on an accelerator the stream keeps the order
        self._pending = pending
        self.epoch = parcel.epoch

    def end(self) -> None:
        self._pending = None
        if not self.kept:
            self.slab.release()

    def drop(self) -> None:
        """Free the result, because the weights are about to change."""
        self.epoch = NEVER
        self.slab.release()


class Upload:
    """Copies shards from the CPU's memory to the device."""

    def __init__(self, slab: Slab, copies: Moves, reads: HostReads, after: Hop | None) -> None:
        self._slab = slab
        self._copies = copies
        self._reads = reads
        self._after = after  #: the first outer collective; if its result is valid, no copy is needed

    def begin(self, parcel: Parcel) -> None:
        if self._after is None or not self._after.serves(parcel.epoch):
            self._slab.lease()
            self._reads.mark = self._reads.host.upload(*self._copies)

    def end(self) -> None:
        self._slab.release()


class CastShards:
    """Casts or reorders shards that are stored in another dtype or order than gathered."""

    def __init__(self, slab: Slab | None, copies: Moves) -> None:
        """``slab``: memory for the results. None: they are the full weights."""
        self._slab = slab
        self._copies = copies

    def begin(self, parcel: Parcel) -> None:
        if self._slab is not None:
            self._slab.lease()
        parcel.casts = self._copies

    def end(self) -> None:
        if self._slab is not None:
            self._slab.release()


class Extend:
    """Gathers parameters with ``fsdp_pre_all_gather``."""

    def __init__(
        self,
        parameters: list[ManagedParameter],
        comm: Communicator,
        reads: HostReads | None,
        on_gradient: Callable[[torch.Tensor], None],
        adopted: weakref.WeakMethod[Callable[[], None]],
    ) -> None:
        self._parameters = parameters
        self._comm = comm
        self._reads = reads
        self._on_gradient = on_gradient
        self._adopted = adopted

    @torch.no_grad()
    def begin(self, parcel: Parcel) -> None:
        outputs, inputs = parcel.outputs[:-1], parcel.inputs[:-1]
        reads = self._reads
        for p in self._parameters:
            assert p.extension is not None
            local = p.local if reads is None else reads.host.lifted(p.local)
            received, sent = p.extension.begin(local, self._comm.exchanges)
            outputs += received
            inputs += sent
        if reads is not None:
            reads.mark = reads.host.mark()
        parcel.nbytes = sum(t.nbytes for t in outputs)
        parcel.outputs = [*outputs, parcel.outputs[-1]]
        parcel.inputs = [*inputs, parcel.inputs[-1]]

    def end(self) -> None:
        """Does nothing; :meth:`finish` uses the gathered tensors."""

    def finish(self) -> None:
        """Make the full parameters, after the headers were checked."""
        for p in self._parameters:
            assert p.extension is not None
            full = p.extension.finish(p.local, p.full)
            if full is not None:
                p.adopt_full(full, self._on_gradient)
        if (adopted := self._adopted()) is not None:
            adopted()


class Gather:
    """A complete gather: stages, then one collective.

    Attributes:
        comm: the communicator of the collective that fills the slab.
        hops: the collectives before it, if shards are on several axes; they are stages, too.
        outputs, inputs: of the last collective, with the headers at the end.
        nbytes: bytes of the outputs, without headers.
        detail: a number that ranks compare: its high half for codec and user's collective, its low half for the
            parameters with ``fsdp_pre_all_gather``. A half is 0 if there are none.
        extend: the stage of these parameters.
    """

    def __init__(
        self,
        comm: Communicator,
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
        nbytes: int,
        stages: Iterable[Stage] = (),
        hops: Iterable[Hop] = (),
        detail: int = 0,
        extend: Extend | None = None,
    ) -> None:
        self.comm = comm
        self.hops = tuple(hops)
        self.nbytes = nbytes
        self.detail = detail
        header = torch.zeros(HEADER, dtype=torch.int64, device=comm.device).view(torch.uint8)
        if comm.group is None:
            outputs, inputs = widened(outputs, inputs)
        self.outputs = [*outputs, header]
        self.inputs = [*inputs, header]  # used until the unit has its place
        self._stages = tuple(stages)
        self.extend = extend
        #: Whether the shards of this rank alone are the full weights, so that nothing is copied.
        self._moves_nothing = comm.group is None and not outputs and not self._stages

    def address(self, header: torch.Tensor, headers: torch.Tensor) -> None:
        """Send ``header`` with each gather, and receive all ranks' in ``headers``; bytes of both."""
        self.inputs[-1], self.outputs[-1] = header, headers

    def begin(self, place: Place, epoch: int) -> Pending:
        """Issue the gather."""
        if self._moves_nothing:
            # The optimizer may still write to the shards, on a stream of the user's.
            return Pending(self.comm.streams, None, self.comm.streams.mark_of_events())
        outputs, inputs, nbytes, casts = self.outputs, self.inputs, self.nbytes, _NO_MOVES
        if self._stages:
            parcel = Parcel(self, place, epoch)
            for stage in self._stages:
                stage.begin(parcel)
            outputs, inputs, nbytes, casts = parcel.outputs, parcel.inputs, parcel.nbytes, parcel.casts
        announce = place.home.agreement.announce_gather(place.number, self.comm, nbytes, self.detail)
        if self.comm.group is None:  # one rank compares no headers
            outputs, inputs = outputs[:-1], inputs[:-1]
        return self.comm.all_gather(outputs, inputs, casts, None, announce)

    def end(self) -> None:
        """Called after the gather was waited for."""
        for stage in self._stages:
            stage.end()

    def drop(self) -> None:
        """Free the cached outer-axis gathers."""
        for hop in self.hops:
            hop.drop()

    @property
    def first(self) -> Communicator:
        """The communicator of the first collective."""
        return self.hops[0].comm if self.hops else self.comm


class _Pieces:
    """This rank's chunks for the first collective, as bytes, and the destinations of each rank's chunks."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.offsets: list[int] = []  #: offsets in the slab, in bytes
        self.sizes: list[int] = []  #: bytes of one rank's piece


def plan_gather(
    layout: UnitLayout,
    shards: list[torch.Tensor],
    cuts: list[Cut],
    slab: Slab,
    ranks: Ranks,
    transport: Transport,
    owner: Owner,
    reads: HostReads | None,
    extend: Extend | None,
    detail: int,
) -> Gather:
    """Make, once, every view that a gather needs: of the shards (or their cast), the slab and memory in between."""
    comms = [*ranks.once, *ranks.gathers] or [ranks.local]
    full = slab if comms[0].group is None else None
    pieces, upload, cast = _prepare(layout, shards, cuts, owner, ranks.device, reads is not None, full)
    comms, encoded = encoding_gathers(comms, layout, cuts, ranks, transport, owner)
    hops: list[Hop] = []
    inputs, sizes = pieces.tensors, pieces.sizes if encoded is None else [encoded]
    for i, comm in enumerate(comms[:-1]):
        sizes = [nbytes * comm.world_size for nbytes in sizes]
        between = Slab(sum(sizes), ranks.device, "outer gather", owner)
        between.lease()
        offsets = [0, *itertools.accumulate(sizes)][:-1]
        outputs = [between.byte_view(*place) for place in zip(offsets, sizes, strict=True)]
        between.release()
        hops.append(Hop(comm, inputs, outputs, between, i == len(ranks.once) - 1, detail))
        inputs = outputs
    sizes = [nbytes * layout.world_size for nbytes in pieces.sizes]
    outputs = [
        slab.landing_view(torch.uint8, offset, (nbytes,))
        for offset, nbytes in zip(pieces.offsets, sizes, strict=True)
    ]
    stages: list[Stage] = []
    if upload is not None and reads is not None:
        stages.append(Upload(*upload, reads, hops[0] if hops else None))
    if cast is not None:
        stages.append(CastShards(*cast))
    stages += hops
    if extend is not None:
        stages.append(extend)
    return Gather(comms[-1], outputs, inputs, slab.nbytes, stages, hops, detail, extend)


def _prepare(
    layout: UnitLayout,
    shards: list[torch.Tensor],
    cuts: list[Cut],
    owner: Owner,
    device: torch.device,
    offloaded: bool,
    full: Slab | None,
) -> tuple[_Pieces, tuple[Slab, Moves] | None, tuple[Slab | None, Moves] | None]:
    """The chunks to send, and the memory and copies of uploads and casts before.

    ``full``: the slab of the full weights, into which a rank alone casts. It sends no such chunk.
    """
    repacks = {i: cut for i, cut in enumerate(cuts) if cut.repacks}
    staged = [r for r in layout.runs if r.is_cast or (_repacked(r, repacks) and not r.in_place)]
    apart = staged if full is None else []
    cast = _room(apart, [r.compute_dtype for r in apart], device, "cast shard", owner)
    uploaded = [r for r in layout.runs if offloaded and not r.extended]
    upload = _room(uploaded, [r.storage_dtype for r in uploaded], device, "uploaded shard", owner)
    uploads: Moves = [], []
    casts: Moves = [], []
    pieces = _Pieces()
    cast_bytes = upload_bytes = 0
    payloads = iter(shards)
    for run in layout.runs:
        size = run.compute_dtype.itemsize
        for s in run.segments:
            payload = next(payloads)
            if run.extended or run.in_place or not s.chunk:
                continue
            if offloaded:
                offset = upload_bytes // run.storage_dtype.itemsize + s.shard_offset
                target = upload.view(run.storage_dtype, offset, (s.chunk,))
                uploads[0].append(target)
                uploads[1].append(payload)
                payload = target
            cut = repacks.get(s.members[0].index) if repacks else None
            if run.is_cast or cut is not None:
                if full is None:
                    target = cast.view(run.compute_dtype, cast_bytes // size + s.shard_offset, (s.chunk,))
                else:
                    offset = run.slab_bytes // size + s.slab_offset
                    target = full.landing_view(run.compute_dtype, offset, (s.chunk,))
                if cut is None:
                    casts[0].append(target)
                    casts[1].append(payload)
                else:
                    own = cut.local_view(payload, 0)
                    casts[0].extend([cut.packed_view(target, 0), target[own.numel() :]])
                    casts[1].extend([own, payload[own.numel() :]])  # also copy the padding
                if full is not None:
                    continue
                payload = target
            pieces.tensors.append(payload.view(torch.uint8))
            pieces.offsets.append(run.slab_bytes + s.slab_offset * size)
            pieces.sizes.append(s.chunk * size)
        if run in staged:
            cast_bytes += run.shard_numel * size
        upload_bytes += run.shard_numel * run.storage_dtype.itemsize if not run.extended else 0
    cast.release()
    upload.release()
    room = None if full is not None else cast
    return pieces, (upload, uploads) if uploads[0] else None, (room, casts) if casts[0] else None


def _repacked(run: Run, repacks: dict[int, Cut]) -> bool:
    return any(m.index in repacks for s in run.segments for m in s.members)


def _room(runs: list[Run], dtypes: list[torch.dtype], device: torch.device, kind: str, owner: Owner) -> Slab:
    """Leased memory for this rank's chunks of some runs, in some dtypes."""
    numels = [r.shard_numel * dtype.itemsize for r, dtype in zip(runs, dtypes, strict=True)]
    slab = Slab(sum(numels), device, kind, owner)
    slab.lease()
    return slab


class SecondaryShard:
    """``reshard_after_forward=k``: one k-th of the full weights, kept after forward for the gather of backward.

    The gather of backward runs among k neighbouring ranks, say the ranks of one host, instead of all. ZeRO++ calls the
    kept part the secondary partition (https://arxiv.org/abs/2306.10209, section 3.2).

    Attributes:
        gather: the gather among the neighbours.
        epoch: the epoch of the kept weights.
        slab: memory of this rank's part.
    """

    def __init__(self, comm: Communicator, full: list[torch.Tensor], weights: Slab, owner: Owner) -> None:
        """``full``: where a gather writes the full weights, as bytes, whose memory is that of ``weights``."""
        sizes = [t.numel() // comm.world_size for t in full]
        self._sources = [
            weights.byte_view(int(t.storage_offset()) + comm.rank * size, size)
            for t, size in zip(full, sizes, strict=True)
        ]
        self.slab = Slab(sum(sizes), full[0].device, "secondary shard", owner)
        self.slab.lease()
        ends = list(itertools.accumulate(sizes))
        self._parts = [self.slab.byte_view(end - size, size) for end, size in zip(ends, sizes, strict=True)]
        self.slab.release()
        self._copies = widened(self._parts, self._sources)
        self.gather = Gather(comm, full, self._parts, weights.nbytes)
        self._header = torch.zeros(HEADER, dtype=torch.int64, device=comm.device).view(torch.uint8)
        self.epoch = NEVER

    def address(self, headers: torch.Tensor, ranks: list[int]) -> None:
        """Receive each neighbour's header in its place among the headers of ``ranks``; bytes."""
        comm, size = self.gather.comm, self._header.numel()
        first = ranks.index(comm.ranks[0])
        self.gather.address(self._header, headers.narrow(0, first * size, comm.world_size * size))

    def keep(self, epoch: int, header: torch.Tensor) -> None:
        """Copy this rank's part of the full weights, which must be gathered, and the headers of their gather."""
        self.slab.lease()
        foreach_copy_(*self._copies)
        self._header.copy_(header)
        self.epoch = epoch

    def drop(self) -> None:
        self.epoch = NEVER
        self.slab.release()
