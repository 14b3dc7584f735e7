"""The gradients of one packing, through one backward after another: pack, reduce, accumulate, hand over.

There is one :class:`Reduction` per reduce dtype of a unit. It reduces with one collective per mesh axis. The room
``model`` decides when.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from shardwright.engine import heartbeat
from shardwright.engine.base.home import Announcer
from shardwright.engine.base.offload import Host
from shardwright.engine.comm import Communicator, Division, GradientHook, Pending, plan_division
from shardwright.engine.gradients.carried import carriers
from shardwright.engine.gradients.delivery import OnDevice, OnHost, Result
from shardwright.engine.gradients.packer import Packer
from shardwright.engine.layout import Packing, UnitLayout
from shardwright.engine.memory import Owner, Slab
from shardwright.engine.tensors.parameter import ManagedParameter
from shardwright.engine.tensors.ranks import Ranks


class Sum:
    """A sum of gradients that is not delivered yet, and which parameters had gradients."""

    __slots__ = ("present", "value")

    def __init__(self, parameters: int) -> None:
        self.value: torch.Tensor | None = None
        self.present = [False] * parameters

    def add(self, value: torch.Tensor, present: list[bool] | None) -> None:
        """Set the sum to ``value``, or add ``value`` to it. ``present`` None means all parameters."""
        self.value = value if self.value is None else self.value.add_(value)
        self.present = [before or (present is None or present[i]) for i, before in enumerate(self.present)]

    def take(self, other: Sum) -> None:
        """Add another sum, which is not used afterwards."""
        if other.value is not None:
            self.add(other.value, other.present)

    def forget(self) -> None:
        self.value, self.present = None, [False] * len(self.present)

    def with_present(self, present: list[bool] | None) -> list[bool] | None:
        """The parameters that have gradients in this sum or in another; None means all."""
        if present is None:
            return None
        both = [a or b for a, b in zip(present, self.present, strict=True)]
        return None if all(both) else both


class Flight:
    """A reduction from its start to its end.

    Attributes:
        todo: the communicators of the remaining collectives.
        value: the result so far.
        output: the memory of the final result; None: the result is a sum that the ranks that shard gradients hold.
        present: which parameters have gradients; None: all.
        fresh: whether no parameter had a gradient when it began.
        pending: the last collective.
        comm: its communicator.
    """

    __slots__ = (
        "_merged",
        "announcer",
        "comm",
        "division",
        "fresh",
        "output",
        "pending",
        "present",
        "todo",
        "value",
    )

    def __init__(
        self,
        announcer: Announcer,
        division: Division,
        todo: list[Communicator],
        value: torch.Tensor,
        present: list[bool] | None,
        output: torch.Tensor | None,
        fresh: bool,
    ) -> None:
        self.announcer = announcer
        self.division = division
        self.todo = todo
        self.value = value
        self.present = present
        self.output = output
        self.fresh = fresh
        self.pending: Pending | None = None
        self.comm: Communicator | None = None
        #: Sums that were added to it, with their earlier values. If it fails, the unit holds them again.
        self._merged: list[tuple[Sum, torch.Tensor, list[bool]]] = []

    def merge(self, earlier: Sum, value: torch.Tensor) -> None:
        """Add the sum that was held before to ``value``, which is the result so far, or becomes it."""
        if earlier.value is not None:
            value.view(-1).add_(earlier.value.view(-1))
            self.present = earlier.with_present(self.present)
            self._merged.append((earlier, earlier.value, earlier.present))
            earlier.forget()

    def fail(self) -> None:
        """Wait for the running collective, and hold the earlier sums again."""
        if self.pending is not None:
            self.pending.drop()
        for earlier, value, present in self._merged:
            earlier.value, earlier.present = value, present


class _Packed:
    """The memory into which gradients are packed: a leased slab.

    Attributes:
        slab: the memory.
        rows: its content, a row for each rank; one row if parameters share segments.
        flat: the same, [ranks * elements].
        tensors: the tensors to reduce in it.
    """

    def __init__(self, packing: Packing, ranks: Ranks, owner: Owner) -> None:
        numel, dtype = ranks.parts * packing.numel, packing.reduce_dtype
        self.slab = slab = Slab(numel * dtype.itemsize, ranks.device, "reduction", owner)
        slab.lease()
        self.rows = slab.view(dtype, 0, (1, numel) if packing.shared else (ranks.parts, packing.numel))
        self.flat = slab.view(dtype, 0, (numel,))
        self.tensors = _split(self.flat, packing)
        slab.release()


class Reduction:
    """The reductions of one packing. See the module's docstring.

    Attributes:
        packing: the gradients and their places.
        fingerprint: a number that differs for different parameters, even at equal sizes; equal on every rank.
        retired: whether requires_grad has changed since, so that only held sums are reduced here.
        delivery: where results go.
    """

    def __init__(
        self,
        packing: Packing,
        layout: UnitLayout,
        parameters: Sequence[ManagedParameter],
        ranks: Ranks,
        owner: Owner,
        hook: GradientHook | None = None,
        unit: str = "",
        host: Host | None = None,
    ) -> None:
        self.packing = packing
        self._ranks = ranks
        self._owner = owner
        self._packer = packer = Packer(packing, layout, parameters, ranks)
        self.delivery = OnDevice(packer, ranks, owner) if host is None else OnHost(packer, ranks, owner, host)
        self.fingerprint = hash(tuple(part.index for part in packing.parts)) % (1 << 31)
        self.retired = False
        self._packed = _Packed(packing, ranks, owner)
        self._whole_gradients = Sum(len(packing.parts))  #: whole gradients that are not reduced yet
        #: Sums over the ranks that shard gradients, not yet over the others.
        self._partial = Sum(len(packing.parts))
        self._way = [*ranks.scatters, *ranks.late, *ranks.replicas]
        self._carriers = carriers(hook, unit, packing, self.fingerprint, layout.specs, ranks)
        self._flight: Flight | None = None

    # -- what is held --------------------------------------------------------------------------------------------

    def has_gradients(self) -> bool:
        """Whether a full gradient waits."""
        return self._packer.has_gradients()

    def hold(self) -> None:
        """Keep this micro-batch's gradients, full and in the dtype of such sums, without communication."""
        tensors, present = self._packer.take()
        dtype = self.packing.held_dtype
        if self._whole_gradients.value is not None:
            dtype = torch.promote_types(dtype, self._packer.dtype)  # rounded once, after the addition
        packed = torch.empty(self._packed.rows.shape, dtype=dtype, device=self._ranks.device)
        self._packer.pack(tensors, packed)
        self._whole_gradients.add(packed, present)

    def take_held(self, other: Reduction) -> None:
        """Also hold the sums of ``other``, which has the same packing."""
        self._whole_gradients.take(other._whole_gradients)
        self._partial.take(other._partial)

    def leave_out(self, ids: set[int]) -> None:
        """Take the parameters with these ids of their sharded forms out of the sums of earlier micro-batches."""
        places = [i for i, (p, _) in enumerate(self._packer.pairs()) if id(p.sharded) in ids]
        whole, partial = self._whole_gradients, self._partial
        if not places:
            return
        if whole.value is not None:
            whole.value.masked_fill_(self._packer.mask_of(places, whole.value), 0)
        if partial.value is not None:
            if partial.value.numel() != self.packing.numel:
                raise RuntimeError(
                    f"Gradients of some parameters of unit {self._owner.name!r} were dropped while sums over some "
                    "ranks are held for all of them. Drop the gradients of all, with zero_grad of the model."
                )
            for i, (p, part) in enumerate(self._packer.pairs()):
                if i in places:
                    p.cut.packed_view(partial.value, part.offset).zero_()
                    partial.value.view(-1).narrow(0, self.packing.flags + i, 1).zero_()
        for sums in (whole, partial):
            sums.present = [there and i not in places for i, there in enumerate(sums.present)]

    def drop_held(self) -> None:
        """Drop the sums of earlier micro-batches."""
        self._whole_gradients.forget()
        self._partial.forget()

    # -- reduce --------------------------------------------------------------------------------------------------

    def start(
        self, last: bool, factor: float | None, force_sum: bool, announcer: Announcer, fill: bool = False
    ) -> None:
        """Pack and issue the first collective. :meth:`go_on` issues the others, :meth:`finish` delivers the result.

        ``last`` False: the ranks that shard gradients hold the sum until a later call with True, or
        :meth:`start_late`. ``fill``: parameters without a gradient get a gradient of zero.
        """
        ranks, numel = self._ranks, self.packing.numel
        output, fresh = self.delivery.target() if last else (None, False)
        tensors, present = self._packer.take(fill and not self.retired)
        if ranks.parts > 1:
            self._packed.slab.lease()
            value, packed = self._packed.flat, self._packed.rows
        else:
            value = self._new(numel) if output is None else output
            packed = value.view(1, numel)
        total = packed if self._whole_gradients.value is None else self._room_for_sum(packed)
        self._packer.pack(tensors, total)
        tensors.clear()
        todo = self._way[:] if last else ranks.scatters[:]
        division = self._division(factor, force_sum)
        flight = self._flight = Flight(announcer, division, todo, value, present, output, fresh)
        flight.merge(self._whole_gradients, total)
        if total is not packed:
            packed.copy_(total)
        if flight.todo:
            self._next(flight, None)
        else:
            _scale(flight.value, flight.division)

    def _room_for_sum(self, packed: torch.Tensor) -> torch.Tensor:
        """Memory in which held sums and gradients are added: wider than ``packed`` if gradients are, to round once."""
        if torch.promote_types(self._packer.dtype, packed.dtype) == packed.dtype:
            return packed
        dtype = torch.promote_types(self._packer.dtype, self.packing.held_dtype)
        return packed.new_empty(packed.shape, dtype=dtype)

    def start_late(self, factor: float | None, force_sum: bool, announcer: Announcer) -> None:
        """Issue the remaining collectives for sums that the ranks that shard gradients hold."""
        output, fresh = self.delivery.target()
        present = [False] * len(self.packing.parts)
        late = math.prod(c.world_size for c in self._ranks.late)
        value = (output if late == 1 else self._new(late * self.packing.numel)).zero_()
        todo = [*self._ranks.late, *self._ranks.replicas]
        division = self._division(factor, force_sum)
        flight = self._flight = Flight(announcer, division, todo, value, present, output, fresh)
        flight.merge(self._partial, flight.value)
        self._next(flight, None)

    def _division(self, factor: float | None, force_sum: bool) -> Division:
        one_by_one = len(self._way) != 1
        return plan_division(self.packing.reduce_dtype, self._ranks.size, factor, force_sum or one_by_one)

    def _new(self, numel: int) -> torch.Tensor:
        return torch.empty(numel, dtype=self.packing.reduce_dtype, device=self._ranks.device)

    def _next(self, flight: Flight, after: Pending | None) -> None:
        """Issue the next collective, after another one, or after the computation so far."""
        comm = flight.comm = flight.todo.pop(0)
        beat = heartbeat.current
        if beat is None:
            self._issue(flight, comm, after)
            return
        beat.enter(self._kind(comm), comm.name, flight.value.nbytes, self._owner.name)
        try:
            self._issue(flight, comm, after)
        finally:
            beat.leave()

    def _kind(self, comm: Communicator) -> str:
        return "all-reduce" if comm in self._ranks.replicas else "reduce-scatter"

    def _wait(self, flight: Flight, pending: Pending) -> None:
        """Wait for the last collective."""
        beat, comm = heartbeat.current, flight.comm
        if beat is None or comm is None:
            pending.wait()
            return
        beat.await_result(self._kind(comm), comm.name, flight.value.nbytes, self._owner.name)
        try:
            pending.wait()
        finally:
            beat.leave()

    def _issue(self, flight: Flight, comm: Communicator, after: Pending | None) -> None:
        value, whole = flight.value, flight.division
        announce = flight.announcer(comm, value.numel() * value.element_size())
        division = whole
        if len(self._way) > 1:
            division = Division(
                whole.average,
                whole.before if comm is self._way[0] else 1.0,
                whole.after if comm is self._way[-1] else 1.0,
            )
        carrier = self._carriers.get(comm)
        if comm in self._ranks.replicas:
            if carrier is not None:
                flight.pending = carrier.run([value], value, division, announce, after)
            else:
                flight.pending = comm.all_reduce(value, division, announce, after)
            return
        rest = value.numel() // comm.world_size
        output = flight.output
        into = output if output is not None and rest == self.packing.numel else self._new(rest)
        flight.value = into
        outputs, inputs = self._tensors(into), self._tensors(value)
        if carrier is not None:
            flight.pending = carrier.run(inputs, into, division, announce, after)
            return
        flight.pending = comm.reduce_scatter(outputs, inputs, division, announce, after)

    def _tensors(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The tensors to reduce, as views of their memory."""
        if flat is self._packed.flat:
            return self._packed.tensors
        if len(self.packing.chunks) == 1:
            return [flat]
        return self.delivery.tensors_of(flat) or _split(flat, self.packing)

    @property
    def goes_on(self) -> bool:
        """Whether collectives are left to issue."""
        return self._flight is not None and bool(self._flight.todo)

    def go_on(self) -> None:
        """Issue the remaining collectives. The first collective should have ended by now."""
        flight = self._flight
        while flight is not None and flight.todo:
            assert flight.pending is not None
            self._wait(flight, flight.pending)
            self._packed.slab.release()
            after: Pending | None = flight.pending
            if flight.todo[0] not in self._ranks.scatters and self._partial.value is not None:
                flight.merge(self._partial, flight.value)
                after = None  # the next collective comes after the addition
            self._next(flight, after)

    def collect(self) -> None:
        """Sum what has arrived, if the collective has ended, so that its buffers are free before :meth:`finish`."""
        flight = self._flight
        if flight is not None and flight.pending is not None:
            flight.pending.collect()

    def finish(self, hook: Callable[[torch.Tensor], None] | None = None) -> None:
        """Order the computation after the reduction, and deliver the result to ``.grad`` or to the held sums."""
        flight = self._flight
        if flight is None:
            return
        self.go_on()
        mark = None
        if flight.pending is not None:
            mark = flight.pending.mark
            self._wait(flight, flight.pending)
        self._flight = None
        self._packed.slab.release()
        if flight.output is None:
            self._partial.add(flight.value.view(-1).to(self.packing.held_dtype), flight.present)
        else:
            self.delivery.deliver(Result(flight.output, flight.present, flight.fresh, hook, mark))

    def discard(self) -> None:
        """Drop a failed backward's full gradients and the result of its running reduction, but no earlier sums."""
        self._packer.drop()
        flight, self._flight = self._flight, None
        if flight is not None:
            flight.fail()
        self._packed.slab.release()
        self.delivery.discard()

    def release_unused(self) -> None:
        """Release the gradients' memory when every ``.grad`` is None again."""
        if self._flight is None:
            self.delivery.release_unused()


def _split(flat: torch.Tensor, packing: Packing) -> list[torch.Tensor]:
    """Each chunk of a packed tensor, as a view."""
    parts = flat.numel() // packing.numel
    return list(flat.split([chunk * parts for chunk in packing.chunks]))


def _scale(tensor: torch.Tensor, division: Division) -> None:
    """The division of a reduction on a single rank."""
    divisor = division.before * division.after
    if divisor != 1.0:
        tensor.div_(divisor)
