"""From autograd's full gradients to one flat tensor, rank-major, in a single pass that casts and copies."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import reduce
from itertools import groupby, repeat
from operator import attrgetter, is_not
from typing import Any
from weakref import WeakValueDictionary

import torch

from shardwright.engine.compat.autograd import grad_of, requires_grad_of, set_grad
from shardwright.engine.compat.modes import quick_attributes
from shardwright.engine.compat.tensors import chunk_cat
from shardwright.engine.layout import GradientPart, Packing, UnitLayout
from shardwright.engine.tensors.parameter import ManagedParameter
from shardwright.engine.tensors.ranks import Ranks

#: An item of a packing: a parameter's number, zeros, or the numbers and offsets of 0-d parameters and their size.
PackedPart = int | torch.Tensor | tuple[tuple[tuple[int, int], ...], int]

_dtype_of: Callable[[Any], torch.dtype] = attrgetter("dtype")
_full_of: Callable[[ManagedParameter], torch.Tensor] = attrgetter("full")

#: The newest zeros for padding. They live as long as a packer uses them.
_zeros: WeakValueDictionary[tuple[torch.dtype, torch.device], torch.Tensor] = WeakValueDictionary()


def _shared_zeros(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """At least so many zeros, for reading. Otherwise every unit would keep memory for the padding of all ranks."""
    zeros = _zeros.get((dtype, device))
    if zeros is None or zeros.numel() < numel:
        zeros = _zeros[dtype, device] = torch.zeros(numel, dtype=dtype, device=device)
    return zeros


def forget_zeros() -> None:
    """Let new packers make zeros of their own, as in a new process, also while a model from before lives."""
    _zeros.clear()


class Packer:
    """The gradients of one packing.

    Attributes:
        packing: the places of the gradients.
        parameters: the parameters of the gradients.
        shardeds: the sharded forms of these parameters.
        dtype: the dtype of the gradients before the cast; it holds each parameter's gradient exactly.
    """

    def __init__(
        self, packing: Packing, layout: UnitLayout, parameters: Sequence[ManagedParameter], ranks: Ranks
    ) -> None:
        self.packing = packing
        self.parameters = [parameters[part.index] for part in packing.parts]
        self.shardeds = [p.sharded for p in self.parameters]
        self._ranks = ranks
        # _chunk_cat accepts only one input dtype. Gradients have the parameters' compute dtypes; if these differ,
        # each narrower gradient is cast separately before.
        dtypes = (layout.specs[part.index].compute_dtype for part in packing.parts)
        self.dtype = dtype = reduce(torch.promote_types, dtypes)
        self._flags = torch.zeros(ranks.parts, packing.flag_slots, dtype=dtype, device=ranks.device)
        self._flags[:, : len(packing.parts)] = 1
        #: The shared zeros of which items are views.
        self._padding: list[torch.Tensor] = []
        self._items = self._plan_items(dtype)
        #: Whether the packing has all gradients, one after another, and nothing else.
        numbers = [i for i in self._items if type(i) is int]
        self._is_in_order = len(numbers) == len(self._items) and numbers == list(range(len(self.parameters)))
        #: Whether gradients are packed without an earlier cast.
        self._plain = bool(packing.shared) or all(
            p.spec.is_natural and p.spec.shape and part.chunk for p, part in self.pairs()
        )
        #: Whether gradients are also not those of tensor-parallel parameters.
        self._is_simple = self._plain and all(p.cut.parallel is None for p in self.parameters)

    def pairs(self) -> list[tuple[ManagedParameter, GradientPart]]:
        return list(zip(self.parameters, self.packing.parts, strict=True))

    def take(self, fill: bool = False) -> tuple[list[torch.Tensor], list[bool] | None]:
        """Remove the full gradients from the parameters. Returns them in packing order, and which exist (None: all).

        ``fill``: unused parameters get gradients of zero.
        """
        with quick_attributes():
            gradients, present = self._take_gradients(fill)
        if self._is_in_order:
            tensors = gradients
        else:
            tensors = [
                gradients[item] if type(item) is int else self._packed_item(item, gradients)
                for item in self._items
            ]
        flags = self._flags
        if present is not None:
            flags = flags.clone()
            for there, run in groupby(range(len(present)), present.__getitem__):
                if not there:
                    columns = list(run)  # as an index it would be copied to the device
                    flags[:, columns[0] : columns[-1] + 1] = 0
        tensors.append(flags)
        return tensors, present

    def _take_gradients(self, fill: bool) -> tuple[list[torch.Tensor], list[bool] | None]:
        fulls = list(map(_full_of, self.parameters))
        found = list(map(grad_of, fulls))
        deque(map(set_grad, fulls, repeat(None)), maxlen=0)
        if self._copies_all(found):
            return found, None  # type: ignore[return-value]
        gradients: list[torch.Tensor] = []
        present: list[bool] | None = None
        dtype, n = self.dtype, self._ranks.parts
        for i, (parameter, gradient) in enumerate(zip(self.parameters, found, strict=True)):
            found[i] = None  # so that each one is freed as soon as its cast is there
            # Without parameters that were frozen since forward, as in autograd.
            if gradient is None or not self.shardeds[i].requires_grad:
                if not (fill and self.shardeds[i].requires_grad):
                    if present is None:
                        present = [True] * len(self.parameters)
                    present[i] = False
                shape = parameter.spec.shape
                gradient = torch.zeros(shape, dtype=dtype, device=self._flags.device)
            else:
                if parameter.cut.parallel is not None:
                    gradient = parameter.cut.parallel.gradient(gradient, self.packing.reduce_dtype)  # type: ignore[union-attr]
                if gradient.dtype != dtype:
                    gradient = gradient.to(dtype)
            if not self._plain:
                spec = parameter.spec
                gradient = gradient.expand(n, 1) if spec.replicated else gradient.permute(spec.order)
            gradients.append(gradient)
        return gradients, present

    def _copies_all(self, found: list[torch.Tensor | None]) -> bool:
        """Whether all gradients are there and are packed as they are."""
        return (
            self._is_simple
            and all(map(is_not, found, repeat(None)))
            and all(map(requires_grad_of, self.shardeds))
            and set(map(_dtype_of, found)) == {self.dtype}
        )

    def _plan_items(self, dtype: torch.dtype) -> list[PackedPart]:
        """The items of the packing in order: numbers of parameters, zeros, and 0-d parameters that share a segment."""
        n, device, packing = self._ranks.parts, self._ranks.device, self.packing
        items: list[PackedPart] = []

        def zeros(*shape: int) -> None:
            if numel := math.prod(shape):
                shared = _shared_zeros(numel, dtype, device)
                self._padding.append(shared)
                items.append(shared[:numel].view(shape))

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

    def _packed_item(self, item: PackedPart, gradients: list[torch.Tensor]) -> torch.Tensor:
        if isinstance(item, torch.Tensor):
            return item
        places, chunk = item  # type: ignore[misc]
        row = self._flags.new_zeros(chunk)
        for place, offset in places:
            if place >= 0:
                row[offset] = gradients[place]
        return row.expand(self._ranks.parts, chunk)

    def pack(self, tensors: list[torch.Tensor], out: torch.Tensor) -> None:
        """Cast and copy in one pass: as one row per rank, or as one row with one segment after another."""
        chunk_cat(tensors, 0, 1 if self.packing.shared else self._ranks.parts, out=out)

    def mask_of(self, places: list[int], like: torch.Tensor) -> torch.Tensor:
        """Return where packed gradients have elements of the parameters at these places of the packing."""
        before = [grad_of(p.full) for p in self.parameters]
        try:
            for i, p in enumerate(self.parameters):
                ones = torch.full_like(p.full, float(i in places), memory_format=torch.preserve_format)
                set_grad(p.full, ones)
            tensors, _ = self.take()
            tensors[-1] = torch.zeros_like(self._flags)
            for i in places:
                tensors[-1].narrow(1, i, 1).fill_(1)
        finally:
            for p, gradient in zip(self.parameters, before, strict=True):
                set_grad(p.full, gradient)
        packed = torch.empty_like(like)
        self.pack(tensors, packed)
        return packed != 0

    def has_gradients(self) -> bool:
        """Whether a parameter has a full gradient."""
        with quick_attributes():
            return any(map(is_not, map(grad_of, map(_full_of, self.parameters)), repeat(None)))

    def drop(self) -> None:
        """Drop the full gradients."""
        for parameter in self.parameters:
            set_grad(parameter.full, None)
