"""The state that a run wants from a checkpoint: tensors to read into, and checks before anything changes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from shardwright.checkpoint.format.nested import NestedState
from shardwright.checkpoint.load.checkpoints import Checkpoint, StoredForm
from shardwright.checkpoint.storage.stores import Store


class StoredNames:
    """The tensors and values of a checkpoint by name.

    Attributes:
        tensors: the form of each tensor.
        names: of all tensors and values.
        values: the values; none of a folder by torch's writer, where reading them comes later.
    """

    def __init__(self, folder: Store, checkpoint: Checkpoint) -> None:
        self.folder = folder
        self.tensors = checkpoint.tensors
        self.names = checkpoint.keys.keys()
        self.values = checkpoint.values if checkpoint.has_digests else {}

    def has(self, key: str, name: str) -> bool:
        """Whether there is anything below ``name`` in the part ``key``."""
        full = f"{key}.{name}"
        within = self.values.get(key)
        if full in self.names or (isinstance(within, Mapping) and name in within):
            return True
        return any(each.startswith(f"{full}.") for each in self.names)

    def has_part(self, part: str) -> bool:
        """Whether there is anything in a part."""
        return any(name == part or name.startswith(f"{part}.") for name in self.names)

    def parts(self) -> str:
        """The first keys of the checkpoint, in words."""
        return ", ".join(sorted({name.partition(".")[0] for name in self.names}))[:200] or "nothing"

    def value(self, key: str, name: str) -> Any:
        """A value by its last key; None if there is none."""
        within = self.values.get(key)
        return within.get(name) if isinstance(within, Mapping) else self.values.get(f"{key}.{name}")

    def room(self, part: str, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A tensor to read into for each stored one below ``part``, by the rest of its name.

        It is the one in ``own`` with the same name, or a new one on the host.

        Raises:
            ValueError: there is no memory for a new one.
        """
        return {
            name.removeprefix(f"{part}."): own[name] if name in own else self._new(form)
            for name, form in self.tensors.items()
            if name.startswith(f"{part}.")
        }

    def _new(self, form: StoredForm) -> Tensor:
        try:
            return torch.empty(form.shape, dtype=form.dtype)
        except (RuntimeError, MemoryError, OverflowError):
            raise ValueError(
                f"{self.folder}: there is no memory for {form.name!r}, which holds {form.nbytes:,} bytes"
            ) from None

    def fitting(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors that have the dtype and shape of the stored ones."""
        return {
            name: each
            for name, each in tensors.items()
            if (form := self.tensors.get(name))
            and (form.dtype, form.shape) == (each.dtype, tuple(each.shape))
        }

    def check_values(self, key: str, state: Mapping[str, Any]) -> None:
        """Raise ValueError if the checkpoint lacks an entry that is no tensor, or has one that ``state`` lacks."""
        for name, value in state.items():
            if not isinstance(value, Tensor) and not self.has(key, name):
                raise ValueError(f"{self.folder} has no value {key}.{name}")
        within = self.values.get(key)
        others = {f"{key}.{name}" for name in (within if isinstance(within, Mapping) else ())}
        for name in others | {name for name in self.values if name.startswith(f"{key}.")}:
            rest = name.removeprefix(f"{key}.")
            if not any(rest == own or rest.startswith(f"{own}.") for own in state):
                raise ValueError(f"{self.folder} has the value {name}, which this {key} does not have")

    def check_names(self, parts: Collection[str], state: Mapping[str, Any]) -> None:
        """Raise ValueError if the checkpoint has tensors in these parts that ``state`` does not have."""
        own = NestedState.of(state).tensors
        for name in self.tensors:
            part = name.partition(".")[0]
            if part in parts and name not in own:
                raise ValueError(f"{self.folder} has the tensor {name}, which this {part} does not have")
