"""Tensors with memory that recorded operations read. They are kept until these operations run, and checked for
changes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from shardwright.engine import digest, plain_tensors


@dataclass(frozen=True, eq=False, slots=True)
class Captured:
    """A tensor with memory that an entry reads."""

    tensor: torch.Tensor
    version: int
    digest: int | None = None  #: hash of memory that other libraries, such as numpy, may write

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Captured:
        # Inference tensors have no version counter, so changes cannot be detected.
        if tensor.is_inference():
            tensor = tensor.clone()
        return cls(tensor, 0 if tensor.is_inference() else tensor._version, _digest_of_foreign(tensor))

    def check(self) -> None:
        changed = not self.tensor.is_inference() and self.tensor._version != self.version
        if changed or (self.digest is not None and self.digest != _digest_of_foreign(self.tensor)):
            raise RuntimeError(
                f"A tensor of shape {tuple(self.tensor.shape)} was changed after the constructor of a deferred model "
                "had read it. Pass a clone of it to the constructor, or materialize the model first."
            )

    def hashes_of_values(self) -> list[int]:
        """Hashes of the tensors that hold its values, in the order of their elements."""
        return [int(digest(t)) for t in plain_tensors(self.tensor.detach()) if t.layout is torch.strided]


def _digest_of_foreign(tensor: torch.Tensor) -> int | None:
    if (
        type(tensor) not in (torch.Tensor, nn.Parameter)
        or tensor.layout is not torch.strided
        or tensor.is_meta
    ):
        return None
    return None if tensor.untyped_storage().resizable() else int(digest(tensor.detach()))
