"""State of whole-tensor optimizers: with owners alone, in state dicts on every rank, in checkpoints of any place."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

import shardwright as sw
from shardwright.engine import RaggedTensor
from tests.optim.kit import OPTIMIZERS
from tests.optim.whole import Odd, assert_equal_bits, full, set_gradients, state_leaves, twins
from tests.support import WorkerPools, multirank

NAMES = ["Muon", "Adafactor"]


def trained(
    world_size: int, name: str, strategy: str, layout: str, steps: range
) -> tuple[Any, Any, Any, Any]:
    """The plain and the sharded model with their optimizers after these steps."""
    plain, sharded = twins(world_size, strategy, layout, others=True)
    expected, ours = OPTIMIZERS[name](plain), sw.fully_shard_optimizer(OPTIMIZERS[name](sharded))
    train(plain, expected, steps)
    train(sharded, ours, steps)
    return plain, expected, sharded, ours


def train(model: Any, optimizer: Any, steps: range) -> None:
    for step in steps:
        set_gradients(model, step=step)
        optimizer.step()
        optimizer.zero_grad()


def assert_equal_state(plain: Odd, expected: Any, sharded: Odd, ours: Any) -> None:
    for (name, p), q in zip(plain.named_parameters(), sharded.parameters(), strict=True):
        mine, theirs = ours.state[q], expected.state[p]
        assert set(mine) == set(theirs), name
        for key, value in theirs.items():
            assert torch.equal(full(mine[key]), value), (name, key)


@multirank(2, 3)
@pytest.mark.parametrize("name", NAMES)
def test_state_lies_with_owners(rank: int, world_size: int, name: str) -> None:
    """Every tensor of it once in the world; what ranks hold adds up to the plain optimizer's bytes."""
    plain, expected, sharded, ours = trained(world_size, name, "zero3", "row", range(2))
    assert_equal_state(plain, expected, sharded, ours)
    held = torch.zeros(world_size)
    for p in sharded.parameters():
        for value in state_leaves(ours.state[p]):
            if isinstance(value, RaggedTensor):
                held[rank] += value.to_local().numel()
                whole_here = value.to_local().numel() in (0, value.numel())
                assert whole_here or value.spec == p.spec  # else element-wise, where the parameter lies
            else:
                assert isinstance(value, DTensor) or value.ndim == 0
    torch.distributed.all_reduce(held)
    everything = sum(
        v.numel() for p in plain.parameters() if p.ndim for v in state_leaves(expected.state[p]) if v.ndim
    )
    assert held.sum() == everything
    assert held.max() < everything  # more than one rank has some


@multirank(1, 2, 3)
@pytest.mark.parametrize("name", NAMES)
def test_state_dicts_full_and_sharded(rank: int, world_size: int, name: str) -> None:
    plain, expected, sharded, ours = trained(world_size, name, "zero3", "rows3", range(2))
    whole = get_optimizer_state_dict(sharded, ours, options=StateDictOptions(full_state_dict=True))
    want = get_optimizer_state_dict(plain, expected)
    assert whole["state"].keys() == want["state"].keys()
    for key, values in want["state"].items():
        assert whole["state"][key].keys() == values.keys()
        for k, value in values.items():
            assert torch.equal(full(whole["state"][key][k]), value), (key, k)
    for strategy, layout in (("zero3", "element"), ("ddp", "per_parameter")):
        for given, options in (
            (want, StateDictOptions(full_state_dict=True)),
            (want if rank == 0 else {}, StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)),
        ):
            _, _, other, second = trained(world_size, name, strategy, layout, range(5, 6))
            set_optimizer_state_dict(other, second, copy.deepcopy(given), options=options)
            assert_equal_state(plain, expected, other, second)
    _, _, other, second = trained(world_size, name, "zero3", "rows3", range(0))
    second.load_state_dict(copy.deepcopy(ours.state_dict()))
    assert_equal_state(plain, expected, other, second)


def save(rank: int, world_size: int, name: str, strategy: str, layout: str, folder: str) -> None:
    _, _, sharded, ours = trained(world_size, name, strategy, layout, range(2))
    model_state, optimizer_state = get_state_dict(sharded, ours)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)


def load(rank: int, world_size: int, name: str, strategy: str, layout: str, folder: str) -> None:
    plain = Odd(others=True)
    expected = OPTIMIZERS[name](plain)
    train(plain, expected, range(2))
    _, sharded = twins(world_size, strategy, layout, others=True)
    with torch.no_grad():
        for p in sharded.parameters():
            p.zero_()
    ours = sw.fully_shard_optimizer(OPTIMIZERS[name](sharded))
    model_state, optimizer_state = get_state_dict(sharded, ours)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(sharded, ours, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert_equal_bits(plain, sharded)
    assert_equal_state(plain, expected, sharded, ours)
    train(plain, expected, range(2, 4))
    train(sharded, ours, range(2, 4))
    assert_equal_bits(plain, sharded)


@pytest.mark.extensive("each optimizer")
@pytest.mark.multirank
@pytest.mark.parametrize("name", NAMES)
def test_checkpoints_go_on_bit_equal_anywhere(worker_pools: WorkerPools, tmp_path: Path, name: str) -> None:
    """Saved at one number of ranks, layout and strategy, loaded at another, trained on as one device would."""
    places = [(2, "zero3", "per_parameter"), (3, "zero1", "rows3"), (1, "zero3", "element"), (4, "hfsdp", "row"),
              (2, "ddp", "per_parameter"), (4, "hsdp", "element")]  # fmt: skip
    for place, (size, strategy, layout) in enumerate(places):
        arguments = {
            "name": name,
            "strategy": strategy,
            "layout": layout,
            "folder": str(tmp_path / str(place)),
        }
        worker_pools.run(save, size, **arguments)
    for place, to in zip(range(len(places)), [*places[1:], places[0]], strict=True):
        size, strategy, layout = to
        arguments = {
            "name": name,
            "strategy": strategy,
            "layout": layout,
            "folder": str(tmp_path / str(place)),
        }
        worker_pools.run(load, size, **arguments)
