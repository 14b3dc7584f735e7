"""State dicts, checkpoints, edits, copies, freezing and exceptions under layouts and strategies."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

import shardwright as sw
from tests.engine.kit.layouts import (
    adamw,
    at,
    backward,
    backward_plain,
    build,
    check_gradients,
    check_outputs,
    check_parameters,
    shard,
    synchronise,
)
from tests.engine.kit.places import On, on_meshes

WHOLE = StateDictOptions(full_state_dict=True)


def step_both(model: Any, plain: nn.Module, rank: int, world_size: int, step: int = 0) -> None:
    """A step of SGD by optimizers made for the parameters of now."""
    for one in (model, plain):
        one.zero_grad()
    backward(model, rank, step)
    backward_plain(plain, world_size, step)
    check_gradients(model, plain)
    for one in (model, plain):
        torch.optim.SGD(one.parameters(), lr=0.1).step()
        one.zero_grad()
    check_parameters(model, plain)


# -- state dicts -----------------------------------------------------------------------------------------------------


STATES = [
    (at("zero3", 2), "row"),
    (at("zero2", 3), "element"),
    (at("hsdp", 2, 2), "row"),
    (at("hfsdp", 2, 2), "per_parameter"),
    (at("hfsdp", 2, 2), "blocks"),
]


def trained(on: On, layout: str, rank: int, world_size: int) -> tuple[Any, Any, nn.Module, torch.optim.AdamW]:
    """A sharded and a plain model after the same step, with their optimizers."""
    plain = build()
    for block in plain.blocks:  # torch loads no optimizer state that lacks a parameter which needs gradients
        block.unused.requires_grad_(False)
    model = shard(copy.deepcopy(plain), on, layout)
    optimizer, expected = sw.fully_shard_optimizer(adamw(model.parameters())), adamw(plain.parameters())
    backward(model, rank)
    backward_plain(plain, world_size)
    for each in (optimizer, expected):
        each.step()
        each.zero_grad()
    check_parameters(model, plain)
    return model, optimizer, plain, expected


@pytest.mark.extensive("each place", but=("hsdp@2x2-*", "zero2@3-*"))
@on_meshes(STATES)
def test_full_state_dicts(rank: int, world_size: int, on: On, layout: str) -> None:
    model, optimizer, plain, expected = trained(on, layout, rank, world_size)
    found = get_model_state_dict(model, options=WHOLE)
    assert found.keys() == plain.state_dict().keys()
    for name, value in plain.state_dict().items():
        assert type(found[name]) is torch.Tensor
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)
    states = get_optimizer_state_dict(model, optimizer, options=WHOLE)["state"]
    wanted = get_optimizer_state_dict(plain, expected)["state"]
    assert states.keys() == wanted.keys()
    for name, state in wanted.items():
        assert states[name].keys() == state.keys()
        for key, value in state.items():
            assert type(states[name][key]) is torch.Tensor
            torch.testing.assert_close(states[name][key], value, rtol=1e-5, atol=1e-6)


@pytest.mark.extensive("each pair of layouts")
@on_meshes(STATES)
def test_checkpoints_load_into_other_layouts(
    rank: int, world_size: int, on: On, layout: str, tmp_path: Path
) -> None:
    """Model and optimizer, saved from one layout and strategy, go on in another as if nothing had happened."""
    model, optimizer, plain, expected = trained(on, layout, rank, world_size)
    states, optimizer_states = get_state_dict(model, optimizer)
    dcp.save({"model": states, "optimizer": optimizer_states}, checkpoint_id=tmp_path)
    backward_plain(plain, world_size, 1)
    expected.step()
    for other, name in (
        (at("zero3", world_size), "per_parameter"),
        (at("zero3", world_size), "blocks"),
        (on, "row"),
    ):
        fresh = build(1)
        for block in fresh.blocks:
            block.unused.requires_grad_(False)
        model = shard(fresh, other, name)
        optimizer = sw.fully_shard_optimizer(adamw(model.parameters()))
        states, optimizer_states = get_state_dict(model, optimizer)
        loaded = {"model": states, "optimizer": optimizer_states}
        dcp.load(loaded, checkpoint_id=tmp_path)
        set_state_dict(
            model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"]
        )
        backward(model, rank, 1)
        optimizer.step()
        check_parameters(model, plain)


@pytest.mark.extensive("each place", but=("hsdp@2x2-*", "hfsdp@2x2-blocks", "zero3@2-*"))
@on_meshes(STATES)
def test_plain_and_sharded_state_dicts_load(rank: int, world_size: int, on: On, layout: str) -> None:
    model, _, plain, _ = trained(on, layout, rank, world_size)
    sharded = {name: value.clone() for name, value in model.state_dict().items()}
    other = build(2)
    model.load_state_dict(other.state_dict())
    check_parameters(model, other, 0.0)
    model.load_state_dict(sharded)
    check_parameters(model, plain)
    averaged = {name: 0.5 * value + sharded[name] * 0.25 for name, value in sharded.items()}
    model.load_state_dict(averaged)
    with torch.no_grad():
        for q in plain.parameters():
            q.mul_(0.75)
    check_parameters(model, plain)
    set_model_state_dict(
        model,
        other.state_dict() if rank == 0 else {},
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    )
    check_parameters(model, other, 0.0)
    step_both(model, other, rank, world_size)


@pytest.mark.extensive("each place", but=("hsdp@2x2-row", "zero3@2-row"))
@on_meshes(STATES)
def test_half_and_back(rank: int, world_size: int, on: On, layout: str) -> None:
    model, _, plain, _ = trained(on, layout, rank, world_size)
    synchronise(model, plain)
    for one in (model, plain):
        one.half()
    check_parameters(model, plain, 0.0)
    for one in (model, plain):
        one.float()
    check_parameters(model, plain, 0.0)
    step_both(model, plain, rank, world_size, 1)


# -- edits, copies, freezing, exceptions -----------------------------------------------------------------------------


EDITED = [
    (at("zero3", 3), "row"),
    (at("hfsdp", 2, 2), "row"),
    (at("hfsdp", 2, 2), "per_parameter"),
    (at("hfsdp", 2, 1), "element"),
    (On((2, 3), (2, 2)), "blocks"),
]


@pytest.mark.extensive("each place", but=("hfsdp@2x2-row", "zero3@3-row"))
@on_meshes(EDITED)
def test_deep_copies_are_independent(rank: int, world_size: int, on: On, layout: str) -> None:
    plain = build()
    model = shard(copy.deepcopy(plain), on, layout)
    step_both(model, plain, rank, world_size)
    twin, plain_twin = copy.deepcopy(model), copy.deepcopy(plain)
    for step in (1, 2):
        step_both(model, plain, rank, world_size, step)
    check_parameters(twin, plain_twin)
    for step in (3, 4):
        step_both(twin, plain_twin, rank, world_size, step)
    check_parameters(model, plain)
    check_outputs(model, plain, rank)


def scale_data(p: torch.Tensor) -> None:
    p.data.mul_(1.25)


def set_data(p: torch.Tensor) -> None:
    p.data = p.data * 0.5


@torch.no_grad()
def scale(p: torch.Tensor) -> None:
    p.mul_(1.5)


@torch.no_grad()
def copy_whole(p: torch.Tensor) -> None:
    p.copy_(torch.linspace(-0.5, 0.5, p.numel()).view(p.shape))


EDITS: list[Callable[[torch.Tensor], None]] = [scale_data, set_data, scale, copy_whole]


@pytest.mark.extensive("each place", but=("hfsdp@2x2-*", "zero3@3-row"))
@on_meshes(EDITED)
def test_edits_are_seen(rank: int, world_size: int, on: On, layout: str) -> None:
    """After a backward, which leaves what the strategy keeps until the optimizer's step."""
    plain = build()
    model = shard(copy.deepcopy(plain), on, layout)
    for number, edit in enumerate(EDITS):
        backward(model, rank, number)
        for one in (model, plain):
            one.zero_grad()
            for p in one.parameters():
                edit(p)
        check_outputs(model, plain, rank)
        check_parameters(model, plain)
    step_both(model, plain, rank, world_size)


