"""Models without memory that other tools build wrong in silence are right here, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shardwright as sw
from tests.init.models import Ties, assert_built_alike, assert_same, full
from tests.support import multirank


class Rotary(nn.Module):
    """A buffer that no state dict has and no reset_parameters sets, and an attribute that is neither."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(7))
        self.register_buffer("frequencies", 1.0 / torch.arange(1, 9), persistent=False)
        self.table = torch.outer(torch.arange(4.0), self.frequencies)


@multirank(2)
def test_a_module_without_reset_parameters(rank: int, world_size: int) -> None:
    assert_built_alike(Rotary, 0, sw.fully_shard)
    with torch.device("meta"):
        model = Rotary()
    sw.fully_shard(model)
    with pytest.raises(ValueError, match=r"Rotary: 'scale', 'frequencies'"):
        sw.materialize(model)


def test_buffers_that_no_state_dict_has() -> None:
    model: Any = assert_built_alike(Rotary, 0)
    assert torch.equal(model.table, Rotary().table) and type(model.table) is torch.Tensor


@multirank(2)
def test_ties(rank: int, world_size: int) -> None:
    model: Any = assert_built_alike(Ties, 0, sw.fully_shard)
    assert model.head.weight is model.embed.weight


@multirank(2)
def test_weights_loaded_before_they_are_materialised(rank: int, world_size: int) -> None:
    torch.manual_seed(7)
    wanted = nn.Linear(5, 7)
    for sharded_first in (False, True):
        with sw.deferred_init():
            model = nn.Linear(5, 7)
        if sharded_first:
            sw.fully_shard(model)
        model.load_state_dict(wanted.state_dict())
        if not sharded_first:
            sw.fully_shard(model)
        assert_same(sw.materialize(model), wanted)


@multirank(2)
def test_optimizers_from_before_the_model_was_sharded(rank: int, world_size: int) -> None:
    with sw.deferred_init():
        model = nn.Linear(5, 7)
    optimizer = torch.optim.AdamW(model.parameters())
    sw.fully_shard(model)
    sw.materialize(model)
    model(torch.ones(2, 5)).sum().backward()
    before = full(model.weight).clone()
    optimizer.step()
    assert not torch.equal(full(model.weight), before)


@multirank(2, 3)
def test_ranks_have_their_own_parts_of_one_draw(rank: int, world_size: int) -> None:
    for layout in ("per_parameter", "ragged"):
        torch.manual_seed(0)
        with torch.device("meta"):
            model = nn.Linear(8, 12, bias=False)
        sw.fully_shard(model, layout=layout)
        sw.materialize(model)
        torch.manual_seed(0)
        assert torch.equal(full(model.weight), nn.Linear(8, 12, bias=False).weight)


@multirank(4)
def test_parameters_of_which_ranks_have_nothing(rank: int, world_size: int) -> None:
    assert_built_alike(lambda: nn.Linear(3, 1), 0, sw.fully_shard)
