"""Training on the simulated device, beside a plain model on the CPU. Imported only in processes of its own."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwright.comm import use_streams
from tests.engine.kit.models import full
from tests.engine.kit.simulated import Case, Training, names_of
from tests.engine.kit.wrong_streams import FORGOTTEN
from tests.support.sim import load

_groups: dict[tuple[int, ...], dist.ProcessGroup] = {}


def group_of(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """Collectives of the CPU by gloo, and of the device by its own backend."""
    if ranks not in _groups:
        _groups[ranks] = dist.new_group(list(ranks), backend="cpu:gloo,sim:sim")
    return _groups[ranks]


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
    found = []
    for what, left, right in zip(Outcome._fields, one, other, strict=True):
        for i, (a, b) in enumerate(zip(left, right, strict=True)):
            if not torch.equal(a, b):
                where = (a != b).nonzero()[0].tolist()
                found.append(f"{what}[{i}] at {where}: {a[tuple(where)]:.8g}, not {b[tuple(where)]:.8g}")
    return found


@contextmanager
def put_in(defect: Any) -> Iterator[None]:
    """A wrong order, as tests/engine/kit/wrong_streams.py has them: a class of streams, or a patch of the engine."""
    if isinstance(defect, tuple):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(*defect)
            yield
    else:
        device = load().device
        with use_streams(device, defect(device)):
            yield


def forget_groups() -> None:
    """The next mesh gets new groups: a failure has left collectives of these unfinished."""
    _broken.append(_groups.copy())  # their destructors would wait
    _groups.clear()
    mesh_of.cache_clear()


_broken: list[Any] = []


def first_difference(case: Case, defect: Any, seeds: Iterable[int]) -> tuple[int, str] | None:
    """The first seed with which a wrong order shows on some rank, and what differs there."""
    sim = load()
    expected = train(case, 0)
    for seed in seeds:
        shown: str | None = None
        failed = False
        sim.extension.set_patience(5)
        try:
            with put_in(defect):
                found = differences(expected, train(case, seed + 3 * dist.get_rank()))
            shown = found[0] if found else None
        except Exception as error:  # garbage may be an index, or a flag that says that the ranks differ
            shown, failed = f"{type(error).__name__}: {error}".splitlines()[0], True
        finally:
            sim.extension.set_patience(50)
            FORGOTTEN.clear()
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, (shown, failed))
        if any(failed for _, failed in everywhere):
            forget_groups()
        if any(shown for shown, _ in everywhere):
            return seed, next(shown for shown, _ in everywhere if shown)
    return None
