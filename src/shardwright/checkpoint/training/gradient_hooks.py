"""State of gradient hooks in a checkpoint: errors that a hook adds to later gradients, of each rank.

Such state fits the ranks, the layout and the units of the save alone. So a digest of them is stored beside it.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from torch import nn

from shardwright.checkpoint.load.checkpoints import Checkpoint
from shardwright.checkpoint.training.section_to_load import SectionToLoad
from shardwright.engine import RankGroup, Unit, units_of
from shardwright.engine.comm import GradientHook

HOOKS = "gradient_hooks"


def gradient_hook_states(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the state of each gradient hook of the model that has some, by a number, with a digest of its place."""
    states = {}
    for number, (hook, units) in enumerate(_hooks(model)):
        if state := hook.state_dict():
            states[str(number)] = {"hook": type(hook).__name__, "place": _digest(hook, units), "state": state}
    return states


def _hooks(model: nn.Module) -> list[tuple[GradientHook, list[Unit]]]:
    by_hook: dict[int, tuple[GradientHook, list[Unit]]] = {}
    for unit in units_of(model):
        hook = unit.settings.transport.hook
        if hook is not None:
            by_hook.setdefault(id(hook), (hook, []))[1].append(unit)
    return list(by_hook.values())


def _digest(hook: GradientHook, units: list[Unit]) -> str:
    """Return a digest of what the meaning of a hook's state depends on, equal on every rank."""
    sha256 = hashlib.sha256(repr(hook).encode())
    for unit in units:
        shapes = [tuple(p.sharded.shape) for p in unit.parameters]
        packings = [reduction.packing for reduction in unit.gradients.reductions]
        ranks = unit.gradients.ranks
        sizes = [[c.world_size for c in some] for some in (ranks.scatters, ranks.late, ranks.replicas)]
        sha256.update(repr((unit.name, tuple(unit.mesh.shape), sizes, shapes, packings)).encode())
    return sha256.hexdigest()


@dataclass(frozen=True)
class HooksToLoad(SectionToLoad):
    """The hooks of a model, and the states that a checkpoint has for them on the same ranks and in the same layout.

    Attributes:
        checkpoint, ranks: of the load.
        hooks: of the model; those that are restored have an entry in ``tensors``, by their numbers.
        lost: names of the hooks that have a state for other ranks or another layout in the checkpoint.
    """

    key = HOOKS
    checkpoint: Checkpoint
    ranks: RankGroup
    hooks: list[GradientHook]
    tensors: Mapping[str, Any]
    lost: list[str]

    @classmethod
    def of(cls, checkpoint: Checkpoint, ranks: RankGroup, model: nn.Module) -> Self:
        hooks = [hook for hook, _ in _hooks(model)]
        states, tensors, lost = gradient_hook_states(model), {}, []
        for number, hook in ((str(i), hook) for i, hook in enumerate(hooks)):
            place, own = f"{HOOKS}.{number}", states.get(number)
            stored = [checkpoint.has(f"{place}.state.{name}") for name in own["state"]] if own else []
            if own and all(stored) and checkpoint.leaves.get(f"{place}.place") == own["place"]:
                tensors[number] = {"state": own["state"]}
            elif checkpoint.has(place) or (own and checkpoint.has(HOOKS)):
                lost.append(type(hook).__name__)  # also if a hook makes its state later than here
        return cls(checkpoint, ranks, hooks, tensors, lost)

    def restore(self, content: Mapping[str, Any]) -> None:
        """Give hooks the state that was read. Others start without state, and the first rank warns."""
        for number, hook in enumerate(self.hooks):
            if str(number) in self.tensors:
                hook.load_state_dict(content[str(number)]["state"])
            else:
                hook.reset()
        if self.lost and self.ranks.is_first:
            warnings.warn(
                f"{self.checkpoint.place} has the state of gradient hooks of other ranks, units or layouts, so "
                f"{', '.join(self.lost)} starts without the errors of earlier steps.",
                stacklevel=4,
            )
