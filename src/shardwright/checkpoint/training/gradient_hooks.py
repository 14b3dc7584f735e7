"""State of gradient hooks in a checkpoint: errors that a hook adds to later gradients, of each rank.

Such state fits the ranks, the layout and the units of the save alone. So a digest of them is stored beside it.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from shardwright.checkpoint.training.wanted_state import StoredNames
from shardwright.collective import RankGroup
from shardwright.comm import GradientHook
from shardwright.engine.unit.owning import units_of
from shardwright.engine.unit.unit import Unit

HOOKS = "gradient_hooks"


def hook_states(model: nn.Module) -> dict[str, dict[str, Any]]:
    """The state of each gradient hook of the model that has some, by a number, with a digest of its place."""
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
    """A digest of what the meaning of a hook's state depends on, equal on every rank."""
    sha256 = hashlib.sha256(repr(hook).encode())
    for unit in units:
        shapes = [tuple(p.sharded.shape) for p in unit.parameters]
        packings = [reduction.packing for reduction in unit.gradients.reductions]
        ranks = unit.gradients.ranks
        sizes = [[c.world_size for c in some] for some in (ranks.scatters, ranks.late, ranks.replicas)]
        sha256.update(repr((unit.name, tuple(unit.mesh.shape), sizes, shapes, packings)).encode())
    return sha256.hexdigest()


class HooksToLoad:
    """The hooks of a model, and the states that a checkpoint has for them on the same ranks and in the same layout."""

    def __init__(self, model: nn.Module, stored: StoredNames) -> None:
        self._hooks = [hook for hook, _ in _hooks(model)]
        self.state: dict[str, Any] = {}  #: to read into, by number
        self._folder = stored.folder
        self._lost: list[str] = []
        for number, own in hook_states(model).items():
            prefix = f"{HOOKS}.{number}"
            names = {f"{prefix}.state.{name}" for name in own["state"]}
            if names <= stored.tensors.keys() and stored.value(prefix, "place") == own["place"]:
                self.state[number] = own["state"]
            elif any(name.startswith(f"{HOOKS}.") for name in stored.tensors):
                self._lost.append(own["hook"])

    def tensors(self) -> dict[str, Tensor]:
        """Tensors to read into, by the names in the checkpoint without their first key."""
        return {
            f"{number}.state.{name}": tensor
            for number, state in self.state.items()
            for name, tensor in state.items()
            if isinstance(tensor, Tensor)
        }

    def restore(self, content: Mapping[str, Any], ranks: RankGroup) -> None:
        """Give hooks the state that was read. Others start without state, and the first rank warns."""
        for number, hook in enumerate(self._hooks):
            if str(number) in self.state:
                hook.load_state_dict({**content[str(number)]["state"], **self.state[str(number)]})
            else:
                hook.reset()
        if self._lost and ranks.is_first:
            warnings.warn(
                f"{self._folder} has the state of gradient hooks of other ranks, units or layouts, so "
                f"{', '.join(self._lost)} starts without the errors of earlier steps.",
                stacklevel=4,
            )
