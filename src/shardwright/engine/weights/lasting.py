"""Weights that outlive their call: copies which a graph may keep, where its backward is not autograd's alone.

A transform of torch.func runs backwards of its own, in which no hook of ours gathers anything, and may differentiate
these once more; ``allow_mutation_on_saved_tensors`` reads saved tensors between forward and backward; make_fx keeps
them as constants. There the modules compute with copies of the full weights. The gradients go through the copies to
the full weights, and on from there as always.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardwright._torch import mutation_allowed, traced, transformed
from shardwright.engine.base.visit import Visit
from shardwright.engine.tensors.parameter import ON_DATA, FullDTensor, FullParameter, ManagedParameter


class _Copied(torch.autograd.Function):
    """Copies of a unit's full weights; its backward runs once if the gradient of any of them is there."""

    @staticmethod
    def forward(ctx: Any, visit: Visit, *fulls: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.visit = visit
        copies = tuple([full.clone() for full in fulls])
        ctx.mark_non_differentiable(*[c for c, f in zip(copies, fulls, strict=True) if not f.requires_grad])
        return copies

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ctx.visit.before_backward()
        return (None, *gradients)


def lasting_kind() -> type[Lasting] | None:
    """What a call that begins now needs, by what is around it."""
    if traced():  # make_fx, as torch.func.linearize has it: it takes no class of ours for a constant
        return PlainLasting
    return Lasting if transformed() or mutation_allowed() else None


class Lasting:
    """Copies of the full weights that modules show, in their place until :meth:`hide`.

    Make it while the full weights are shown, and outside of any transform.
    """

    def __init__(self, parameters: list[ManagedParameter], visit: Visit) -> None:
        self._shown = [p for p in parameters if any(slot.holds(p.full) for slot in p.slots)]
        self._edited: set[int] = set()  #: copies whose ``.data`` was handed out
        copies: Any = _Copied.apply(visit, *[p.full for p in self._shown]) if self._shown else ()
        self._copies: list[Any] = [
            self._as_parameter(c, p.full) for c, p in zip(copies, self._shown, strict=True)
        ]
        self._versions = [c._version for c in self._copies]
        for p, made in zip(self._shown, self._copies, strict=True):
            _exchange(p, p.full, made)

    @property
    def has_graph(self) -> bool:
        """Whether backward may come to the full weights through these."""
        return any(c.requires_grad for c in self._copies)

    def _as_parameter(self, made: Any, full: Any) -> Any:
        """Let ``made`` be what modules expect of a parameter, with the attributes of ``full``."""
        for key, value in full.__dict__.items():
            made.__dict__.setdefault(key, value)
        made.__dict__["_is_param"] = True
        if isinstance(full, (FullParameter, FullDTensor)):
            made.__dict__[ON_DATA] = lambda tensor: self._edited.add(id(tensor))
            made.__class__ = type(full)
        return made

    def hide(self) -> None:
        """Show the full weights again, with what was edited in the copies."""
        for p, made, version in zip(self._shown, self._copies, self._versions, strict=True):
            _exchange(p, made, p.full)
            if made._version != version or id(made) in self._edited:
                with torch.no_grad():
                    p.full.copy_(made)
        self._shown, self._copies, self._versions = [], [], []


class PlainLasting(Lasting):
    """Constants for a tracer, which knows no class of ours and takes no parameter that is no leaf: without gradient."""

    def _as_parameter(self, made: Any, full: Any) -> Any:
        return nn.Parameter(made.detach(), requires_grad=False)


def _exchange(p: ManagedParameter, old: Any, new: Any) -> None:
    """Wherever modules hold ``old`` as this parameter, let them hold ``new``."""
    for slot in p.slots:
        if slot.module() is not None and slot.holds(old):
            slot.show(new)
