"""Hidden states as rows, one for each token, of which a loss takes some at a time. Nothing here computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from shardwright.engine.compat import local_of


class TokenRows:
    """Hidden states as rows, a row for each token: parts of them are leaves of a graph.

    Attributes:
        local: the rows, on this rank.
        number: of the rows.
        form: makes tensors like the hidden states.

    Raises:
        ValueError: the hidden states are cut over ranks.
    """

    def __init__(self, hidden: Tensor) -> None:
        self.form = Form.of(hidden)
        local = local_of(hidden) if isinstance(hidden, DTensor) else hidden
        self.local = local.detach().flatten(0, -2)
        self.number = self.local.shape[0]
        self._leading = (1,) * (hidden.ndim - 2)

    def part(self, start: int, stop: int) -> Tensor:
        shape = (*self._leading, stop - start, self.local.shape[1])
        return self.form.wrap(self.local[start:stop].view(shape), self.form.placements)


class Form(NamedTuple):
    """The shape and the mesh of hidden states."""

    shape: torch.Size
    mesh: DeviceMesh | None
    placements: Sequence[Placement]

    @classmethod
    def of(cls, hidden: Tensor) -> Form:
        if not isinstance(hidden, DTensor):
            return cls(hidden.shape, None, ())
        if not all(isinstance(each, Replicate) for each in hidden.placements):
            raise ValueError(
                f"hidden: expected whole hidden states in the head, got a DTensor with {hidden.placements}. Let the "
                "head's parallel style gather them, as ColwiseParallel(input_layouts=...) does"
            )
        return cls(hidden.shape, hidden.device_mesh, hidden.placements)

    def wrap(self, local: Tensor, placements: Sequence[Placement]) -> Tensor:
        if self.mesh is None:
            return local
        return DTensor.from_local(local, self.mesh, placements, run_check=False)
