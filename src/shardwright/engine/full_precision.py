"""Weights as they are stored: the second memory into which a unit is gathered in eval mode, where a model asks for it.

The shards are the same, and so are the places in the slab; only the dtypes differ. A root call has one precision, which
``root.py`` decides at its beginning. Backward always finds the weights in their compute dtypes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwright.engine.ledger import NEVER, FullCounters
from shardwright.engine.parameter import plain_of
from shardwright.layout import UnitLayout
from shardwright.memory import Owner, Slab

if TYPE_CHECKING:
    from shardwright.engine.unit import Unit
    from shardwright.engine.weights import Hop, Weights

#: What of a unit's weights there is once for each precision.
_EXCHANGED = (
    "layout_gathered",
    "slab",
    "gather_nbytes",
    "_cast",
    "_casts",
    "_upload",
    "_hops",
    "_uploads",
    "_full_counters",
)


class OtherPrecision:
    """What is not in use now of the two memories of a unit. Leases come from outside any plan: a step has none."""

    def __init__(self, weights: Weights) -> None:
        mine = {name: getattr(weights, name) for name in _EXCHANGED}
        owner, weights.owner = weights.owner, Owner(f"{weights.owner.name}, full precision")
        secondary = weights._secondary  # for backward, which never reads these weights
        try:
            layout = weights.layout.as_stored()
            slab = Slab(layout.slab_nbytes, weights.ranks.device, "parameters", weights.owner)
            weights.layout_gathered, weights.slab, weights.gather_nbytes = layout, slab, slab.nbytes
            slab.lease()
            self._forms = _forms(weights, layout, slab)
            weights._full_counters = FullCounters(
                [t for i in range(len(self._forms)) for t in self.counters(i)]
            )
            weights._prepare_gather()
            slab.release()
        finally:
            self.owner, weights.owner, weights._secondary = weights.owner, owner, secondary
            self.values: dict[str, Any] = {name: getattr(weights, name) for name in _EXCHANGED}
            for name, value in mine.items():
                setattr(weights, name, value)

    def counters(self, index: int) -> tuple[torch.Tensor, ...]:
        """As those of a parameter, of its full form here."""
        full, view = self._forms[index]
        return (full,) if view is full else (full, view)

    @property
    def hops(self) -> list[Hop]:
        hops: list[Hop] = self.values["_hops"]
        return hops

    def exchange(self, weights: Weights) -> None:
        """Put this in the place of what the unit has, which becomes this. Nothing may be gathered."""
        for hop in weights._hops[:-1] if weights.full_precision else ():
            hop.epoch = NEVER  # but what training keeps until the weights change stays
            hop.slab.release()
        for i, (p, (full, view)) in enumerate(zip(weights.parameters, self._forms, strict=True)):
            full.requires_grad_(p.full.requires_grad)
            self._forms[i] = p.full, p.view
            p.full, p.view = full, view
        for name in _EXCHANGED:
            mine = getattr(weights, name)
            setattr(weights, name, self.values[name])
            self.values[name] = mine
        weights.index_slots()


def _forms(weights: Weights, layout: UnitLayout, slab: Slab) -> list[tuple[nn.Parameter, torch.Tensor]]:
    """The full forms over the slab, with the attributes of those there are, and what of each is plain."""
    runs = {m.index: run for run in layout.runs for s in run.segments for m in s.members}
    forms: list[tuple[nn.Parameter, torch.Tensor]] = []
    for index, p in enumerate(weights.parameters):
        view = p.cut.full_view(slab, runs[index])
        shown = view if p.cut.parallel is None else p.cut.parallel.wrap(view)
        full = nn.Parameter(shown, requires_grad=p.full.requires_grad)
        for key, value in p.full.__dict__.items():
            full.__dict__.setdefault(key, value)
        full.__class__ = type(p.full)
        forms.append((full, plain_of(full)))
    return forms


def wanted(model: nn.Module) -> bool:
    """Whether a root call of ``model`` computes with weights as they are stored."""
    if model.training:
        return False
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{type(model).__name__} has full_precision_in_eval and was called in eval mode with gradients enabled; "
            "backward needs the weights in their compute dtype. Call it under torch.no_grad() or inference_mode(), "
            "or train()."
        )
    return True


def check_agree(units: list[Unit], names: list[str]) -> bool:
    """Whether the units of a model ask for full precision in eval mode, which is all of them or none."""
    asks = [unit.policy.full_precision_in_eval for unit in units]
    if len(set(asks)) > 1:
        with_it = names[asks.index(True)]
        without = names[asks.index(False)]
        raise ValueError(
            f"full_precision_in_eval holds for a whole model, and {with_it!r} has it while {without!r} has not. Give "
            "every fully_shard call a policy with the same value."
        )
    for unit, name in zip(units, names, strict=True) if asks[0] else ():
        if unit.extended_kinds:
            raise NotImplementedError(
                f"full_precision_in_eval: parameters of {name!r} decide themselves what is gathered of them "
                f"({unit.extended_kinds} has fsdp_pre_all_gather). Leave it at False."
            )
    return asks[0]
