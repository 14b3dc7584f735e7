"""Optimizers that need whole tensors, with what they step in the CPU's memory: the bits of the run without offload."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import shardwright as sw
from shardwright.engine import Host
from shardwright.engine.compat import local_of
from shardwright.optim.host_state import HostState
from shardwright.optim.whole import plan
from tests.engine.kit.models import Model, build, shard
from tests.engine.kit.offload import assert_same, counted
from tests.engine.kit.offload_state import STATE, assert_equal, train, unawaited
from tests.engine.kit.places import On, on, on_meshes
from tests.support import multirank
from tests.support.fake import fake_ranks
from tests.support.races import Simulator
from tests.support.stand_in import stand_in_device

Make = Callable[[Model], torch.optim.Optimizer]
POLICIES = {"all": sw.Offload(), "state": STATE}


def muon(model: Model) -> torch.optim.Optimizer:
    return sw.Muon(model.named_parameters(), lr=0.02, adamw={"lr": 0.01})


def adafactor(model: Model) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(model.parameters(), lr=0.01)


def small_rounds() -> AbstractContextManager[Any]:
    """Several of them, though the tensors are small."""
    patch = pytest.MonkeyPatch()
    patch.setattr(plan, "SMALLEST_ROUND", 1)
    stack = contextlib.ExitStack()
    stack.callback(patch.undo)
    return stack


OPTIMIZERS: dict[str, Make] = {"muon": muon, "adafactor": adafactor}


class Row(NamedTuple):
    at: On
    layout: str
    optimizer: str
    policy: str


def rows() -> list[Row]:
    zero3, hsdp, zero1 = on("zero3", (1,), (4,)), on("hsdp", (2, 2)), on("zero1", (2,))
    return [
        Row(zero3[0], "per_parameter", "muon", "all"),
        Row(zero3[1], "ragged", "adafactor", "all"),
        Row(zero3[1], "per_parameter", "muon", "state"),
        Row(hsdp[0], "ragged", "muon", "all"),
        Row(hsdp[0], "per_parameter", "adafactor", "state"),
        Row(zero1[0], "per_parameter", "adafactor", "all"),
        Row(zero1[0], "ragged", "muon", "state"),
    ]


@on_meshes(rows())
def test_bits_of_the_run_without_offload(
    rank: int, world_size: int, at: On, layout: str, optimizer: str, policy: str
) -> None:
    models, states = [], []
    for offloads in (False, True):
        with stand_in_device() if offloads else contextlib.nullcontext(), small_rounds():
            options: dict[str, Any] = {"mesh": at.mesh, "strategy": at.strategy, "layout": layout}
            model = build()
            # One unit is not offloaded.
            sw.fully_shard(model.blocks[0], **options)
            options["offload_policy"] = POLICIES[policy] if offloads else sw.OffloadPolicy()
            sw.fully_shard(model.blocks[1], **options)
            sw.fully_shard(model, **options)
            made = sw.fully_shard_optimizer(OPTIMIZERS[optimizer](model))
            train(model, made, rank, 3)
            models.append(model)
            states.append(made.state_dict())
    assert_same(*models)
    assert_equal(*states)


@multirank(2)
@pytest.mark.parametrize("policy", POLICIES)
def test_state_goes_in_and_out(rank: int, world_size: int, policy: str) -> None:
    plain = shard(build())
    ordinary = sw.fully_shard_optimizer(muon(plain))
    train(plain, ordinary, rank, 2)
    with stand_in_device():
        model = shard(build(seed=3), offload_policy=POLICIES[policy])
        optimizer = sw.fully_shard_optimizer(muon(model))
        train(model, optimizer, rank, 1, first=7)
        model.load_state_dict(plain.state_dict())
        for full in (False, True):
            options = StateDictOptions(full_state_dict=full)
            given = copy.deepcopy(get_optimizer_state_dict(plain, ordinary, options=options))
            set_optimizer_state_dict(model, optimizer, given, options=options)
        with counted() as most:
            train(model, optimizer, rank, 2, first=5)
        train(plain, ordinary, rank, 2, first=5)
        assert most[False, "optimizer state"] > 0  # it did pass through the device
        assert_same(plain, model)


@multirank(2)
def test_a_step_in_backward_on_whole_tensors_is_refused(rank: int, world_size: int) -> None:
    with stand_in_device():
        model = shard(build(), offload_policy=sw.Offload())
        with pytest.raises(NotImplementedError, match="needs whole tensors"):
            sw.optim.in_backward(muon(model))


def simulate(policy: str, ranks: int = 2) -> Simulator:
    with fake_ranks(ranks), small_rounds(), Simulator() as simulator:
        model = shard(build(layers=3), offload_policy=POLICIES[policy])
        matrices = [p for p in model.parameters() if p.ndim == 2]
        optimizer = sw.fully_shard_optimizer(torch.optim.Muon(matrices, lr=1e-3))
        for step in range(4):
            train(model, optimizer, 0, 1, first=step)
            for p in matrices:
                local_of(p).clone()
    return simulator


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("policy", POLICIES)
def test_whole_tensors_are_stepped_in_order(policy: str, ranks: int) -> None:
    simulator = simulate(policy, ranks)
    simulator.check()
    assert simulator.operations["upload"] and simulator.operations["download"]


def test_values_read_before_they_are_back_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """With several ranks the host waits anyway, for what they tell each other."""
    monkeypatch.setattr(Host, "wait", lambda self: None)
    races = simulate("all", ranks=1).races
    assert any(
        "write by aten::copy_ on 'computation'" in race and "on 'upload'" not in race for race in races
    )


def test_state_stepped_before_it_is_there_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostState, "take", unawaited(HostState.take))
    races = simulate("state").races
    assert any("on 'upload'" in race and "on 'computation'" in race for race in races), races
