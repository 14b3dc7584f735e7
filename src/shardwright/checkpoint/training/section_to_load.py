"""The sections of a run that a load restores, behind one interface: the model, its optimizers, ``extra``, hooks of
gradients and generators.

A section does not change the run when it is made. A load calls its methods in their order here, on every rank; the last
one only if it fails. Tensors are read into the run's own, where they fit the stored ones, and into new ones on the
host.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from shardwright.checkpoint.load.checkpoints import Checkpoint, StoredForm


class SectionToLoad(ABC):
    """A section of a run, with the tensors to read into.

    Attributes:
        key: the first key of the section in a checkpoint.
        tensors: nested as in the checkpoint; complete when the section is prepared. Other values in it do not count.
    """

    key: ClassVar[str]
    tensors: Mapping[str, Any]

    def prepare(self) -> None:  # noqa: B027  most sections have their tensors when they are made
        """Complete the tensors to read into. This may change the run."""

    def check(self) -> None:  # noqa: B027  most sections fit any checkpoint
        """Raise ValueError if the checkpoint does not fit the run. Nothing was read yet."""

    def is_new(self, name: str) -> bool:
        """Return whether the tensor of this name was made for the load.

        Such tensors are read before those of the run.
        """
        return False

    def accept(self, content: Mapping[str, Any]) -> None:  # noqa: B027
        """Raise if the stored values do not fit the run. New tensors are read, and no tensor of the run."""

    @abstractmethod
    def restore(self, content: Mapping[str, Any]) -> None:
        """Give the run what was read."""

    def undo(self) -> None:  # noqa: B027
        """Give the run back what was there before :meth:`prepare`. The section is not restored."""


# -- tensors to read into ----------------------------------------------------------------------------------------------


def targets_below(checkpoint: Checkpoint, name: str, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a tensor to read into for each stored one below a name, by the rest of its name.

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
    """Return a new tensor on the host to read into. Raises ValueError: there is no memory for it."""
    try:
        return torch.empty(form.shape, dtype=form.dtype)
    except (RuntimeError, MemoryError, OverflowError):
        raise ValueError(
            f"{checkpoint.place}: there is no memory for {form.name!r}, which holds {form.nbytes:,} bytes"
        ) from None


def of_stored_form(checkpoint: Checkpoint, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return those of the tensors that have the dtype and shape of the stored ones of the same names."""
    return {
        name: each
        for name, each in tensors.items()
        if (form := checkpoint.tensors.get(name))
        and (form.dtype, form.shape) == (each.dtype, tuple(each.shape))
    }
