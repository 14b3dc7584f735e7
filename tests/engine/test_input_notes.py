"""An error in forward has a note with the unit and the tensors that it got."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shardwright as sw
from tests.support import multirank, world_mesh


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.inner(x) * scale


@multirank(1)
def test_a_wrong_shape_names_the_unit_and_the_inputs(rank: int, world_size: int) -> None:
    model = nn.Sequential(Scaled())
    for module in (model[0].inner, model[0], model):
        sw.fully_shard(module, mesh=world_mesh(1))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        model(torch.zeros(2, 5))
    notes = caught.value.__notes__
    assert notes == ["In the forward of unit '0.inner' (Linear), called with (float32 [2, 5])."]
    with pytest.raises(TypeError) as caught_again:
        model[0](torch.zeros(2, 4), scale="big")
    (note,) = caught_again.value.__notes__
    assert note.endswith("'0' (Scaled), called with (float32 [2, 4], scale=str).")
    model(torch.zeros(2, 4)).sum().backward()
