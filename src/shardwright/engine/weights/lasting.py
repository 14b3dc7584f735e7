"""Copies of the full weights that a graph keeps after the call, if not only autograd's backward reads them.

A transform of torch.func runs its own backwards, in which none of our hooks gathers, and may differentiate these again.
``allow_mutation_on_saved_tensors`` reads saved tensors between forward and backward. make_fx keeps them as constants.
In these cases the modules compute with copies of the full weights. The gradients go through the copies to the full
weights and are then reduced as usual.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardwright.engine.base.visit import Visit
from shardwright.engine.compat.autograd import mutation_allowed
from shardwright.engine.compat.modes import traced, transformed
from shardwright.engine.tensors.parameter import ON_DATA, FullDTensor, FullParameter, ManagedParameter


class _Copied(torch.autograd.Function):
    """Copies a unit's full weights. Its backward runs once if any copy has a gradient."""

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
    """The kind of copies that a call needs now, because of active transforms and modes."""
    if traced():  # make_fx, as in torch.func.linearize, which accepts no class of ours as a constant
        return PlainLasting
    return Lasting if transformed() or mutation_allowed() else None


class Lasting:
    """Copies of the full weights that modules show until :meth:`hide`.

    Make it while the full weights are shown, and outside of any transform.
    """

    def __init__(self, parameters: list[ManagedParameter], visit: Visit) -> None:
        self._shown = [p for p in parameters if any(slot.holds(p.full) for slot in p.slots)]
        self._edited: set[int] = set()  #: copies whose ``.data`` user code has got
        copies: Any = _Copied.apply(visit, *[p.full for p in self._shown]) if self._shown else ()
        self._copies: list[Any] = [
            self._as_parameter(c, p.full) for c, p in zip(copies, self._shown, strict=True)
        ]
        self._versions = [c._version for c in self._copies]
        for p, made in zip(self._shown, self._copies, strict=True):
            _exchange(p, p.full, made)

    @property
    def has_graph(self) -> bool:
        """Whether backward may reach the full weights through the copies."""
        return any(c.requires_grad for c in self._copies)

    def _as_parameter(self, made: Any, full: Any) -> Any:
        """Give ``made`` the form of a parameter that modules expect, with the attributes of ``full``."""
        for key, value in full.__dict__.items():
            made.__dict__.setdefault(key, value)
        made.__dict__["_is_param"] = True
        if isinstance(full, (FullParameter, FullDTensor)):
            made.__dict__[ON_DATA] = lambda tensor: self._edited.add(id(tensor))
            made.__class__ = type(full)
        return made

    def hide(self) -> None:
        """Show the full weights again, with the edits of the copies."""
        for p, made, version in zip(self._shown, self._copies, self._versions, strict=True):
            _exchange(p, made, p.full)
            if made._version != version or id(made) in self._edited:
                with torch.no_grad():
                    p.full.copy_(made)
        self._shown, self._copies, self._versions = [], [], []


class PlainLasting(Lasting):
    """Constants for a tracer, without gradient. It knows none of our classes and accepts only leaf parameters."""

    def _as_parameter(self, made: Any, full: Any) -> Any:
        return nn.Parameter(made.detach(), requires_grad=False)


def _exchange(p: ManagedParameter, old: Any, new: Any) -> None:
    """Replace ``old`` by ``new`` in all modules that hold it as this parameter."""
    for slot in p.slots:
        if slot.module() is not None and slot.holds(old):
            slot.show(new)
