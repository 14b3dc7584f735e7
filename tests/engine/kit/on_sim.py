"""Training on the simulated device, beside a plain model on the CPU. Imported only in processes of its own."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import shardwright as sw
from tests.engine.kit.models import full, loss_of, tokens
from tests.engine.kit.simulated import Case, Training, names_of, plain_net
from tests.support.sim import load


@functools.cache
def group_of(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """Collectives of the CPU by gloo, and of the device by its own backend."""
    return dist.new_group(list(ranks), backend="cpu:gloo,sim:sim")


@functools.cache
def mesh_of(*shape: int) -> DeviceMesh:
    """A mesh of the device over all ranks, made once. All ranks must call it."""
    load()
    ranks = torch.arange(math.prod(shape)).view(shape)
    mine = []
    for axis in range(len(shape)):
        for row in ranks.movedim(axis, -1).reshape(-1, shape[axis]).tolist():
            group = group_of(tuple(row))
            if dist.get_rank() in row:
                mine.append(group)
    if len(shape) == 1:
        return DeviceMesh.from_group(mine[0], "sim", mesh_dim_names=names_of(shape))
    return DeviceMesh.from_group(mine, "sim", mesh=ranks, mesh_dim_names=names_of(shape))


class Outcome(NamedTuple):
    """Losses of this rank, and full weights at the end."""

    losses: list[torch.Tensor]
    weights: list[torch.Tensor]


def outcome_of(training: Training) -> Outcome:
    weights = [full(p.detach()).cpu() for p in training.model.parameters()]
    return Outcome([loss.cpu() for loss in training.losses], weights)


def train(case: Case, seed: int, steps: int = 4) -> Outcome:
    """A training on the device, in the order of the seed."""
    sim, mesh = load(), mesh_of(*case.on.shape)
    torch.manual_seed(0)
    with sim.running(seed):
        training = Training(case, torch.get_device_module("sim"), mesh, sim.device, dist.get_rank())
        training.run(steps)
        return outcome_of(training)


def differences(one: Outcome, other: Outcome) -> list[str]:
    """Where two outcomes are not equal in bits."""
    found = [f"loss {i}: {a} and {b}" for i, (a, b) in enumerate(zip(one.losses, other.losses, strict=True)) if not same(a, b)]
    return found + [f"weight {i}" for i, (a, b) in enumerate(zip(one.weights, other.weights, strict=True)) if not same(a, b)]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(torch.equal(a, b))
