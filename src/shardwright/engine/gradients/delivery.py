"""From a reduced tensor to ``.grad``, on the device or the host: set as DTensors that are made once, or added."""

from __future__ import annotations

import operator
import sys
from collections import deque
from collections.abc import Callable, Sequence
from itertools import compress, repeat
from operator import is_
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from shardwright.engine.base.offload import Host, HostSlab
from shardwright.engine.compat.autograd import (
    gradient_hooks,
    post_accumulate_grad_hooks,
    waits_for_other_gradients,
)
from shardwright.engine.compat.dtensor import local_of
from shardwright.engine.compat.modes import quick_attributes
from shardwright.engine.compat.storages import storage_use_count
from shardwright.engine.gradients.packer import Packer
from shardwright.engine.layout import Packing
from shardwright.engine.memory import Owner, Slab
from shardwright.engine.tensors.numbers.hooks import EngineHook, only_engine_hooks
from shardwright.engine.tensors.parameter import ManagedParameter, is_cut_like
from shardwright.engine.tensors.ranks import Ranks

_gradient_of: Callable[[torch.Tensor], Any] = operator.attrgetter("grad")


class GradientShard:
    """Memory for this rank's gradients of one packing, and the DTensors over it, made once.

    A user may keep ``p.grad`` after ``zero_grad``. :meth:`exclusive` is then False, and the engine makes a new object
    instead of writing into this one.
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
        #: Numbers of the parameters whose gradients are reduced in another order than stored here.
        self.repacked = [i for i, p in enumerate(parameters) if p.cut.repacks]
        self.direct = self.direct and not self.repacked
        for span in packing.spans:
            numel = packing.numel if self.direct else span.stop - span.start
            nbytes = numel * span.grad_dtype.itemsize
            slab = make_slab(nbytes) if make_slab is not None else Slab(nbytes, device, "gradients", owner)
            slab.lease()
            self.slabs.append(slab)
            self.flats.append(slab.view(span.grad_dtype, 0, (numel,), (1,)))
        #: The tensors that a coalesced collective writes.
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
        """Whether the DTensors still use this memory. A conversion of a module replaces their local tensors."""
        return not any(map(operator.is_not, map(local_of, self.dtensors), self.locals))

    def exclusive(self) -> bool:
        """Whether only the engine and ``p.grad`` refer to these gradients or to their memory.

        The object's reference count shows Python references, the storage's count shows views.
        """
        if not self.intact():
            return False
        # getrefcount counts the list, the loop variable, its own argument, and for a local the DTensor around it.
        for dtensor in self.dtensors:
            if sys.getrefcount(dtensor) > 3:
                return False
        for local in self.locals:
            if sys.getrefcount(local) > 4:
                return False
        counts = [storage_use_count(flat.untyped_storage()) for flat in self.flats]
        return counts == self._alone


class Result(NamedTuple):
    """A reduced tensor.

    Attributes:
        output: flat, in the dtype of the reduction; after the gradients come the flags.
        present: whether this rank had a gradient, for each parameter; None: for all.
        fresh: whether no parameter had a gradient when the reduction began.
        hook: the user's hook for the gradients.
        mark: the mark after the last collective; None: after all work that the computation has queued.
    """

    output: torch.Tensor
    present: list[bool] | None
    fresh: bool
    hook: Callable[[torch.Tensor], None] | None
    mark: Any


def read_flags(flags: torch.Tensor, present: list[bool]) -> list[bool]:
    """Return for each parameter whether any rank had a gradient: the host waits for the flags, which travelled with the
    gradients.

    A plan, in which no other ranks exist and no sums are computed, takes ``present`` instead, those of this rank.
    """
    return [flag != 0 for flag in flags.tolist()]


class OnDevice:
    """Delivers gradients on the device on which they are reduced."""

    def __init__(self, packer: Packer, ranks: Ranks, owner: Owner) -> None:
        self._packer = packer
        self._ranks = ranks
        self._owner = owner
        self._shard: GradientShard | None = None
        packing = packer.packing
        #: Memory of a reduction whose result is added to existing gradients.
        self._sum = Slab(packing.numel * packing.reduce_dtype.itemsize, ranks.device, "sum", owner)
        self._sum.lease()
        self._sum_flat = self._sum.view(packing.reduce_dtype, 0, (packing.numel,))
        self._sum.release()

    def target(self) -> tuple[torch.Tensor, bool]:
        """The memory for the reduction's result, and whether no parameter has a gradient now."""
        fresh = self._has_no_gradients()
        shard = self._fresh_shard() if fresh else None
        if shard is not None and shard.direct:
            return shard.flats[0], fresh
        self._sum.lease()
        return self._sum_flat, fresh

    def tensors_of(self, flat: torch.Tensor) -> list[torch.Tensor] | None:
        """The tensors that a coalesced collective writes, if ``flat`` is the memory of gradients."""
        shard = self._shard
        return shard.tensors if shard is not None and flat is shard.flats[0] else None

    def deliver(self, result: Result) -> None:
        """Set or add to every used parameter's ``.grad``."""
        try:
            self._call(result)
            self._accumulate(result)
        finally:
            self._sum.release()

    def _call(self, result: Result) -> None:
        if result.hook is not None:
            result.hook(result.output[: self._packer.packing.flags])

    def _accumulate(self, result: Result) -> None:
        output = result.output
        used: list[bool] | None = None
        if result.present is not None:
            # Only a rank without some gradient must read the flags of the others; its host waits for them.
            if self._ranks.local.streams.capturing:
                raise RuntimeError(
                    "some parameters have no gradient on this rank, and during capture a rank cannot know whether "
                    "other ranks have one; freeze these parameters with requires_grad_(False), or use every "
                    "parameter in the loss"
                )
            start = self._packer.packing.flags
            used = read_flags(output[start : start + len(self._packer.parameters)], result.present)
        with quick_attributes():
            hooked = any(map(gradient_hooks, self._packer.shardeds))
            listeners = list(map(post_accumulate_grad_hooks, self._packer.shardeds))
        if hooked and not all(only_engine_hooks(gradient_hooks(p)) for p in self._packer.shardeds):
            self._add_one_by_one(output, used)
        elif result.fresh and self._has_no_gradients():
            with quick_attributes():
                self._hand_over(output, used)
        elif self._ours() and used is None and not (self._shard is not None and self._shard.repacked):
            assert self._shard is not None
            for flat, span in zip(self._shard.flats, self._packer.packing.spans, strict=True):
                flat[: span.stop - span.start].add_(output[span.start : span.stop])
        else:
            self._add_one_by_one(output, used)
        for i, posts in enumerate(listeners) if any(listeners) else ():
            if posts and (used is None or used[i]):
                for post in list(posts.values()):
                    post(self._packer.shardeds[i])

    def _has_no_gradients(self) -> bool:
        with quick_attributes():
            return all(map(is_, map(_gradient_of, self._packer.shardeds), repeat(None)))

    def _fresh_shard(self) -> GradientShard:
        shard = self._shard
        if shard is not None and shard.leased and not shard.exclusive():
            self._shard = None  # a user kept these gradients, so leave the memory to them
        if self._shard is None:
            self._shard = self._new_shard()
        self._shard.lease()
        return self._shard

    @torch.inference_mode(False)
    def _new_shard(self) -> GradientShard:
        return GradientShard(self._packer.packing, self._packer.parameters, self._ranks.device, self._owner)

    def _hand_over(self, output: torch.Tensor, used: list[bool] | None) -> None:
        shard = self._shard
        assert shard is not None
        if not shard.direct:
            for flat, span in zip(shard.flats, self._packer.packing.spans, strict=True):
                flat.copy_(output[span.start : span.stop])
        for i in shard.repacked:
            shard.locals[i].copy_(
                self._packer.parameters[i].cut.packed_view(output, self._packer.packing.parts[i].offset)
            )
        parameters, gradients = self._packer.shardeds, shard.dtensors
        if used is not None:
            parameters, gradients = list(compress(parameters, used)), list(compress(gradients, used))
        deque(map(setattr, parameters, repeat("grad"), gradients), maxlen=0)

    def _ours(self) -> bool:
        shard = self._shard
        return (
            shard is not None
            and all([p.grad is g for p, g in zip(self._packer.shardeds, shard.dtensors, strict=True)])
            and shard.intact()
        )

    def _add_one_by_one(self, output: torch.Tensor, used: list[bool] | None) -> None:
        """Add one gradient after another, because the user changed or hooked some, or some parameters were unused."""
        with torch.no_grad():
            for i, (parameter, part) in enumerate(self._packer.pairs()):
                if used is not None and not used[i]:
                    continue
                local = parameter.cut.packed_view(output, part.offset)
                form = torch.contiguous_format if parameter.cut.repacks else torch.preserve_format
                dtype = self._packer.packing.spans[part.span].grad_dtype
                new: torch.Tensor = parameter.cut.wrap(local.to(dtype, copy=True, memory_format=form))
                for hook in list((gradient_hooks(parameter.sharded) or {}).values()):
                    if waits_for_other_gradients(hook):
                        raise RuntimeError(
                            f"Parameter {parameter.name!r} of unit {self._owner.name!r} has a hook of "
                            "torch.autograd.graph.register_multi_grad_hook, which would never be called: gradients of "
                            "sharded parameters are reduced unit by unit, after autograd has made them. Use "
                            "register_hook of each parameter, mode='any', or read .grad after backward."
                        )
                    changed = None if isinstance(hook, EngineHook) else hook(new)
                    new = new if changed is None else parameter.fitted(changed)
                old = parameter.sharded.grad
                if old is None:
                    parameter.sharded.grad = new
                elif is_cut_like(old, parameter.sharded):
                    local_of(old).add_(local_of(new))  # type: ignore[arg-type]
                else:  # the user has replaced the gradient of earlier micro-batches
                    parameter.sharded.grad = parameter.fitted(old).add_(new)

    @property
    def arriving(self) -> bool:
        """Whether a copy to the host is running."""
        return False

    @property
    def arrived(self) -> bool:
        """Whether :meth:`land` need not wait."""
        return True

    def leave_device(self) -> None:
        """Let the computation wait for a copy to the host, and release the device's memory."""

    def land(self) -> None:
        """Let the host wait for the copy, and set or add to every used parameter's ``.grad``."""

    def discard(self) -> None:
        """Drop the result, because a backward has failed."""
        self._sum.release()

    def release_unused(self) -> None:
        """Release the gradients' memory when every ``.grad`` is None again."""
        shard = self._shard
        if shard is None or not shard.leased:
            return
        with quick_attributes():
            if any(map(is_, map(_gradient_of, self._packer.shardeds), shard.dtensors)):
                return
        if shard.exclusive():
            shard.release()
        else:
            self._shard = None


