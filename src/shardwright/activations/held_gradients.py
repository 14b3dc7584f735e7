"""Gradients of one loss between forward and backward: of its hidden states, and float32 sums of those of its head.

A product that computes the gradient of a plain matrix in ``linear``, without autocast, adds it to the sum, so that the
gradient of a chunk never exists as a whole. For other parameters, for DTensors and under autocast it exists, and is
added after that. Nothing here knows how a loss is computed.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Placement
from torch.overrides import TorchFunctionMode

from shardwright.activations.token_rows import TokenRows
from shardwright.engine import STANDS_FOR, unit_of
from shardwright.engine.compat import dtensor_of, local_of
from shardwright.engine.memory import Owner, Slab

HEAD_GRADIENT = "head gradient"  #: the kind of the slabs, in reports and plans
_ALIGN = 64  #: bytes between the gradients in a slab
_PIECE = 64 << 20  #: largest piece of a product in bytes, if its dtype differs from the dtype of the sum


class HeldGradients:
    """Gradients of one loss between forward and backward: of the hidden states, and sums of those of the head.

    Attributes:
        hidden: of the hidden states, on this rank, a row for each token; None: not needed.
    """

    def __init__(
        self, head: nn.Module, rows: TokenRows, needs_hidden: bool, parameters: Sequence[Tensor]
    ) -> None:
        self.hidden = torch.empty_like(rows.local) if needs_hidden else None
        self._form = rows.form
        self._hidden_placements = rows.form.placements
        self._parameters = parameters
        self._aliases = [p.detach().requires_grad_() for p in parameters]
        self._placements: list[Sequence[Placement] | None] = [None] * len(parameters)
        self._used = [False] * len(parameters)
        self._slab, self._sums = _lease(head, parameters)
        self._finish = weakref.finalize(self, _give_back, self._slab, weakref.ref(head))
        self._finish.atexit = False

    @contextmanager
    def computing(self, head: nn.Module) -> Iterator[None]:
        """Inside the context the head computes with aliases of its parameters, so that the hooks of these see one
        gradient in backward, and none of a chunk."""
        aliases = {id(p): alias for p, alias in zip(self._parameters, self._aliases, strict=True)}
        places = [
            (module._parameters, name, p)
            for module in head.modules()
            for name, p in module._parameters.items()
            if id(p) in aliases
        ]
        for registry, name, p in places:
            registry[name] = aliases[id(p)]  # type: ignore[assignment]
        try:
            with _ProductsIntoSums(self):
                yield
        finally:
            for registry, name, p in places:
                registry[name] = p
            self._aliases = []

    def place_of(self, alias: Tensor) -> int | None:
        """Return the number of the sum that belongs to the alias of a matrix.

        None: no sum belongs to it, or autograd must add to it.
        """
        plain = type(alias) in (Tensor, nn.Parameter) and alias.ndim == 2
        return next((i for i, each in enumerate(self._aliases) if each is alias), None) if plain else None

    def add_product(self, i: int, gradient_RV: Tensor, rows_RD: Tensor) -> None:
        """Add the gradient of a matrix [V, D], a product of the gradient of its result and of its argument."""
        whole = self._sums[i]
        if gradient_RV.dtype == whole.dtype:
            whole.addmm_(gradient_RV.t(), rows_RD, beta=int(self._used[i]))
        else:
            step = max(1, _PIECE // (rows_RD.shape[1] * gradient_RV.dtype.itemsize))
            for start in range(0, len(whole), step):
                piece = gradient_RV[:, start : start + step].t() @ rows_RD
                part = whole[start : start + step]
                part.add_(piece) if self._used[i] else part.copy_(piece)
        self._used[i] = True

    def leaves(self, hidden: Tensor) -> list[Tensor]:
        """Return the tensors whose gradients are computed: the hidden states of a chunk, if needed, and the
        parameters."""
        return [*([hidden] if self.hidden is not None else []), *self._aliases]

    def add(self, start: int, stop: int, losses_R: Tensor, hidden: Tensor, factors_R: Tensor) -> None:
        """Add the gradients of some rows, each loss times its factor."""
        inputs = self.leaves(hidden)
        if not losses_R.requires_grad:
            gradients: list[Tensor | None] = [None] * len(inputs)
        else:
            gradients = list(torch.autograd.grad(losses_R, inputs, factors_R, allow_unused=True))
        if self.hidden is not None:
            gradient = gradients.pop(0)
            if isinstance(gradient, DTensor):
                self._hidden_placements = gradient.placements
                gradient = local_of(gradient)
            if gradient is None:
                self.hidden[start:stop].zero_()
            else:
                self.hidden[start:stop].copy_(gradient.flatten(0, -2))
        for i, gradient in enumerate(gradients):
            if gradient is None:
                continue
            if isinstance(gradient, DTensor):
                self._placements[i] = gradient.placements
                gradient = local_of(gradient)
            if self._used[i]:
                self._sums[i].add_(gradient)
            else:
                self._sums[i].copy_(gradient)
                self._used[i] = True

    def scaled(self, factor: Tensor, keep: bool) -> list[Tensor | None]:
        """Return the gradients times ``factor``, of the hidden states, then of the parameters in their dtypes.

        Unless ``keep`` the held ones are freed.
        """
        if not self._finish.alive:
            raise RuntimeError(
                "Backward ran a second time through a chunked cross-entropy, whose gradients are freed after the first "
                "backward. Pass retain_graph=True to the first one."
            )
        results: list[Tensor | None] = [self._scaled_hidden(factor, keep)]
        results += [self._scaled_sum(i, factor) for i in range(len(self._parameters))]
        if not keep:
            self.hidden, self._sums = None, []
            self._finish()
        return results

    def _scaled_sum(self, i: int, factor: Tensor) -> Tensor | None:
        if not self._used[i]:
            return None
        p, placements = self._parameters[i], self._placements[i]
        gradient = torch.empty_like(self._sums[i], dtype=p.dtype)
        torch.mul(self._sums[i], factor, out=gradient)
        if placements is None:
            return gradient
        assert isinstance(p, DTensor)
        return dtensor_of(gradient, p.device_mesh, placements, p.shape, p.stride())

    def _scaled_hidden(self, factor: Tensor, keep: bool) -> Tensor | None:
        if self.hidden is None:
            return None
        gradient = self.hidden.mul(factor) if keep else self.hidden.mul_(factor)
        return self._form.wrap(gradient.view(self._form.shape), self._hidden_placements)


class _ProductsIntoSums(TorchFunctionMode):
    """Inside this context, `linear` with the alias of a matrix adds the gradient of the matrix to its sum."""

    def __init__(self, held: HeldGradients) -> None:
        super().__init__()
        self.held = held

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear and not kwargs and torch.is_grad_enabled():
            rows, matrix = args[:2]
            plain = type(rows) is Tensor and rows.dtype == matrix.dtype
            place = self.held.place_of(matrix)
            if plain and place is not None and not torch.is_autocast_enabled(rows.device.type):
                return _Linear.apply(self.held, place, *args)
        return func(*args, **(kwargs or {}))


class _Linear(torch.autograd.Function):
    """The function `linear`, but its backward adds the matrix's gradient to a sum and returns none."""

    @staticmethod
    def forward(
        ctx: Any, held: HeldGradients, place: int, rows: Tensor, matrix: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        ctx.held, ctx.place = held, place
        ctx.save_for_backward(rows, matrix)
        return F.linear(rows, matrix, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, matrix = ctx.saved_tensors
        if ctx.needs_input_grad[3]:
            ctx.held.add_product(ctx.place, gradient.flatten(0, -2), rows.flatten(0, -2))
        return (
            None,
            None,
            gradient @ matrix if ctx.needs_input_grad[2] else None,
            None,
            gradient.flatten(0, -2).sum(0) if ctx.needs_input_grad[4:] == (True,) else None,
        )


# -- memory ----------------------------------------------------------------------------------------------------------

#: Released slabs, by head. A slab is used again, so that a plan of the engine's memory has a place for it.
_released: weakref.WeakKeyDictionary[nn.Module, list[Slab]] = weakref.WeakKeyDictionary()


def _lease(head: nn.Module, parameters: Sequence[Tensor]) -> tuple[Slab | None, list[Tensor]]:
    """Return memory for the sums of the gradients of these parameters, and its views."""
    if not parameters:
        return None, []
    locals_ = [local_of(p) if isinstance(p, DTensor) else p for p in parameters]
    dtypes = [torch.promote_types(p.dtype, torch.float32) for p in parameters]
    sizes = [p.numel() * dtype.itemsize for p, dtype in zip(locals_, dtypes, strict=True)]
    starts = [0, *itertools.accumulate(-(-size // _ALIGN) * _ALIGN for size in sizes)]
    owner = _owner(parameters[0])
    device = locals_[0].device
    slab = _take(head, owner, starts[-1], device)
    slab.lease()
    views = [
        slab.view(dtype, start // dtype.itemsize, p.shape)
        for p, dtype, start in zip(locals_, dtypes, starts, strict=False)
    ]
    return slab, views


def _owner(parameter: Tensor) -> Owner | None:
    """Return the owner of the memory of the parameter's unit; None without a unit."""
    sharded = parameter.__dict__.get(STANDS_FOR)
    unit = None if sharded is None else unit_of(sharded)
    return None if unit is None else unit.site.owner  # type: ignore[no-any-return]


def _take(head: nn.Module, owner: Owner | None, nbytes: int, device: torch.device) -> Slab:
    released = _released.setdefault(head, [])
    while released:
        slab = released.pop()
        if slab.nbytes == nbytes and slab.device == device and (owner is None or slab.owner is owner):
            return slab
    return Slab(nbytes, device, HEAD_GRADIENT, owner or Owner(type(head).__name__))


def _give_back(slab: Slab | None, head: weakref.ref[nn.Module]) -> None:
    if slab is not None:
        slab.release()
        if (module := head()) is not None:
            _released.setdefault(module, []).append(slab)
