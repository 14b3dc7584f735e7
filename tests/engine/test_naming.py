"""Operations that a sharded parameter does not have raise an error that names the parameter, in every layout."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardwright as sw
from tests.engine.kit.torch_versions import subclasses_dispatch
from tests.support import multirank, world_mesh

#: What needs whole rows or columns, as quantising in place does.
RAGGED: dict[str, Callable[[Any], Any]] = {
    "amin": lambda w: w.amin(1),
    "detached": lambda w: w.detach().cumsum(0),
    "data": lambda w: w.data[1:3],
    "numpy": lambda w: w.detach().numpy(),
    "tolist": lambda w: w.tolist(),
    "pickle": lambda w: pickle.dumps(w.detach()),
    "made": lambda w: (w.detach() * 2).sort(),
    "gradient": lambda w: w.grad.sort(),
}


@multirank(2)
def test_parameters_are_named(rank: int, world_size: int) -> None:
    mesh = world_mesh(world_size)
    for layout in ("ragged", sw.Ragged("element")):
        model: Any = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 5))
        for module in (model[0], model):
            sw.fully_shard(module, mesh=mesh, layout=layout)
        model(torch.ones(2, 5)).sum().backward()
        for name, operation in RAGGED.items():
            with pytest.raises(NotImplementedError, match=r"parameter 'weight' of unit '0'") as error:
                operation(model[0].weight)
            if name in ("made", "gradient"):
                assert "cut as parameter" in str(error.value)
        with pytest.raises(
            NotImplementedError, match=r"parameter '1.bias' of unit 'Sequential'.*shape \(5,\)"
        ):
            model[1].bias.flip(0)
        model[0].weight = nn.Parameter(torch.ones(7, 5))  # another memory, the same name
        model(torch.ones(2, 5))
        with pytest.raises(NotImplementedError, match=r"parameter 'weight' of unit '0'"):
            model[0].weight.amin(0)
    if not subclasses_dispatch:
        return
    rows: Any = sw.fully_shard(nn.Linear(5, 7), mesh=mesh)
    for operation in (lambda w: w.data[1:3].cumsum_(0), lambda w: w.data.view(-1)[::2].cumsum_(0)):
        with pytest.raises(
            NotImplementedError, match=r"part of parameter 'weight' of unit 'Linear', a sharded"
        ):
            operation(rows.weight)
