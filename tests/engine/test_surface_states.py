"""State dicts by ``torch.distributed.checkpoint``, as with torch's ``fully_shard``."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.engine.kit.subclasses import backward, check, data, full, gradients
from tests.engine.kit.surface import averaged, both, build, ours, shard
from tests.support import multirank


def trained(library: str, rank: int, seed: int = 0) -> tuple[Any, torch.optim.Optimizer]:
    model = shard(library, build(seed))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    backward(model, rank)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


@multirank(2)
@both
def test_sharded_state_dicts(rank: int, world_size: int, library: str) -> None:
    model, optimizer = trained(library, rank)
    state, optimizer_state = get_state_dict(model, optimizer)
    assert list(state) == [n for n, _ in build().named_parameters()]
    for name, value in state.items():
        assert isinstance(value, DTensor) and value.placements == (Shard(0),)
        assert optimizer_state["state"][name]["exp_avg"].placements == (Shard(0),)
    other, other_optimizer = trained(library, rank, seed=1)
    set_model_state_dict(other, {n: v.clone() for n, v in state.items()})
    set_optimizer_state_dict(
        other, other_optimizer, copy.deepcopy(optimizer_state)
    )  # the counters are shared
    check({n: full(p) for n, p in other.named_parameters()}, {n: full(v) for n, v in state.items()}, tol=0)
    for each, each_optimizer in ((model, optimizer), (other, other_optimizer)):
        backward(each, rank, 1)
        each_optimizer.step()
    model.reshard()
    other.reshard()
    found, expected = ({n: full(p) for n, p in m.named_parameters()} for m in (other, model))
    check(found, expected, tol=0)


@multirank(2)
@both
@pytest.mark.parametrize("cpu_offload", [False, True])
def test_full_state_dicts(rank: int, world_size: int, library: str, cpu_offload: bool) -> None:
    model, optimizer = trained(library, rank)
    values = {n: full(p).detach().clone() for n, p in model.named_parameters()}
    options = StateDictOptions(full_state_dict=True, cpu_offload=cpu_offload)
    state = get_model_state_dict(model, options=options)
    optimizer_state = get_optimizer_state_dict(model, optimizer, options=options)
    if cpu_offload and rank:  # only rank 0 gets it
        assert not state and not optimizer_state
        return
    assert all(type(v) is torch.Tensor for v in state.values())
    check(state, values, tol=0)
    plain = build(seed=5)
    plain.load_state_dict(state)
    assert optimizer_state["state"]["head.weight"]["exp_avg"].shape == (3, 6)


@multirank(2)
@both
@pytest.mark.parametrize("strict", [True, False])
def test_loading_full_state_dicts(rank: int, world_size: int, library: str, strict: bool) -> None:
    """Every rank has the values, or rank 0 alone has them and sends each rank its part."""
    source = build(seed=7).state_dict()
    if not strict:
        del source["head.bias"]
    for broadcast in (False, True):
        model, _ = trained(library, rank)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast, strict=strict)
        before = {n: full(p).detach().clone() for n, p in model.named_parameters()}
        mine = {n: v.clone() for n, v in source.items()} if not broadcast or rank == 0 else {}
        set_model_state_dict(model, mine, options=options)
        expected = {**before, **source}
        check({n: full(p) for n, p in model.named_parameters()}, expected, tol=0)
        plain = build()
        plain.load_state_dict(expected)
        with torch.no_grad():
            torch.testing.assert_close(model(data(rank)), plain(data(rank)), rtol=1e-5, atol=1e-6)


@multirank(2)
@ours
@pytest.mark.parametrize("evaluated", [True, False])
def test_state_dicts_between_forward_and_backward(
    rank: int, world_size: int, library: str, evaluated: bool
) -> None:
    """FSDP2's root shows full parameters then: these functions raise, or miss it."""
    model, optimizer = trained(library, rank)
    with torch.set_grad_enabled(not evaluated):
        model(data(rank))
    options = StateDictOptions(full_state_dict=True)
    state = get_model_state_dict(model, options=options)
    assert "head.weight" in get_optimizer_state_dict(model, optimizer, options=options)["state"]
    check(state, {n: full(p) for n, p in model.named_parameters()}, tol=0)
    set_model_state_dict(model, build(seed=7).state_dict(), options=options)
    check({n: full(p) for n, p in model.named_parameters()}, build(seed=7).state_dict(), tol=0)


