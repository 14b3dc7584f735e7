"""From autograd's full gradients to each rank's sharded ``.grad``: pack, reduce, accumulate, hand over.

One :class:`Reduction` per reduce dtype of a unit. It packs rank-major in the single pass that casts, reduces with one
collective, and shows the result as DTensors made once. It does not decide when to reduce; the unit does.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Sequence

import torch
from torch.distributed.tensor import DTensor

from shardwright._torch import (
    chunk_cat,
    gradient_hooks,
    local_of,
    post_accumulate_grad_hooks,
    quick_attributes,
    storage_use_count,
)
from shardwright.comm import Communicator, Division, GradientHook, Pending, plan_division
from shardwright.engine.carried import carriers
from shardwright.engine.parameter import ManagedParameter
from shardwright.engine.ragged import RaggedTensor
from shardwright.engine.ranks import Ranks
from shardwright.engine.summed import only_cut
from shardwright.layout import GradientPart, Packing, UnitLayout
from shardwright.memory import Owner, Slab


class GradientShard:
    """Memory for this rank's gradients of one packing, and the DTensors over it, made once.

    A user may keep ``p.grad`` beyond ``zero_grad``. Then the memory is theirs: :meth:`exclusive` says so, and the
    owner makes a new object instead of writing into this one.
    """

    def __init__(
        self,
        packing: Packing,
        parameters: Sequence[ManagedParameter],
        device: torch.device,
        owner: Owner,
        make_slab: Callable[[int], Slab] | None = None,
    ) -> None:
        self.slabs: list[Slab] = []
        self.flats: list[torch.Tensor] = []
        #: Whether the collective can write here without a cast.
        self.direct = len(packing.spans) == 1 and packing.spans[0].grad_dtype == packing.reduce_dtype
        #: Numbers of the parameters whose gradients are reduced in another order than they lie here.
        self.repacked = [i for i, p in enumerate(parameters) if p.cut.repacks]
        self.direct = self.direct and not self.repacked
        for span in packing.spans:
            numel = packing.numel if self.direct else span.stop - span.start
            nbytes = numel * span.grad_dtype.itemsize
            slab = make_slab(nbytes) if make_slab is not None else Slab(nbytes, device, "gradients", owner)
            slab.lease()
            self.slabs.append(slab)
            self.flats.append(slab.view(span.grad_dtype, 0, (numel,), (1,)))
        #: What a coalesced collective writes.
        self.tensors = list(self.flats[0].split(packing.chunks)) if self.direct and packing.shared else []
        self.locals: list[torch.Tensor] = []
        self.dtensors: list[DTensor] = []
        with torch.no_grad():
            for part, parameter in zip(packing.parts, parameters, strict=True):
                offset = part.offset - packing.spans[part.span].start
                view = parameter.cut.local_view(self.flats[part.span], offset)
                self.dtensors.append(parameter.cut.wrap(view))
                self.locals.append(local_of(self.dtensors[-1]))
        del view
        self._alone = [storage_use_count(flat.untyped_storage()) for flat in self.flats]

    def lease(self) -> None:
        for slab in self.slabs:
            slab.lease()

    def release(self) -> None:
        for slab in self.slabs:
            slab.release()

    @property
    def leased(self) -> bool:
        return self.slabs[0].leased

    def intact(self) -> bool:
        """Whether the DTensors are still over this memory: a conversion of a module exchanges what is inside them."""
        return not any(map(operator.is_not, map(local_of, self.dtensors), self.locals))

    def exclusive(self) -> bool:
        """Whether nobody but the engine and ``p.grad`` refers to these gradients or to their memory.

        A Python reference shows in the count of the object, a view in the count of the storage.
        """
        if not self.intact():
            return False
        # getrefcount sees: the list, the loop variable, its own argument (and, for a local, the DTensor around it).
        for dtensor in self.dtensors:
            if sys.getrefcount(dtensor) > 3:
                return False
        for local in self.locals:
            if sys.getrefcount(local) > 4:
                return False
        counts = [storage_use_count(flat.untyped_storage()) for flat in self.flats]
        return counts == self._alone


class Sum:
    """Gradients that were added up and are not handed over yet, and for which parameters there were any."""

    def __init__(self, parameters: int) -> None:
        self.value: torch.Tensor | None = None
        self._present = [False] * parameters

    def add(self, value: torch.Tensor, present: list[bool] | None) -> None:
        """``value`` becomes the sum, or is added to it; ``present`` None means all parameters."""
        self.value = value if self.value is None else self.value.add_(value)
        self._present = [before or (present is None or present[i]) for i, before in enumerate(self._present)]

    def take(self, other: Sum) -> None:
        if other.value is not None:
            self.add(other.value, other._present)

    def with_present(self, present: list[bool] | None) -> list[bool] | None:
        """For which parameters there are gradients in this and in another sum; None means all."""
        if present is None:
            return None
        both = [a or b for a, b in zip(present, self._present, strict=True)]
        return None if all(both) else both


#: What is packed: the number of a parameter, zeros, or numbers and offsets of 0-d parameters and the room they take.
Item = int | torch.Tensor | tuple[tuple[tuple[int, int], ...], int]
#: Given a communicator and the bytes sent: what to call before the collective.
Announcer = Callable[[Communicator, int], "Callable[[], None] | None"]


_zeros: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}


def _shared_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """To be read only: one memory for all units, or every unit would keep its padding of all ranks at rest."""
    numel = math.prod(shape)
    if (dtype, device) not in _zeros or _zeros[dtype, device].numel() < numel:
        _zeros[dtype, device] = torch.zeros(numel, dtype=dtype, device=device)
    return _zeros[dtype, device][:numel].view(shape)


class Reduction:
    """The gradients of one packing, through one backward after another."""

    def __init__(
        self,
        packing: Packing,
        layout: UnitLayout,
        parameters: Sequence[ManagedParameter],
        ranks: Ranks,
        owner: Owner,
        hook: GradientHook | None = None,
        unit: str = "",
    ) -> None:
        self.packing = packing
        self._parameters = [parameters[part.index] for part in packing.parts]
        self._shardeds = [p.sharded for p in self._parameters]
        self._ranks = ranks
        self._owner = owner
        n, device = ranks.parts, ranks.device
        # _chunk_cat wants one input dtype. Gradients come in the parameters' compute dtypes; where those differ,
        # each gradient is cast on its own before.
        dtypes = {layout.specs[part.index].compute_dtype for part in packing.parts}
        self._input_dtype = dtypes.pop() if len(dtypes) == 1 else None
        dtype = self._input_dtype or packing.reduce_dtype
        self._flags = torch.zeros(n, packing.flag_slots, dtype=dtype, device=device)
        self._flags[:, : len(packing.parts)] = 1
        self._items = self._plan_items(dtype)
        #: Whether gradients are packed as they are.
        self._plain = bool(packing.shared) or all(
            p.spec.is_natural and p.spec.shape and part.chunk for p, part in self._pairs()
        )
        self.nbytes = n * packing.numel * packing.reduce_dtype.itemsize
        #: Tells packings of equal size and different parameters apart; the same number on every rank.
        self.fingerprint = hash(tuple(part.index for part in packing.parts)) % (1 << 31)
        self.retired = (
            False  #: whether requires_grad changed since, so that only what is held comes through here
        )
        self._shard: GradientShard | None = None
        self._packed = Slab(n * packing.numel * packing.reduce_dtype.itemsize, device, "reduction", owner)
        self._packed.lease()
        shape = (1, n * packing.numel) if packing.shared else (n, packing.numel)
        self._packed_view = self._packed.view(packing.reduce_dtype, 0, shape)
        self._packed_flat = self._packed.view(packing.reduce_dtype, 0, (n * packing.numel,))
        #: What is reduced to be added to gradients that there are.
        self._sum = Slab(packing.numel * packing.reduce_dtype.itemsize, device, "sum", owner)
        self._sum.lease()
        self._sum_flat = self._sum.view(packing.reduce_dtype, 0, (packing.numel,))
        self._sum.release()
        self._packed_tensors: list[torch.Tensor] = []
        self._packed_tensors = self._tensors(self._packed_flat)
        self._packed.release()
        self._held = Sum(len(packing.parts))  #: whole gradients that were not reduced
        self._partial = Sum(
            len(packing.parts)
        )  #: sums over the ranks that shard gradients, not yet over the others
        #: What was held and is in the reduction under way, until that has succeeded, by the attribute it was in.
        self._merged: dict[str, Sum] = {}
        self._way = [*ranks.scatters, *ranks.late, *ranks.replicas]
        self._carriers = carriers(hook, unit, packing, self.fingerprint, layout.specs, ranks)
        self._pending: Pending | None = None
        self._todo: list[Communicator] = []  #: over which the reduction under way is to go on
        self._division = Division()
        self._announcer: Announcer = (
            _nothing  # refers to the unit while a reduction is under way, and then no more
        )
        self._last = True
        self._value = self._flags  #: the result so far
        self._output: torch.Tensor | None = None  #: where it is to end
        self._present: list[bool] | None = None
        self._fresh = False

    def _pairs(self) -> list[tuple[ManagedParameter, GradientPart]]:
        return list(zip(self._parameters, self.packing.parts, strict=True))

    # -- pack ----------------------------------------------------------------------------------------------------

    def _take(self, fill: bool = False) -> tuple[list[torch.Tensor], list[bool] | None]:
        """Take the full gradients off the parameters, in packing order; and which there are, None meaning all.

        ``fill``: unused parameters count as having gradients of zero.
        """
        with quick_attributes():
            gradients, present = self._take_gradients(fill)
        tensors = [
            gradients[item] if type(item) is int else self._packed_item(item, gradients)
            for item in self._items
        ]
        flags = self._flags
        if present is not None:
            flags = flags.clone()
            flags[:, [i for i, there in enumerate(present) if not there]] = 0
        tensors.append(flags)
        return tensors, present

    def _take_gradients(self, fill: bool) -> tuple[list[torch.Tensor], list[bool] | None]:
        gradients: list[torch.Tensor] = []
        present: list[bool] | None = None
        dtype, n = self._input_dtype, self._ranks.parts
        for i, parameter in enumerate(self._parameters):
            full = parameter.full
            gradient = full.grad
            full.grad = None
            # Not what was frozen since forward, as autograd does.
            if gradient is None or not self._shardeds[i].requires_grad:
                if not (fill and self._shardeds[i].requires_grad):
                    if present is None:
                        present = [True] * len(self._parameters)
                    present[i] = False
                shape = parameter.spec.shape
                gradient = torch.zeros(shape, dtype=self._flags.dtype, device=self._flags.device)
            else:
                if parameter.view is not full:
                    gradient = parameter.cut.parallel.gradient(gradient, self.packing.reduce_dtype)  # type: ignore[union-attr]
                if gradient.dtype != dtype:
                    gradient = gradient.to(self._flags.dtype)
            if not self._plain:
                spec = parameter.spec
                gradient = gradient.expand(n, 1) if spec.replicated else gradient.permute(spec.order)
            gradients.append(gradient)
        return gradients, present

    def _plan_items(self, dtype: torch.dtype) -> list[Item]:
        """What is packed behind one another: numbers of parameters, zeros, and 0-d parameters that share a segment."""
        n, device, packing = self._ranks.parts, self._ranks.device, self.packing
        items: list[Item] = []

        def zeros(*shape: int) -> None:
            if 0 not in shape:
                items.append(_shared_zeros(shape, dtype, device))

        if not packing.shared:
            for i, part in enumerate(packing.parts):
                if part.chunk:
                    items.append(i)
                zeros(n, part.gap)
            return items
        places = {part.index: i for i, part in enumerate(packing.parts)}
        for segment in packing.shared:
            if segment.replicated:
                numbers = tuple((places.get(m.index, -1), m.offset) for m in segment.members)
                items.append((numbers, segment.chunk))
                continue
            end = 0
            for member in sorted(segment.members, key=lambda m: m.offset):
                zeros(member.offset - end)
                if member.index not in places:
                    zeros(member.numel)
                elif member.numel:
                    items.append(places[member.index])
                end = member.stop
            zeros(n * segment.chunk - end)
        return items

    def _packed_item(self, item: Item, gradients: list[torch.Tensor]) -> torch.Tensor:
        if isinstance(item, torch.Tensor):
            return item
        places, chunk = item  # type: ignore[misc]
        row = self._flags.new_zeros(chunk)
        for place, offset in places:
            if place >= 0:
                row[offset] = gradients[place]
        return row.expand(self._ranks.parts, chunk)

    def _pack(self, tensors: list[torch.Tensor], out: torch.Tensor) -> None:
        """One pass that casts and copies: rank-major, a row for each, or one segment after another, all in one row."""
        chunk_cat(tensors, 0, 1 if self.packing.shared else self._ranks.parts, out=out)

    def has_gradients(self) -> bool:
        """Whether a full gradient waits."""
        with quick_attributes():
            return any([p.full.grad is not None for p in self._parameters])

    def hold(self) -> None:
        """Keep this micro-batch's gradients, full and in the dtype of such sums, without communication."""
        tensors, present = self._take()
        device = self._ranks.device
        packed = torch.empty(self._packed_view.shape, dtype=self.packing.held_dtype, device=device)
        self._pack(tensors, packed)
        self._held.add(packed, present)

    def discard(self) -> None:
        """Forget a backward that failed: its full gradients and a pending reduction's result, not what came before."""
        for parameter in self._parameters:
            parameter.full.grad = None
        if self._pending is not None:
            self._pending.drop()
            self._pending = self._output = None
            self._announcer = _nothing
            self._todo.clear()
            self._packed.release()
            self._sum.release()
        for name, held in self._merged.items():
            setattr(self, name, held)
        self._merged.clear()

    def take_held(self, other: Reduction) -> None:
        """Hold what ``other``, of the same packing, held, too."""
        self._held.take(other._held)
        self._partial.take(other._partial)

    def drop_held(self) -> None:
        """Forget the sums of earlier micro-batches."""
        self._held, self._partial = (Sum(len(self._parameters)) for _ in range(2))

    def _merge(self, name: str) -> None:
        """Add to the result what was held before."""
        held: Sum = getattr(self, name)
        if held.value is not None:
            self._value.view(-1).add_(held.value.view(-1))
            self._present = held.with_present(self._present)
            self._merged[name] = held
            setattr(self, name, Sum(len(self._parameters)))

    # -- reduce --------------------------------------------------------------------------------------------------

    def start(
        self, last: bool, factor: float | None, force_sum: bool, announcer: Announcer, fill: bool = False
    ) -> None:
        """Pack and issue the first collective. :meth:`go_on` issues the others, :meth:`finish` hands over the result.

        ``last`` False: the sum stays with the ranks that shard gradients until a later call with True, or
        :meth:`start_late`. ``fill``: parameters without a gradient get one of zero.
        """
        ranks, numel = self._ranks, self.packing.numel
        self._begin(last, factor, force_sum, announcer)
        tensors, self._present = self._take(fill and not self.retired)
        if ranks.parts > 1:
            self._packed.lease()
            self._value = self._packed_flat
            self._pack(tensors, self._packed_view)
        else:
            self._value = self._new(numel) if self._output is None else self._output
            self._pack(tensors, self._value.view(1, numel))
        tensors.clear()
        self._merge("_held")
        self._todo = self._way[:] if last else ranks.scatters[:]
        if self._todo:
            self._next(None)
        else:
            _scale(self._value, self._division)

    def start_late(self, factor: float | None, force_sum: bool, announcer: Announcer) -> None:
        """The rest of the way for what the ranks that shard gradients have summed up already."""
        self._begin(True, factor, force_sum, announcer)
        self._todo = [*self._ranks.late, *self._ranks.replicas]
        self._present = [False] * len(self._parameters)
        late = math.prod(c.world_size for c in self._ranks.late)
        assert self._output is not None
        self._value = (self._output if late == 1 else self._new(late * self.packing.numel)).zero_()
        self._merge("_partial")
        self._next(None)

    def _begin(self, last: bool, factor: float | None, force_sum: bool, announcer: Announcer) -> None:
        size, dtype = self._ranks.size, self.packing.reduce_dtype
        self._last, self._announcer = last, announcer
        self._division = plan_division(dtype, size, factor, force_sum or len(self._way) != 1)
        self._pending = Pending(self._ranks.local.streams, None, None)
        self._output = None
        if last:
            self._fresh = self._has_no_gradients()
            shard = self._fresh_shard() if self._fresh else None
            direct = shard is not None and shard.direct
            if shard is not None and direct:
                self._output = shard.flats[0]
            else:
                self._sum.lease()
                self._output = self._sum_flat

    def _new(self, numel: int) -> torch.Tensor:
        return torch.empty(numel, dtype=self.packing.reduce_dtype, device=self._ranks.device)

    def _next(self, after: Pending | None) -> None:
        """Issue the next collective of the way, after another, or after the computation so far."""
        comm, value, whole = self._todo.pop(0), self._value, self._division
        announce = self._announcer(comm, value.numel() * value.element_size())
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
                self._pending = carrier.run([value], value, division, announce, after)
            else:
                self._pending = comm.all_reduce(value, division, announce, after)
            return
        rest = value.numel() // comm.world_size
        into = self._output if self._output is not None and rest == self.packing.numel else self._new(rest)
        self._value = into
        outputs, inputs = self._tensors(into), self._tensors(value)
        if carrier is not None:
            self._pending = carrier.run(inputs, into, division, announce, after)
            return
        self._pending = comm.reduce_scatter(outputs, inputs, division, announce, after)

    def _tensors(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The tensors that are reduced, as views of their memory, for however many parts that holds."""
        chunks = self.packing.chunks
        if len(chunks) == 1:
            return [flat]
        if flat is self._packed_flat and self._packed_tensors:
            return self._packed_tensors
        if self._shard is not None and flat is self._shard.flats[0]:
            return self._shard.tensors
        parts = flat.numel() // self.packing.numel
        return list(flat.split([chunk * parts for chunk in chunks]))

    def go_on(self) -> None:
        """Issue the rest of the way: the first collective is to be done by now."""
        while self._todo:
            assert self._pending is not None
            self._pending.wait()
            self._packed.release()
            after: Pending | None = self._pending
            if self._todo[0] not in self._ranks.scatters and self._partial.value is not None:
                self._merge("_partial")
                after = None  # but after the addition
            self._next(after)

    @property
    def goes_on(self) -> bool:
        """Whether collectives are left to issue."""
        return bool(self._todo)

    def finish(self, hook: Callable[[torch.Tensor], None] | None = None) -> None:
        """Order the computation after the reduction and set or add to every used parameter's ``.grad``."""
        if self._pending is None:
            return
        self.go_on()
        self._pending.wait()
        self._pending, self._announcer = None, _nothing
        self._merged.clear()
        self._packed.release()
        output, self._output = self._output, None
        if output is None:
            self._partial.add(self._value.view(-1).to(self.packing.held_dtype), self._present)
            return
        try:
            self._deliver(output, hook)
        finally:
            self._value = self._flags
            self._release_sum()

    def _release_sum(self) -> None:
        self._sum.release()

    def _deliver(self, output: torch.Tensor, hook: Callable[[torch.Tensor], None] | None) -> None:
        if hook is not None:
            hook(output[: self.packing.flags])
        used: list[bool] | None = None
        if self._present is not None:
            # Only a rank that lacks a gradient has to look at what the others had; the host waits for it.
            if self._ranks.local.streams.capturing:
                raise RuntimeError(
                    "some parameters have no gradient on this rank, and whether others have one is not known before it "
                    "has run; freeze them with requires_grad_(False), or let every parameter take part"
                )
            start = self.packing.flags
            used = [flag != 0 for flag in output[start : start + len(self._parameters)].tolist()]
        self._present = None
        with quick_attributes():
            hooked = any([gradient_hooks(p) for p in self._shardeds])
            listeners = [post_accumulate_grad_hooks(p) for p in self._shardeds]
        if hooked and not all(only_cut(gradient_hooks(p)) for p in self._shardeds):
            self._add_one_by_one(output, used)
        elif self._fresh and self._has_no_gradients():
            with quick_attributes():
                self._hand_over(output, used)
        elif self._ours() and used is None and not (self._shard is not None and self._shard.repacked):
            assert self._shard is not None
            for flat, span in zip(self._shard.flats, self.packing.spans, strict=True):
                flat[: span.stop - span.start].add_(output[span.start : span.stop])
        else:
            self._add_one_by_one(output, used)
        for i, posts in enumerate(listeners):
            if posts and (used is None or used[i]):
                for post in list(posts.values()):
                    post(self._shardeds[i])

    def _has_no_gradients(self) -> bool:
        with quick_attributes():
            return all([p.grad is None for p in self._shardeds])

    def _fresh_shard(self) -> GradientShard:
        shard = self._shard
        if shard is not None and shard.leased and not shard.exclusive():
            self._shard = None  # someone kept these gradients: the memory is theirs now
        if self._shard is None:
            self._shard = self._new_shard()
        self._shard.lease()
        return self._shard

    @torch.inference_mode(False)
    def _new_shard(self) -> GradientShard:
        return GradientShard(self.packing, self._parameters, self._ranks.device, self._owner)

    def _hand_over(self, output: torch.Tensor, used: list[bool] | None) -> None:
        shard = self._shard
        assert shard is not None
        if not shard.direct:
            for flat, span in zip(shard.flats, self.packing.spans, strict=True):
                flat.copy_(output[span.start : span.stop])
        for i in shard.repacked:
            shard.locals[i].copy_(self._parameters[i].cut.packed_view(output, self.packing.parts[i].offset))
        for i, (parameter, gradient) in enumerate(zip(self._shardeds, shard.dtensors, strict=True)):
            if used is None or used[i]:
                parameter.grad = gradient

    def _ours(self) -> bool:
        shard = self._shard
        return (
            shard is not None
            and all([p.grad is g for p, g in zip(self._shardeds, shard.dtensors, strict=True)])
            and shard.intact()
        )

    def _add_one_by_one(self, output: torch.Tensor, used: list[bool] | None) -> None:
        """Parameter by parameter: the user set, dropped or hooks into gradients, or some parameters were unused."""
        with torch.no_grad():
            for i, (parameter, part) in enumerate(self._pairs()):
                if used is not None and not used[i]:
                    continue
                local = parameter.cut.packed_view(output, part.offset)
                form = torch.contiguous_format if parameter.cut.repacks else torch.preserve_format
                dtype = self.packing.spans[part.span].grad_dtype
                new: torch.Tensor = parameter.cut.wrap(local.to(dtype, copy=True, memory_format=form))
                for hook in list((gradient_hooks(parameter.sharded) or {}).values()):
                    changed = hook(new)
                    new = new if changed is None else changed
                old = parameter.sharded.grad
                if old is None:
                    parameter.sharded.grad = new
                else:
                    kinds = (DTensor, RaggedTensor)
                    target = local_of(old) if isinstance(old, kinds) else old
                    target.add_(local_of(new) if isinstance(new, kinds) else new)

    def release_unused(self) -> None:
        """Give the gradients' memory back once every ``.grad`` is None again."""
        shard = self._shard
        if shard is None or not shard.leased or self._pending is not None:
            return
        with quick_attributes():
            if any([p.grad is g for p, g in zip(self._shardeds, shard.dtensors, strict=True)]):
                return
        if shard.exclusive():
            shard.release()
        else:
            self._shard = None


def _scale(tensor: torch.Tensor, division: Division) -> None:
    """What a reduction over no other rank does."""
    divisor = division.before * division.after
    if divisor != 1.0:
        tensor.div_(divisor)


def _nothing(comm: Communicator, nbytes: int) -> None:
    return None
