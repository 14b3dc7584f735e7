"""Entries of a checkpoint by name: whether it has what a load wants, and the tensors to read into.

Each function looks at :attr:`Checkpoint.leaves`, so it need not know which parts of the saved state had tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shardwright.checkpoint.load.checkpoints import Checkpoint, StoredForm


def below(checkpoint: Checkpoint, name: str) -> dict[str, Any]:
    """The tensors and values below a name, by the rest of their names."""
    start = f"{name}."
    leaves = checkpoint.leaves.items()
    return {each.removeprefix(start): leaf for each, leaf in leaves if each.startswith(start)}


def has(checkpoint: Checkpoint, name: str) -> bool:
    """Whether there is anything of this name, or below it."""
    return name in checkpoint.leaves or bool(below(checkpoint, name))


def parts_in_words(checkpoint: Checkpoint) -> str:
    """The first keys of a checkpoint."""
    return ", ".join(sorted({name.partition(".")[0] for name in checkpoint.leaves}))[:200] or "nothing"


def room_below(checkpoint: Checkpoint, name: str, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A tensor to read into for each stored one below a name, by the rest of its name.

    It is the one in ``own`` with the same whole name, or a new one on the host.

    Raises:
        ValueError: there is no memory for a new one.
    """
    return {
        rest: own[form.name] if form.name in own else new_room(checkpoint, form)
        for rest, form in below(checkpoint, name).items()
        if isinstance(form, StoredForm)
    }


def new_room(checkpoint: Checkpoint, form: StoredForm) -> Tensor:
    """A new tensor on the host to read into. Raises ValueError: there is no memory for it."""
    try:
        return torch.empty(form.shape, dtype=form.dtype)
    except (RuntimeError, MemoryError, OverflowError):
        raise ValueError(
            f"{checkpoint.place}: there is no memory for {form.name!r}, which holds {form.nbytes:,} bytes"
        ) from None


def fitting(checkpoint: Checkpoint, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those of the tensors that have the dtype and shape of the stored ones of the same names."""
    return {
        name: each
        for name, each in tensors.items()
        if (form := checkpoint.tensors.get(name))
        and (form.dtype, form.shape) == (each.dtype, tuple(each.shape))
    }


def check_values(checkpoint: Checkpoint, part: str, state: Mapping[str, Any]) -> None:
    """Raise ValueError if a part lacks an entry of ``state`` that is no tensor, or has one that ``state`` lacks."""
    for name, value in state.items():
        if not isinstance(value, Tensor) and not has(checkpoint, f"{part}.{name}"):
            raise ValueError(f"{checkpoint.place} has no value {part}.{name}")
    if not checkpoint.has_digests:
        return  # values of torch's writer are read later
    for name, leaf in below(checkpoint, part).items():
        is_own = any(name == own or name.startswith(f"{own}.") for own in state)
        if not isinstance(leaf, StoredForm) and not is_own:
            raise ValueError(
                f"{checkpoint.place} has the value {part}.{name}, which this {part} does not have"
            )


def check_shapes(checkpoint: Checkpoint, part: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ValueError unless the tensors of a part have these names and shapes. Names the first that differs."""
    forms = {name: form for name, form in below(checkpoint, part).items() if isinstance(form, StoredForm)}
    for name in (*shapes, *forms):
        expected, found = shapes.get(name), forms[name].shape if name in forms else None
        if expected == found:
            continue
        if expected is None:
            text = f"no tensor {name}, found one of shape {list(found or ())}"
        else:
            text = f"{name} of shape {list(expected)}, found {'no such tensor' if found is None else list(found)}"
        raise ValueError(f"{checkpoint.place}: expected {text}; this is a checkpoint of another {part}")
