"""Tensors that a load reads into: the run's own, where they fit the stored ones, and new ones on the host."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from shardwright.checkpoint.load.checkpoints import Checkpoint, StoredForm


def targets_below(checkpoint: Checkpoint, name: str, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A tensor to read into for each stored one below a name, by the rest of its name.

    It is the one in ``own`` with the same whole name, or a new one on the host.

    Raises:
        ValueError: there is no memory for a new one.
    """
    return {
        rest: own[form.name] if form.name in own else new_target(checkpoint, form)
        for rest, form in checkpoint.below(name).items()
        if isinstance(form, StoredForm)
    }


def new_target(checkpoint: Checkpoint, form: StoredForm) -> Tensor:
    """A new tensor on the host to read into. Raises ValueError: there is no memory for it."""
    try:
        return torch.empty(form.shape, dtype=form.dtype)
    except (RuntimeError, MemoryError, OverflowError):
        raise ValueError(
            f"{checkpoint.place}: there is no memory for {form.name!r}, which holds {form.nbytes:,} bytes"
        ) from None


def of_stored_form(checkpoint: Checkpoint, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those of the tensors that have the dtype and shape of the stored ones of the same names."""
    return {
        name: each
        for name, each in tensors.items()
        if (form := checkpoint.tensors.get(name))
        and (form.dtype, form.shape) == (each.dtype, tuple(each.shape))
    }