class OnHost(OnDevice):
    """Delivers gradients into the CPU's memory. :meth:`deliver` starts the copy, :meth:`land` waits for it."""

    def __init__(self, packer: Packer, ranks: Ranks, owner: Owner, host: Host) -> None:
        super().__init__(packer, ranks, owner)
        self._host = host
        self._arrival: Result | None = None  #: the target of the running copy, and the mark after it

    def target(self) -> tuple[torch.Tensor, bool]:
        fresh = self._has_no_gradients()
        if fresh:
            self._fresh_shard()
        self._sum.lease()
        return self._sum_flat, fresh

    def tensors_of(self, flat: torch.Tensor) -> list[torch.Tensor] | None:
        return None

    def deliver(self, result: Result) -> None:
        """The sum stays on the device until the copy has read it."""
        self._call(result)
        packing, shard, host = self._packer.packing, self._shard, self._host
        if result.fresh and shard is not None and shard.direct and self._has_no_gradients():
            landing = shard.flats[0]
        else:
            landing = host.zeros(packing.numel, packing.reduce_dtype)
        after = result.mark if result.hook is None else None
        landed = host.download(landing, result.output, after)
        self._arrival = result._replace(output=landing, hook=None, mark=landed)

    @torch.inference_mode(False)
    def _new_shard(self) -> GradientShard:
        def slab(nbytes: int) -> Slab:
            return HostSlab(nbytes, "gradients", self._owner, self._host)

        packer = self._packer
        return GradientShard(packer.packing, packer.parameters, torch.device("cpu"), self._owner, slab)

    @property
    def arriving(self) -> bool:
        return self._arrival is not None

    @property
    def arrived(self) -> bool:
        return self._arrival is None or self._host.streams.is_over(self._arrival.mark)

    def leave_device(self) -> None:
        if self._arrival is not None and self._sum.leased:
            self._host.streams.join(self._arrival.mark)
            self._sum.release()

    def land(self) -> None:
        arrival = self._arrival
        if arrival is not None:
            self.leave_device()
            self._host.streams.host_wait(arrival.mark)
            self._arrival = None
            self._accumulate(arrival)

    def discard(self) -> None:
        if self._arrival is not None:
            self.leave_device()
            self._host.streams.host_wait(self._arrival.mark)
            self._arrival = None
        else:
            super().discard()

    def release_unused(self) -> None:
        if self._arrival is None:
            super().release_unused()
