"""A checkpoint in any form that can be converted, as names of tensors and values that are read one at a time.

Forms: ours, folders of torch's distributed checkpoint, safetensors, and files of ``torch.save``. Opening one reads what
describes it; nothing in it is called. A tensor of ours is compared with its digests while it is read.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwright.checkpoint.format.index import Keys, StoredValue, TensorForm
from shardwright.checkpoint.format.nested import NestedState, nested
from shardwright.checkpoint.load.checkpoints import Checkpoint, checkpoint_at
from shardwright.checkpoint.pretrained.files import TORCH_SUFFIXES, load_torch
from shardwright.checkpoint.pretrained.folder import open_model
from shardwright.checkpoint.storage.local_store import has_description
from shardwright.checkpoint.storage.stores import Store
from shardwright.common.errors import Damaged


@dataclass(frozen=True)
class SourceTensor(TensorForm):
    """A tensor that a conversion can read, from files of any form.

    Attributes:
        read: its values in this dtype, as a contiguous tensor on the host. Raises Damaged.
    """

    read: Callable[[torch.dtype], Tensor]


@dataclass(frozen=True)
class InputCheckpoint:
    """The content of a checkpoint: its tensors and values, and how to read them.

    Attributes:
        path: where it is.
        tensors: by name; in the order in which they are best read.
        value_paths: the keys of each value that is no tensor, by its name.
        values: reads these values. Raises Damaged for one that is not plain.
        ranks: that wrote it, where that is known.
    """

    path: Path | Store
    tensors: Mapping[str, SourceTensor]
    value_paths: Mapping[str, Keys] = field(default_factory=dict)
    values: Callable[[], Mapping[str, StoredValue]] = dict
    ranks: int = 1

    @property
    def is_flat(self) -> bool:
        """Whether it holds tensors under single names, as files of weights do."""
        return bool(self.tensors) and all(len(each.path) == 1 for each in self.tensors.values())


def open_source(location: Path | Store) -> InputCheckpoint:
    """Read what describes a checkpoint. Behind a URL there may be one of ours.

    Raises:
        FileNotFoundError: there is nothing.
        Damaged: it contradicts itself, or files are missing.
        ValueError: it has another form.
        OSError: the store behind a URL does not answer.
    """
    path = location if isinstance(location, Path) else location.path or location
    if not isinstance(path, Path) or has_description(path):
        with _named(path):
            checkpoint = checkpoint_at(path)
            checkpoint.check_lengths()
            return _of_checkpoint(path, checkpoint)
    if path.is_file() and path.suffix in TORCH_SUFFIXES:
        return _of_torch(path)
    stored = open_model(path)
    ordered = sorted(stored.items(), key=lambda item: (str(item[1].file), item[1].position))
    return InputCheckpoint(
        path,
        {
            name: SourceTensor((name,), each.dtype, tuple(each.shape), _viewed(each.view))
            for name, each in ordered
        },
    )


def _viewed(view: Callable[[], Tensor]) -> Callable[[torch.dtype], Tensor]:
    return lambda dtype: view().to(dtype).contiguous()


def _of_torch(path: Path) -> InputCheckpoint:
    content = load_torch(path)
    if not isinstance(content, Mapping):
        raise ValueError(f"{path} holds a {type(content).__name__}, not a dict, so its tensors have no names")
    state = NestedState.of(content)
    for each in state.tensors.values():
        each.boxes_to_save()  # raises an error for tensors without dense values
    tensors = {
        name: SourceTensor(each.path, each.dtype, each.shape, _viewed(each.tensor.detach))
        for name, each in state.tensors.items()
    }
    return InputCheckpoint(path, tensors, _paths(state.values), lambda: state.values)


def _paths(values: Mapping[str, StoredValue]) -> dict[str, Keys]:
    return {name: each.path for name, each in values.items()}


# -- checkpoints of ours, and of torch's distributed checkpoint --------------------------------------------------------


def _of_checkpoint(path: Path | Store, checkpoint: Checkpoint) -> InputCheckpoint:
    def read(name: str, dtype: torch.dtype) -> Tensor:
        with _named(path):
            return checkpoint.read_whole(name, dtype)

    state, names = _state_of(checkpoint)
    stored = {names[id(each.tensor)]: each for each in state.tensors.values()}
    tensors = {
        stored[name].name: SourceTensor(
            stored[name].path, form.dtype, form.shape, functools.partial(read, name)
        )
        for name, form in sorted(checkpoint.tensors.items(), key=lambda item: checkpoint.position(item[0]))
    }

    @functools.cache
    def values() -> Mapping[str, StoredValue]:
        with _named(path):
            keys = {str(each[0]) for each in checkpoint.keys.values()}
            read_values = checkpoint.values_below(keys, weights_only=True)
        return {
            name: StoredValue(each.path, _filled(each.value, checkpoint.keys, read_values))
            for name, each in state.values.items()
        }

    return InputCheckpoint(path, tensors, _paths(state.values), values, checkpoint.ranks or 1)


@contextlib.contextmanager
def _named(path: Path | Store) -> Iterator[None]:
    try:
        yield
    except Damaged as problem:
        raise Damaged(f"{path} is damaged: {problem}") from problem


def _state_of(checkpoint: Checkpoint) -> tuple[NestedState, dict[int, str]]:
    """Return the nested state of a checkpoint, with tensors on the meta device and names in the place of values; and
    the name of each tensor, by its identity."""
    leaves: dict[Any, Any] = {}
    names: dict[int, str] = {}
    for name, keys in checkpoint.keys.items():
        leaf: Any = name
        if (form := checkpoint.tensors.get(name)) is not None:
            leaf = torch.empty(form.shape, dtype=form.dtype, device="meta")
            names[id(leaf)] = name
        leaves[keys] = leaf
    try:
        state = NestedState.of(nested(leaves))
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise Damaged(f"the keys of its values contradict one another ({error})") from None
    if len(leaves) < len(checkpoint.keys):
        raise Damaged("two of its values have the same keys")
    return state, names


def _filled(value: Any, keys: Mapping[str, Keys], stored: Mapping[Keys, Any]) -> Any:
    """Return a nested value, whose leaves are names of stored values, with the values."""
    if isinstance(value, Mapping):
        return {key: _filled(each, keys, stored) for key, each in value.items()}
    if isinstance(value, list):
        return [_filled(each, keys, stored) for each in value]
    return stored[keys[value]]