@pytest.mark.extensive("each place", but=("hfsdp@2x2-*", "zero3@2-*"))
@on_meshes(EDITED)
def test_state_dicts_load_strictly(rank: int, world_size: int, on: On, layout: str) -> None:
    model, other = shard(build(), on, layout), build(1)
    backward(model, rank)
    model.zero_grad()
    state = other.state_dict()
    model.load_state_dict(state, strict=True)
    check_outputs(model, other, rank)
    step_both(model, other, rank, world_size)
    for name, change in {"blocks.1.up.weight": "Missing key", "extra": "Unexpected key"}.items():
        wrong = (
            {**state, "extra": torch.ones(2)}
            if name == "extra"
            else {k: v for k, v in state.items() if k != name}
        )
        with pytest.raises(RuntimeError, match=f'{change}.*\n?.*"{name}"'):
            model.load_state_dict(wrong, strict=True)
    with pytest.raises(RuntimeError, match=r"blocks\.0\.up\.weight"):
        model.load_state_dict({**state, "blocks.0.up.weight": torch.ones(14, 7)}, strict=True)


@pytest.mark.extensive("each place", but=("hfsdp@2x1-*", "zero3@3-row-*", "hfsdp@2x2-row-late"))
@on_meshes(
    [
        (*place, way)
        for (i, place), (j, way) in itertools.product(enumerate(EDITED), enumerate(("late", "hold", "each")))
        if i % 3 != j
    ]
)
def test_freezing_between_micro_batches(
    rank: int, world_size: int, on: On, layout: str, accumulation: str
) -> None:
    """The first micro-batch's gradient of a parameter that is frozen since stays, as in plain torch."""
    plain = build()
    model = shard(copy.deepcopy(plain), on, layout)
    for step in range(2):
        for micro in range(3):
            model.set_requires_gradient_sync(accumulation != "hold" or micro == 2)
            model.set_is_last_backward(accumulation != "late" or micro == 2)
            backward(model, rank, step, micro)
            backward_plain(plain, world_size, step, micro)
            for one in (model, plain):
                one.blocks[0].up.weight.requires_grad_(micro == 2)
                one.head.requires_grad_(micro != 0)
                one.blocks[1].frozen.requires_grad_(micro == 1)
        check_gradients(model, plain)
        for one in (model, plain):
            torch.optim.SGD(one.parameters(), lr=0.1).step()
            one.zero_grad()
        check_parameters(model, plain)


class Boom(Exception):
    pass


@pytest.mark.extensive("each place", but=("2-3@2x2-*", "zero3@3-row"))
@on_meshes(EDITED)
def test_training_goes_on_after_an_exception_in_backward(
    rank: int, world_size: int, on: On, layout: str
) -> None:
    def fail(*_: object) -> None:
        raise Boom

    plain = build()
    model = shard(copy.deepcopy(plain), on, layout)
    for step, (sync, last) in enumerate(itertools.product((True, False), repeat=2)):
        model.set_requires_gradient_sync(sync)
        model.set_is_last_backward(last)
        backward(model, rank, 7)
        handle = model.blocks[0].up.register_full_backward_hook(fail)
        with pytest.raises(Boom):
            backward(model, rank, 8)
        handle.remove()
        model.zero_grad()
        model.set_requires_gradient_sync(True)
        model.set_is_last_backward(True)
        step_both(model, plain, rank, world_size, step)