@multirank(2)
@both
def test_loading_a_full_optimizer_state_from_rank_0(rank: int, world_size: int, library: str) -> None:
    model, optimizer = trained(library, rank)
    state = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    other, other_optimizer = trained(library, rank, seed=1)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_optimizer_state_dict(other, other_optimizer, state if rank == 0 else {}, options=options)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        for key in ("exp_avg", "exp_avg_sq"):
            found, expected = other_optimizer.state[q][key], optimizer.state[p][key]
            assert isinstance(found, DTensor)
            torch.testing.assert_close(full(found), full(expected), rtol=0, atol=0)


@multirank(2)
@both
def test_state_dicts_without_frozen_parameters(rank: int, world_size: int, library: str) -> None:
    model = shard(library, build())
    model.blocks[1].requires_grad_(False)
    state = get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True))
    assert list(state) == [n for n, _ in build().named_parameters() if not n.startswith("blocks.1")]


@multirank(2)
@both
@pytest.mark.parametrize("how", ["weights_only", "pickle", "deepcopy"])
def test_each_rank_keeps_its_own_state_dict(rank: int, world_size: int, library: str, how: str) -> None:
    """The plainest checkpoint: torch.save on every rank, or deepcopy to keep the best weights in memory."""
    model, optimizer = trained(library, rank)
    state: Any = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    if how == "deepcopy":
        state = copy.deepcopy(state)
    else:
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        state = torch.load(file, weights_only=how == "weights_only")
    other, other_optimizer = trained(library, rank, seed=1)
    other.load_state_dict(state["model"])
    other_optimizer.load_state_dict(state["optimizer"])
    for each, each_optimizer in ((model, optimizer), (other, other_optimizer)):
        backward(each, rank, 1)
        each_optimizer.step()
    found, expected = ({n: full(p) for n, p in m.named_parameters()} for m in (other, model))
    check(found, expected, tol=0)


@multirank(2)
@pytest.mark.parametrize("source, target", [("torch", "shardwright"), ("shardwright", "torch")])
def test_checkpoints_of_one_load_into_the_other(rank: int, world_size: int, source: str, target: str) -> None:
    """By the sharded state dicts of torch.distributed.checkpoint, which name and cut everything alike."""
    model, optimizer = trained(source, rank)
    other, other_optimizer = trained(target, rank, seed=1)
    state, optimizer_state = get_state_dict(model, optimizer)
    set_model_state_dict(other, state)
    set_optimizer_state_dict(
        other, other_optimizer, copy.deepcopy(optimizer_state)
    )  # its counters are shared
    for each, each_optimizer in ((model, optimizer), (other, other_optimizer)):
        backward(each, rank, 1)
        each_optimizer.step()
    found, expected = ({n: full(p) for n, p in m.named_parameters()} for m in (other, model))
    check(found, expected)


@multirank(2)
@both
def test_loading_distributed_tensors_by_assignment(rank: int, world_size: int, library: str) -> None:
    """FSDP2's own recipe: distribute each full tensor, then load_state_dict(assign=True)."""
    source = build(seed=7).state_dict()
    model = shard(library, build())
    parts = {
        n: nn.Parameter(distribute_tensor(v, p.device_mesh, p.placements))
        for (n, v), p in zip(source.items(), model.parameters(), strict=True)
    }
    model.load_state_dict(parts, assign=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    plain = build(seed=7)
    backward(model, rank)
    check(gradients(model), averaged(plain, world_size))
    optimizer.step()
    with torch.no_grad():
        for name, g in averaged(plain, world_size).items():
            plain.get_parameter(name).sub_(0.5 * g)
        torch.testing.assert_close(model(data(rank)), plain(data(rank)), rtol=1e-5, atol=1e-6)
