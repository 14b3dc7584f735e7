"""Sharded parameters that hold no values yet: what overwrites all of them gives values, what reads them is refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import shardwright as sw
from tests.engine.kit.torch_versions import subclasses_dispatch
from tests.init.models import assert_same, full
from tests.support import multirank


def valueless(begin: str, layout: Any = "per_parameter") -> Any:
    """A sharded linear layer without values; every rank has a part of its parameters."""
    with sw.deferred_init() if begin == "deferred" else torch.device("meta"):
        model = nn.Linear(4, 6)
    sw.fully_shard(model, layout=layout)
    if begin == "to_empty":
        model.to_empty(device="cpu")
    return model


Edit = Callable[[torch.Tensor], Any]
READING: dict[str, Edit] = {
    "mul_": lambda w: w.mul_(2),
    "add_": lambda w: w.add_(1),
    "operator": lambda w: w.__isub__(1),
    "div_": lambda w: w.div_(2),
    "lerp_": lambda w: w.lerp_(torch.ones_like(w), 0.5),
    "addcmul_": lambda w: w.addcmul_(torch.ones_like(w), torch.ones_like(w)),
    "clamp_": lambda w: w.clamp_(-1, 1),
    "masked_fill_": lambda w: w.masked_fill_(torch.ones_like(w).bool(), 1),
    "_foreach_mul_": lambda w: torch._foreach_mul_([w], 2.0),
    "_foreach_lerp_": lambda w: torch._foreach_lerp_([w], [torch.ones_like(w)], 0.5),
    "of data": lambda w: w.data.mul_(2),
    "detached": lambda w: w.detach().add_(1),
    "itself": lambda w: w.copy_(w),
    "out": lambda w: torch.mul(w, 2, out=w),
}
FILLING: dict[str, Edit] = {
    "fill_": lambda w: w.fill_(2),
    "zero_": lambda w: w.zero_(),
    "copy_": lambda w: w.copy_(torch.ones_like(w)),
    "_foreach_copy_": lambda w: torch._foreach_copy_([w], [torch.ones_like(w)]),
    "_foreach_zero_": lambda w: torch._foreach_zero_([w]),
    "ones_": lambda w: nn.init.ones_(w),
    "constant_": lambda w: nn.init.constant_(w.data, 3),
    "out": lambda w: torch.mul(torch.ones_like(w), 2, out=w),
    "whole data": lambda w: setattr(w, "data", torch.full((6, 4), 2.0)),
}
DRAWING: dict[str, Edit] = {
    "normal_": nn.init.normal_,
    "uniform_": nn.init.uniform_,
    "kaiming_normal_": nn.init.kaiming_normal_,
    "xavier_uniform_": nn.init.xavier_uniform_,
    "of data": lambda w: w.data.normal_().mul_(0.02).clamp_(-0.1, 0.1),
}


@multirank(2)
@pytest.mark.parametrize("begin", ["deferred", "meta", "to_empty"])
@pytest.mark.parametrize("layout", ["per_parameter", "ragged"])
def test_edits_that_read_are_refused(rank: int, world_size: int, begin: str, layout: str) -> None:
    if layout == "per_parameter" and not subclasses_dispatch:
        pytest.skip("in torch 2.11 operations on DTensors go past their subclasses")
    model = valueless(begin, layout)
    with torch.no_grad():
        for name, edit in READING.items():
            with pytest.raises(
                RuntimeError, match=r"(changes|reads) parameter 'weight' of unit .* no values"
            ) as told:
                edit(model.weight)
            assert "shardwright.materialize(model) or load_pretrained" in str(told.value), name
        nn.init.zeros_(model.weight)
        model.weight.add_(1).mul_(3)  # it has values now
        with pytest.raises(RuntimeError, match=r"Parameters 'bias' of unit"):
            model(torch.ones(1, 4))
        model.bias.zero_()
    assert model(torch.ones(1, 4)).tolist() == [[12.0] * 6]


@multirank(2)
@pytest.mark.parametrize("begin", ["deferred", "meta", "to_empty"])
@pytest.mark.parametrize("layout", ["per_parameter", "ragged"])
def test_what_overwrites_everything_gives_values(rank: int, world_size: int, begin: str, layout: str) -> None:
    edits = dict(FILLING)
    if layout == "per_parameter":
        del edits["_foreach_copy_"]  # DTensors have none
        if subclasses_dispatch:
            edits |= DRAWING
        else:  # edits of many and those of data are not seen
            del edits["_foreach_zero_"], edits["constant_"]
    for name, edit in edits.items():
        model = valueless(begin, layout)
        torch.manual_seed(0)
        with torch.no_grad():
            edit(model.weight)
            model.bias.zero_()
            expected = full(model.weight).clone()
        assert not expected.isnan().any(), name
        torch.testing.assert_close(model(torch.eye(4)).T, expected, rtol=0, atol=0, msg=name)
        sw.materialize(model)  # has nothing to do
        assert torch.equal(full(model.weight), expected), name


@multirank(2)
@pytest.mark.parametrize("layout", ["per_parameter", "ragged"])
def test_edits_that_nobody_sees_give_no_values(rank: int, world_size: int, layout: str) -> None:
    """Edits of local tensors, and in torch 2.11 all edits: a value that is NaN as before was not given."""
    torch.manual_seed(0)
    plain = nn.Linear(4, 6)
    torch.manual_seed(0)
    with sw.deferred_init():
        model: Any = nn.Linear(4, 6)
    sw.fully_shard(model, layout=layout)
    with torch.no_grad():
        model.weight.to_local().mul_(2)
        if not subclasses_dispatch and layout == "per_parameter":
            model.weight.add_(1)
    with pytest.raises(RuntimeError, match=r"Parameters 'weight', 'bias' of unit"):
        model(torch.ones(1, 4))
    with torch.no_grad():
        model.bias.to_local().copy_(torch.full_like(model.bias.to_local(), 2.0))
        plain.bias.fill_(2)
    sw.materialize(model)
    assert_same(model, plain)


@multirank(2)
def test_parts_are_no_values_until_there_are_all(rank: int, world_size: int) -> None:
    if not subclasses_dispatch:
        pytest.skip("in torch 2.11 operations on DTensors go past their subclasses")
    model = valueless("meta")
    with torch.no_grad():
        model.bias.zero_()
        model.weight[:, :3].fill_(1)
        with pytest.raises(RuntimeError, match=r"Parameters 'weight' of unit"):
            model(torch.ones(1, 4))
        with pytest.raises(RuntimeError, match=r"mul_ changes parameter 'weight'"):
            model.weight[:, :3].mul_(2)
        model.weight[:, 3:].fill_(2)
    assert model(torch.ones(1, 4)).tolist() == [[5.0] * 6]


@multirank(2)
def test_to_empty_gives_no_values(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(4, 6)
    model = valueless("to_empty")
    with pytest.raises(RuntimeError, match=r"Parameters 'weight', 'bias' of unit"):
        model(torch.ones(1, 4))
    torch.manual_seed(0)
    assert_same(sw.materialize(model), plain)


@multirank(2)
@pytest.mark.parametrize("layout", ["per_parameter", "ragged"])
def test_values_that_are_no_numbers_are_values(rank: int, world_size: int, layout: str) -> None:
    """A checkpoint of a run that broke can be loaded and looked at."""
    model = valueless("deferred", layout)
    broken = {"weight": torch.full((6, 4), torch.nan), "bias": torch.zeros(6)}
    model.load_state_dict(broken)
    if subclasses_dispatch or layout == "ragged":
        assert model(torch.ones(1, 4)).isnan().all()
        sw.materialize(model)
        assert full(model.weight).isnan().all()


def broadcast_of_to_local(weight: Any, rank: int) -> None:
    if rank == 0:
        weight.to_local().fill_(2)
    dist.broadcast(weight.to_local(), 0)


def scatter_to_local(weight: Any, rank: int) -> None:
    local = weight.to_local()
    parts = [torch.full_like(local, 2) for _ in range(dist.get_world_size())]
    dist.scatter(local, parts if rank == 0 else None, 0)


def all_reduce_of_to_local(weight: Any, rank: int) -> None:
    weight.to_local().fill_(2) if rank == 0 else weight.to_local().zero_()
    dist.all_reduce(weight.to_local())


def functional_collective(weight: Any, rank: int) -> None:
    weight.to_local().copy_(all_reduce(torch.ones_like(weight.to_local()), "sum", dist.group.WORLD))


def receive(weight: Any, rank: int) -> None:
    if rank == 0:
        weight.to_local().copy_(torch.full_like(weight.to_local(), 2.0))
        dist.send(weight.to_local(), 1)
    else:
        dist.recv(weight.to_local(), 0)


def distribute(weight: Any, rank: int) -> None:
    whole = torch.full(weight.shape, 2.0) if rank == 0 else torch.empty(weight.shape)
    placements = weight.placements if isinstance(weight, DTensor) else [Shard(0)]
    part = distribute_tensor(whole, weight.device_mesh, placements)
    weight.copy_(part if isinstance(weight, DTensor) else part.full_tensor())


def in_place_of_the_local_tensor(weight: Any, rank: int) -> None:
    weight._local_tensor.copy_(torch.full_like(weight._local_tensor, 2.0))


#: Ranks have parts of one size only in the first layout.
LOCAL_FILLS = {
    "per_parameter": [
        broadcast_of_to_local, scatter_to_local, all_reduce_of_to_local, functional_collective, receive, distribute,
        in_place_of_the_local_tensor,
    ],
    "ragged": [distribute, in_place_of_the_local_tensor],
}  # fmt: skip


@multirank(2)
@pytest.mark.parametrize("layout", ["per_parameter", "ragged"])
def test_fills_of_local_tensors_give_values(rank: int, world_size: int, layout: str) -> None:
    """Also by collectives, which move no version counter; afterwards the parameter may be read and edited."""
    for fill, begin in itertools.product(LOCAL_FILLS[layout], ("meta", "to_empty")):
        model = valueless(begin, layout)
        with torch.no_grad():
            fill(model.weight, rank)
            model.weight.mul_(2)
            model.bias.zero_()
        assert model(torch.ones(1, 4)).tolist() == [[16.0] * 6], (fill, begin)


@multirank(2)
@pytest.mark.parametrize("layout", ["per_parameter", "ragged"])
def test_values_on_some_ranks_only_are_refused_on_every_rank(rank: int, world_size: int, layout: str) -> None:
    model = valueless("meta", layout)
    with torch.no_grad():
        model.bias.zero_()
        if rank == 0:
            model.weight.to_local().fill_(2)
    with pytest.raises(
        RuntimeError, match=r"Parameters 'weight' of unit 0 \('Linear'\) hold no values yet on rank 1"
    ):
        model(torch.ones(1, 4))
    with torch.no_grad():
        model.weight.fill_(2)
    assert model(torch.ones(1, 4)).tolist() == [[8.0] * 6]


@multirank(3)
def test_a_rank_without_elements_waits_for_nobody(rank: int, world_size: int) -> None:
    """One row on three ranks: a broadcast over the others, a fill of an empty tensor, or none at all."""
    with torch.device("meta"):
        model: Any = nn.Linear(4, 1)
    sw.fully_shard(model)
    model.to_empty(device="cpu")
    with pytest.raises(RuntimeError, match=r"Parameters 'weight' of unit .* hold no values yet on rank 0"):
        model(torch.ones(1, 4))
    with torch.no_grad():
        if rank == 0:
            for p in model.parameters():
                torch.from_numpy(p.to_local().numpy()).fill_(2)  # which nothing sees
    assert model(torch.ones(1, 4)).item() == 10


@multirank(2)
def test_whole_numbers_from_collectives_are_values(rank: int, world_size: int) -> None:
    module: Any = nn.Module()
    module.scale = nn.Parameter(torch.empty(4, device="meta"))
    module.table = nn.Parameter(torch.empty(4, 2, dtype=torch.int64, device="meta"), requires_grad=False)
    module.forward = lambda x: x * module.scale + module.table.sum()
    sw.fully_shard(module)
    module.scale.data.zero_()
    with pytest.raises(RuntimeError, match=r"Parameters 'table' of unit"):
        module(torch.zeros(4))
    with torch.no_grad():
        dist.broadcast(module.table.to_local(), 0) if rank else dist.broadcast(
            torch.ones_like(module.table.to_local()), 0
        )
        if rank == 0:
            module.table.to_local().fill_(1)
    assert module(torch.zeros(4)).tolist() == [8.0] * 4


@multirank(2)
def test_state_dicts_of_rank_0_fill_what_has_no_values(rank: int, world_size: int) -> None:
    """torch writes into the values of the model's own state dict, and loads that."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
    for begin, layout in itertools.product(("meta", "to_empty"), ("per_parameter", "ragged")):
        with torch.device("meta"):
            model: Any = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
        sw.fully_shard(model, layout=layout)
        if begin == "to_empty":
            model.to_empty(device="cpu")
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, plain.state_dict() if rank == 0 else {}, options=options)
        torch.testing.assert_close(model(torch.ones(1, 3)), plain(torch.ones(1, 3)))
        assert_same(model, plain)
