"""The sections of a run that a load restores, behind one interface: the model, its optimizers, ``extra``, hooks of
gradients and generators.

A section does not change the run when it is made. A load calls its methods in their order here, on every rank; the last
one only if it fails.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar


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
        """Whether the tensor of this name was made for the load. Such tensors are read before those of the run."""
        return False

    def accept(self, content: Mapping[str, Any]) -> None:  # noqa: B027
        """Raise if the stored values do not fit the run. New tensors are read, and no tensor of the run."""

    @abstractmethod
    def restore(self, content: Mapping[str, Any]) -> None:
        """Give the run what was read."""

    def undo(self) -> None:  # noqa: B027
        """Give the run back what was there before :meth:`prepare`. The section is not restored."""
