"""Training on the simulated device, beside a plain model on the CPU. Imported only in processes of its own."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwright.comm import use_streams
from shardwright.memory import Slab, observe
from tests.engine.kit.models import full, loss_of, tokens
from tests.engine.kit.simulated import Case, Training, names_of, plain_net
from tests.engine.kit.wrong_streams import FORGOTTEN
from tests.support.sim import load


@functools.cache
def mesh_of(*shape: int) -> DeviceMesh:
    """A mesh of the device over all ranks, made once. All ranks must call it."""
    load().join_groups()
    return init_device_mesh("sim", shape, mesh_dim_names=names_of(shape))


class Scribbles:
    """Puts NaN into planned memory where a lease begins and where it ends, as the device does with its own memory."""

    def leased(self, slab: Slab) -> None:
        with torch.no_grad():
            slab.byte_view(0, slab.nbytes).fill_(255)

    releases = leased

    def resizes(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        pass

    def resized(self, storage: torch.UntypedStorage) -> None:
        pass


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
    with sim.running(seed), observe(Scribbles()) if case.memory != "dynamic" else nullcontext():
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
        everywhere = sim.all_gather((shown, failed))
        if any(failed for _, failed in everywhere):
            sim.leave_groups()
            mesh_of.cache_clear()
        if any(shown for shown, _ in everywhere):
            return seed, next(shown for shown, _ in everywhere if shown)
    return None


def train_across_streams(case: Case, seed: int, streams: int) -> Outcome:
    """Forward on one stream and backward on another, if there are two, which wait only for what they read.

    Between backward and the next forward of the accumulation nobody waits.
    """
    sim, mesh, api = load(), mesh_of(*case.on.shape), torch.get_device_module("sim")
    torch.manual_seed(0)
    with sim.running(seed):
        training = Training(case, api, mesh, sim.device, dist.get_rank())
        model, optimizer = training.model, training.optimizer
        forwards, backwards = api.Stream(), api.Stream()
        if streams == 1:
            backwards = forwards
        forwards.wait_stream(api.current_stream())
        for step in range(3):
            for micro in range(3):
                with api.stream(forwards):
                    batch = training.batch(step, micro)
                    loss = loss_of(model(batch), batch)
                    training.losses.append(loss.detach())
                with api.stream(backwards):
                    loss.backward()
            with api.stream(backwards):
                optimizer.step()
                optimizer.zero_grad()
            forwards.wait_stream(backwards)
        api.current_stream().wait_stream(forwards)
        return outcome_of(training)


def plain_outcome(case: Case, steps: int) -> Outcome:
    """The same training of a plain model on the CPU, on all ranks' data."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = plain_net()
    optimizer: torch.optim.Optimizer
    if case.uses_sgd:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        for micro in range(case.micros):
            for each in range(world):
                batch = tokens(step, micro, each)
                loss = loss_of(model(batch), batch)
                (loss / world).backward()
                if each == rank:
                    losses.append(loss.detach())
        if case.steps == "optimizer":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return Outcome(losses, [p.detach() for p in model.parameters()])


def check(case: Case, seeds: Iterable[int], steps: int = 3) -> None:
    """At once the numbers are those of the plain model, and in each order they are the same in bits."""
    expected = train(case, 0, steps)
    plain = plain_outcome(case, steps)
    # float32 sums differ in their order only; lower dtypes round sums or products.
    tolerance = 1e-5 if case.dtypes == (None, None) else 2e-2
    for field, ours, theirs in zip(Outcome._fields, expected, plain, strict=True):
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            where = f"{field}[{i}]"
            torch.testing.assert_close(
                a, b, rtol=tolerance, atol=tolerance, msg=functools.partial("{}: {}".format, where)
            )
    for seed in seeds:
        found = differences(expected, train(case, seed + 3 * dist.get_rank(), steps))
        assert not found, f"seed {seed}: {found}"
