"""Pieces that optimizers need whole: declared, known or asked for, and refused where a layout cuts them."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import shardwright as sw
from tests.support import multirank, world_mesh


class Blocked(torch.optim.SGD):
    """Stands for an optimizer that scales blocks of 8 elements together."""

    def shard_needs(self, p: torch.Tensor) -> int:
        return 8


def linear(rows: int, columns: int, layout: Any, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return sw.fully_shard(nn.Linear(columns, rows, bias=False), layout=layout, **options)


@multirank(2, 3)
@pytest.mark.parametrize("columns", [4, 6, 8, 12])
@pytest.mark.parametrize("rows", [5, 12])
def test_the_layout_that_a_refusal_names_is_accepted(
    rank: int, world_size: int, rows: int, columns: int
) -> None:
    """Whatever is accepted cuts no block, counted over all ranks, and whatever is not says how to shard instead."""
    for layout in ("per_parameter", "ragged", sw.Ragged(3), sw.Ragged("element")):
        model = linear(rows, columns, layout)
        p = model.weight
        if hasattr(p, "spec"):
            cuts = [start for start, stop in p.spec.ranges if 0 < start < stop]
        else:
            cuts = [
                c for r in range(world_size) if 0 < (c := -(-rows // world_size) * r * columns) < p.numel()
            ]
        try:
            sw.fully_shard_optimizer(Blocked(model.parameters(), lr=0.1))
        except ValueError as error:
            assert any(cut % 8 for cut in cuts)
            named = re.search(r"layout=sw\.Ragged\((\d+)\)", str(error))
            assert named and "weight" in str(error) and "blocks of 8 consecutive elements" in str(error), (
                error
            )
            other = linear(rows, columns, sw.Ragged(int(named[1])))
            sw.fully_shard_optimizer(Blocked(other.parameters(), lr=0.1))
        else:
            assert not any(cut % 8 for cut in cuts)


@multirank(2)
def test_slices_of_another_dimension_and_vectors(rank: int, world_size: int) -> None:
    from torch.distributed.tensor import Shard

    def columns(p: torch.Tensor) -> Any:
        return Shard(1)

    for size, right in ((16, True), (8, False), (24, False)):  # 24: cut at 12
        model = linear(4, size, "per_parameter", shard_placement_fn=columns)
        if right:
            sw.fully_shard_optimizer(Blocked(model.parameters(), lr=0.1))
        else:
            with pytest.raises(ValueError, match=rf"cuts it before element {size // 2}, inside a block"):
                sw.fully_shard_optimizer(Blocked(model.parameters(), lr=0.1))
    vector = sw.fully_shard(nn.LayerNorm(20), layout="per_parameter")
    with pytest.raises(ValueError, match=r"layout=sw.Ragged\(1\): it never cuts a 1-D parameter inside 256"):
        sw.fully_shard_optimizer(Blocked(vector.parameters(), lr=0.1))
    with pytest.raises(ValueError, match=r"no layout keeps such blocks of a 1-D parameter whole"):
        sw.fully_shard_optimizer(torch.optim.SGD(vector.parameters(), lr=0.1), needs=24)
    replicated = sw.fully_shard(nn.LayerNorm(20), mesh=world_mesh(2), strategy="ddp")
    sw.fully_shard_optimizer(Blocked(replicated.parameters(), lr=0.1))


@multirank(2)
def test_groups_added_later_are_asked_about_too(rank: int, world_size: int) -> None:
    good, bad = linear(4, 16, "per_parameter"), linear(2, 4, "per_parameter")
    optimizer = sw.fully_shard_optimizer(Blocked(good.parameters(), lr=0.1))
    with pytest.raises(ValueError, match=r"'weight of Linear' of shape \(2, 4\) in one piece"):
        optimizer.add_param_group({"params": list(bad.parameters())})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": list(linear(4, 8, "ragged").parameters())})
    assert len(optimizer.param_groups) == 2


@multirank(1)
def test_optimizers_without_an_answer_are_refused(rank: int, world_size: int) -> None:
    model = linear(4, 4, "per_parameter")
    with pytest.raises(ValueError, match=r"LBFGS cannot step on shards: its search direction"):
        sw.fully_shard_optimizer(torch.optim.LBFGS(model.parameters()))
    with pytest.raises(
        ValueError, match=r"SparseAdam cannot step on shards: it accepts only sparse gradients"
    ):
        sw.fully_shard_optimizer(torch.optim.SparseAdam(model.parameters()))

    class Own(torch.optim.SGD):
        pass

    def own() -> Own:
        return Own(model.parameters(), lr=0.1)

    with pytest.raises(
        ValueError, match=r"does not know which pieces .* Own needs .* needs=1 if it updates each element"
    ):
        sw.fully_shard_optimizer(own())
    for wrong in (0, -3, True, 2.0, "rows", lambda p: None):
        with pytest.raises(TypeError, match=r'must be "tensor" or a number of elements, at least 1, got'):
            sw.fully_shard_optimizer(own(), needs=wrong)
    for right in (1, 4, lambda p: p.shape[-1]):
        sw.fully_shard_optimizer(own(), needs=right)


@multirank(1)
def test_needs_may_not_be_less_than_is_known(rank: int, world_size: int) -> None:
    model = linear(8, 8, "per_parameter")
    model.bias = None
    makers: list[Any] = [
        lambda p: torch.optim.Muon(p),
        lambda p: sw.Muon([{"params": list(p), "muon": True}]),
        lambda p: sw.AdamW8bit(p, block_size=16, min_size=1),
    ]
    for make, known in zip(makers, ("'tensor'", "'tensor'", "16"), strict=True):
        for needs in (1, 8, lambda p: 24):
            with pytest.raises(ValueError, match=rf"is too small: \w+ needs {known}"):
                sw.fully_shard_optimizer(make(model.parameters()), needs=needs)
    sw.fully_shard_optimizer(makers[2](model.parameters()), needs=32)
    sw.fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), needs=4)
    sw.fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), needs="tensor")
