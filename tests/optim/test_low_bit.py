"""Optimizers whose state is a class made of several tensors, in ragged layouts: checkpoints that can be read again."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import shardwright as sw
from shardwright.engine import RaggedTensor
from tests.optim.low_bit import BLOCK, Codes, LowBit
from tests.support import multirank, world_mesh


def build(world_size: int, seed: int, rows: int = 16) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, rows))
    sw.fully_shard(model, mesh=world_mesh(world_size), layout="ragged")
    return model, sw.fully_shard_optimizer(
        LowBit(model.parameters()), needs=lambda p: BLOCK if p.dim() > 1 else 1
    )


def train(model: nn.Module, optimizer: Any, rank: int, *seeds: int) -> None:
    for seed in seeds:
        x = torch.randn(3, 8, generator=torch.Generator().manual_seed(10 * seed + rank))
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_equal(one: nn.Module, other: nn.Module) -> None:
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(p.full_tensor(), q.full_tensor())


def parts(optimizer: Any) -> list[torch.Tensor]:
    shown = [state["momentum"] for state in optimizer.state.values()]
    assert all(isinstance(value, RaggedTensor) for value in shown)
    return [value.to_local() for value in shown]


@multirank(1, 2, 3)
def test_state_of_codes_is_saved_and_loaded(rank: int, world_size: int, tmp_path: Path) -> None:
    model, optimizer = build(world_size, 0)
    train(model, optimizer, rank, 1, 2)
    coded = torch.tensor(float(any(isinstance(part, Codes) for part in parts(optimizer))))
    dist.all_reduce(coded)
    assert coded
    dcp.save(
        {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)},
        checkpoint_id=tmp_path,
    )
    again, loaded = build(world_size, 1)
    state = {"model": get_model_state_dict(again), "optimizer": get_optimizer_state_dict(again, loaded)}
    dcp.load(state, checkpoint_id=tmp_path)
    set_model_state_dict(again, state["model"])
    set_optimizer_state_dict(again, loaded, state["optimizer"])
    for one, other in zip(parts(optimizer), parts(loaded), strict=True):
        assert type(one) is type(other)
        if isinstance(one, Codes):
            assert torch.equal(one.codes, other.codes) and torch.equal(one.scale, other.scale)
    train(model, optimizer, rank, 3)
    train(again, loaded, rank, 3)
    assert_equal(model, again)


@multirank(2)
def test_loaded_codes_are_copies(rank: int, world_size: int) -> None:
    model, optimizer = build(world_size, 0)
    train(model, optimizer, rank, 1)
    again, loaded = build(world_size, 0)
    train(again, loaded, rank, 1)
    state = optimizer.state_dict()
    kept = copy.deepcopy(state)
    loaded.load_state_dict(state)
    train(again, loaded, rank, 2, 3)  # which must not write into what was loaded
    optimizer.load_state_dict(kept)
    train(model, optimizer, rank, 2, 3)
    assert_equal(model, again)


@multirank(2)
def test_codes_cannot_be_gathered(rank: int, world_size: int) -> None:
    """On every rank one error, also where a rank's own part is plain or empty."""
    model, optimizer = build(world_size, 0, rows=3)
    train(model, optimizer, rank, 1)
    some = [None] * world_size
    dist.all_gather_object(some, [isinstance(part, Codes) for part in parts(optimizer)])
    assert any(len(set(each)) == 2 for each in zip(*some, strict=True)), some
    with pytest.raises(NotImplementedError, match=r'(?s)cannot be gathered.*layout="per_parameter"'):
        get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    with pytest.raises(NotImplementedError, match="cannot be gathered"):
        optimizer.state_dict()["state"][0]["momentum"].redistribute()


@multirank(3)
def test_codes_that_a_layout_cuts_are_not_saved(rank: int, world_size: int, tmp_path: Path) -> None:
    """A part of 24 elements is whole blocks, and its first row of 18 is not: the checkpoint is not written."""
    model = nn.Sequential(nn.Linear(18, 4, bias=False))
    sw.fully_shard(model, mesh=world_mesh(world_size), layout=sw.Ragged("element"))
    optimizer = sw.fully_shard_optimizer(LowBit(model.parameters()), needs=BLOCK)
    model(torch.randn(3, 18)).sum().backward()
    optimizer.step()
    with pytest.raises(dcp.CheckpointException, match=r'(?s)Codes.*cannot be cut to.*layout="per_parameter"'):
        dcp.save(get_optimizer_state_dict(model, optimizer), checkpoint_id=tmp_path)


@multirank(2)
@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_state_of_torchao_is_saved_and_loaded(rank: int, world_size: int, name: str, tmp_path: Path) -> None:
    torchao = pytest.importorskip("torchao.optim", reason="torchao is not installed")
    states = []
    for scale in (1.0, 0.0):
        model = sw.fully_shard(nn.Linear(64, 192, bias=False), mesh=world_mesh(world_size), layout="ragged")
        optimizer = getattr(torchao, name)(model.parameters(), lr=0.01)
        p: Any = model.weight
        part = optimizer._subclass_zeros(p.to_local(), True, optimizer.block_size)
        part.copy_(scale * torch.randn(part.shape))
        optimizer.state[p] = {"exp_avg": RaggedTensor(part, p.spec)}  # its step would be compiled
        states.append((model, sw.fully_shard_optimizer(optimizer, needs=256)))
    (model, saved), (again, loaded) = states
    dcp.save(get_optimizer_state_dict(model, saved), checkpoint_id=tmp_path)
    state = get_optimizer_state_dict(again, loaded)
    dcp.load(state, checkpoint_id=tmp_path)
    set_optimizer_state_dict(again, loaded, state)
    one, other = (optimizer.state[model.weight]["exp_avg"].to_local() for model, optimizer in states)
    assert type(one) is type(other) and one.codes.any()
    for part_name in one.tensor_attrs:
        left, right = (getattr(t, part_name).view(torch.uint8) for t in (one, other))
        assert torch.equal(left, right), part_name
