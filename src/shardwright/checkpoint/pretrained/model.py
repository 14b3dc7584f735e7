"""The named tensors of a model for files: every parameter and buffer, tied ones once, with this rank's part.

Other files of this package use this list for plain and sharded models. The cut of a parameter gives its boxes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwright.checkpoint.format.boxes import Box
from shardwright.engine import (
    RaggedTensor,
    RankGroup,
    Unit,
    has_no_values,
    root_of,
    settle,
    unit_of,
    units_of,
    unmark,
    without_wrappers,
)
from shardwright.engine.compat import increment_version, is_persistent, storage_key
from shardwright.init import become


@dataclass(frozen=True, eq=False)
class ModelTensor:
    """A parameter or buffer of a model, under every name it has."""

    names: list[str]
    tensor: Tensor  #: as the module holds it, between steps
    slots: list[tuple[nn.Module, str]]
    optional: bool  #: a buffer that state dicts leave out

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def unit(self) -> Any:
        return unit_of(self.tensor)

    @property
    def has_values(self) -> bool:
        """False on the meta device, and where the model is deferred."""
        unset = self.unit.without_values() if self.unit is not None else ()
        return not has_no_values(self.tensor) and self.tensor not in unset

    @property
    def is_constructed(self) -> bool:
        """False on the meta device: elsewhere its values are the constructor's, at the latest after ``materialize``."""
        source = self.unit.without_values().get(self.tensor) if self.unit is not None else None
        return not (self.tensor.is_meta or (source is not None and source.is_meta))

    def boxes(self) -> list[Box]:
        """Return the boxes of this tensor that this rank has; on meta if it has no memory yet."""
        if self.unit is not None:
            managed = self.unit.managed(self.tensor)
            return [Box(*piece) for piece in managed.cut.pieces(managed.local)]
        if isinstance(self.tensor, (DTensor, RaggedTensor)):
            raise NotImplementedError(
                f"{self.name!r} is a {type(self.tensor).__name__} that belongs to no unit of fully_shard; pretrained "
                "weights load only into plain tensors and into parameters of units"
            )
        without = has_no_values(self.tensor)
        local = (
            torch.empty(self.tensor.shape, dtype=self.tensor.dtype, device="meta")
            if without
            else self.tensor.detach()
        )
        return [Box((0,) * local.ndim, local)]


def ranks_of(model: nn.Module) -> RankGroup:
    """Return all ranks that a model is sharded over; of a plain model this process alone."""
    units = units_of(model)
    meshes = [unit.mesh for unit in units]
    meshes += [p.cut.parallel.rest for unit in units for p in unit.parameters if p.cut.parallel is not None]
    return RankGroup.of_mesh(max(meshes, key=lambda mesh: mesh.size(), default=None))


def tensors_of(model: nn.Module) -> list[ModelTensor]:
    """Return the model's parameters and buffers in the order of its modules, tied ones once."""
    entries: dict[int, ModelTensor] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        tables: tuple[tuple[dict[str, Any], bool], ...] = (module._parameters, False), (module._buffers, True)
        for table, are_buffers in tables:
            for name, tensor in table.items():
                if tensor is None:
                    continue
                optional = are_buffers and not is_persistent(module, name)
                entry = entries.setdefault(id(tensor), ModelTensor([], tensor, [], optional))
                entry.names.append(without_wrappers(f"{prefix}.{name}" if prefix else name))
                entry.slots.append((module, name))
    return list(entries.values())


def at_rest(units: list[Unit], doing: str) -> None:
    """Show the sharded parameters, and adopt parameters that users have replaced.

    Raises:
        RuntimeError: a forward or backward is under way.
    """
    for unit in units:
        if (root := root_of(unit)) is not None:
            root.recover_if_failed()
        if unit.activity.busy:
            raise RuntimeError(f"{doing} while unit {unit.name!r} is in use: call it between steps")
    for unit in units:
        unit.refuse_unsharded(doing + " for")
        unit.drop_kept()
        unit.release()
        settle(unit)


def mark_loaded(entry: ModelTensor) -> None:
    """Report new values to the unit, also on a rank without elements of them."""
    if entry.unit is not None:
        local = entry.unit.managed(entry.tensor).local
        increment_version([local])
        unmark(local)


def allocate(entry: ModelTensor, device: torch.device) -> ModelTensor:
    """Give memory to a tensor without values that no unit owns. It stays the same object."""
    old = entry.tensor
    become(old, torch.empty_strided(old.shape, old.stride(), dtype=old.dtype, device=device))
    return entry


def aliases_of(model: nn.Module, tensors: list[ModelTensor]) -> dict[str, str]:
    """Return, by the name of each tensor without values that no unit owns, the name of another one over its memory."""
    unset = [entry for entry in tensors if entry.unit is None and not entry.has_values]
    own = {id(entry.tensor) for entry in tensors}
    viewers = [(entry.name, entry.tensor) for entry in unset]
    for prefix, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, Tensor) and id(value) not in own and has_no_values(value):
                viewers.append((f"{prefix}.{key}".lstrip("."), value))
    by_memory: dict[int, list[str]] = {}
    for name, tensor in viewers:
        by_memory.setdefault(storage_key(tensor), []).append(name)
    return {
        name: next(other for other in names if other != name)
        for names in by_memory.values()
        if len(names) > 1
        for name in names
    }
