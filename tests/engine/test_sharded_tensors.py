"""Sharded tensors that are no parameters, in both kinds of layouts: what their common base promises."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import shardwright as sw
from tests.engine.kit.torch_versions import subclasses_dispatch
from tests.support import multirank, world_mesh


def sharded(layout: str, world_size: int) -> torch.Tensor:
    model = nn.Linear(4, 3)
    sw.fully_shard(model, mesh=world_mesh(world_size), layout=layout)
    return model.weight.detach().clone().requires_grad_()


@multirank(1, 2)
@pytest.mark.parametrize("layout", ["per_parameter", "element"])
def test_a_deep_copy_has_gradient_and_attributes_of_its_own(rank: int, world_size: int, layout: str) -> None:
    if not subclasses_dispatch:
        pytest.skip("DTensor's own deepcopy on this torch")
    tensor = sharded(layout, world_size)
    tensor.grad = torch.full_like(tensor, 2.0)
    tensor.notes = ["mine"]  # type: ignore[attr-defined]
    copied = copy.deepcopy(tensor)
    assert type(copied) is type(tensor) and copied.requires_grad
    before = copied.full_tensor().detach().clone()
    with torch.no_grad():
        tensor.zero_()
        tensor.grad.zero_()
    tensor.notes.append("later")  # type: ignore[attr-defined]
    assert torch.equal(copied.full_tensor(), before) and before.any()
    assert copied.grad is not None and torch.equal(copied.grad.full_tensor(), torch.full((3, 4), 2.0))
    assert copied.notes == ["mine"]
    with pytest.raises(RuntimeError, match="leaves of the graph"):
        copy.deepcopy(copied * 2)


@multirank(2)
@pytest.mark.parametrize("layout", ["per_parameter", "element"])
def test_data_is_replaced_by_a_tensor_of_the_kind_alone(rank: int, world_size: int, layout: str) -> None:
    if not subclasses_dispatch:
        pytest.skip("DTensor's own .data on this torch")
    tensor, other = sharded(layout, world_size), sharded(layout, world_size)
    tensor.data = other.data
    assert torch.equal(tensor.full_tensor(), other.full_tensor())
    with pytest.raises(NotImplementedError, match="accepts only a"):
        tensor.data = torch.zeros(3, 4)
