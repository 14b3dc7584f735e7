"""Training on the simulated device, beside a plain model on the CPU. Imported only in processes of its own."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardwright as sw
from shardwright.engine import GraphedStep
from shardwright.engine.comm import Communicator, HostFlag, use_streams
from shardwright.engine.memory import Slab, observe
from tests.engine.kit.models import full, loss_of
from tests.engine.kit.plain_training import farness
from tests.engine.kit.simulated import Case, Net, Outcome, Training, names_of
from tests.engine.kit.wrong_streams import FORGOTTEN, WRONG, WRONG_GRAPHS
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
            # With a wrong order a release may come before the end of the gather, when other views have no memory.
            view = slab.view if slab.revealed else slab.landing_view
            view(torch.uint8, 0, (slab.nbytes,)).fill_(255)

    releases = leased

    def resizes(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        pass

    def resized(self, storage: torch.UntypedStorage) -> None:
        pass

    def exchanged(self, one: torch.UntypedStorage, two: torch.UntypedStorage) -> None:
        pass


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
        if len(left) != len(right):
            found.append(f"{len(left)} {what}, not {len(right)}")
        for i, (a, b) in enumerate(zip(left, right, strict=False)):
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


@contextmanager
def put_in_captures(defect: Any) -> Iterator[None]:
    """A wrong order that is there only while a graph is captured."""
    original = GraphedStep._capture

    def capture(self: GraphedStep, *given: Any) -> Any:
        streams: Any = self._streams
        kind = type(streams)
        with pytest.MonkeyPatch.context() as patch:
            if isinstance(defect, tuple):
                patch.setattr(*defect)
            else:
                streams.__class__ = defect
            try:
                return original(self, *given)
            finally:
                streams.__class__ = kind

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GraphedStep, "_capture", capture)
        yield


def first_difference(case: Case, defect: Any, seeds: Iterable[int]) -> tuple[int, str] | None:
    """The first seed with which a wrong order shows on some rank, and what differs there."""
    sim = load()
    steps = 5 if case.graphed else 4
    expected = train(case._replace(graphed=False), 0, steps)
    for seed in seeds:
        shown: str | None = None
        failed = False
        sim.extension.set_patience(5)
        try:
            with put_in_captures(defect) if case.graphed else put_in(defect):
                found = differences(expected, train(case, seed + 3 * dist.get_rank(), steps))
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


def shown(rank: int, world_size: int, name: str) -> tuple[int, str] | None:
    """The first difference that a wrong order makes, see :func:`first_difference`."""
    wrong = (WRONG | WRONG_GRAPHS)[name]
    return first_difference(wrong.case, wrong.defect, range(1, 61))


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


def check(case: Case, seeds: Iterable[int], steps: int = 3) -> None:
    """At once the numbers are those of the plain model, and in each order they are the same in bits.

    Those of a graph are the ones of the same training without it.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    expected = train(case._replace(graphed=False), 0, steps)
    found = farness(case, expected, steps, rank, world)
    assert not found, found
    for seed in seeds:
        found = differences(expected, train(case, seed + 3 * rank, steps))
        assert not found, f"seed {seed}: {found}"


def waits_of_a_step(case: Case) -> Counter[str]:
    """The waits of the host for the device in a steady step: forward, backward, clipping, the optimizer's step."""
    sim, mesh = load(), mesh_of(*case.on.shape)
    with sim.running(0):
        training = Training(case, torch.get_device_module("sim"), mesh, sim.device, dist.get_rank())
        batch = training.batch(0)
        training.batch = lambda step, micro=0: batch  # type: ignore[method-assign]
        for step in range(3):
            training.step(step)
        with sim.waits() as found:
            training.step(3)
        return found


def backwards_at_work(case: Case, seed: int) -> int:
    """The steps in which the device still computes a backward when the host knows that the ranks agree on it."""
    sim, mesh, api = load(), mesh_of(*case.on.shape), torch.get_device_module("sim")
    at_work, gradients = 0, api.Event()
    read, reduce_scatter = HostFlag.read, Communicator.reduce_scatter

    def reduces(*given: Any, **named: Any) -> Any:
        gradients.record()
        return reduce_scatter(*given, **named)

    def reads(flag: HostFlag) -> bool:
        nonlocal at_work
        is_set, found = flag._is_set, read(flag)
        at_work += is_set and not gradients.query()
        return found

    with sim.running(seed), pytest.MonkeyPatch.context() as patch:
        training = Training(case, api, mesh, sim.device, dist.get_rank())
        training.step(0)
        patch.setattr(Communicator, "reduce_scatter", reduces)
        patch.setattr(HostFlag, "read", reads)
        for step in range(1, 9):
            training.step(step)
    return at_work


def _sum_on_host(model: Net, batch: torch.Tensor) -> float:
    return model(batch).sum().item()  # type: ignore[no-any-return]


def refused_capture(case: Case, seed: int) -> None:
    """A step that reads a value cannot be captured. The same model then trains as a model that did not try."""
    sim, mesh = load(), mesh_of(*case.on.shape)
    outcomes = []
    for reads in (False, True):
        with sim.running(seed):
            training = Training(case, torch.get_device_module("sim"), mesh, sim.device, dist.get_rank())
            training.run(2)
            if reads:
                batch = training.batch(7)
                model = training.model
                step = sw.GraphedStep(model, functools.partial(_sum_on_host, model))
                step._left = 0
                current = torch.accelerator.current_stream(sim.device)
                with pytest.raises(RuntimeError, match=r"cannot be captured .*: item"):
                    step(batch)
                assert torch.accelerator.current_stream(sim.device) == current
            training.run(3)
            outcomes.append(outcome_of(training))
    assert not differences(*outcomes)


def built_alike(seed: int) -> bool:
    """Whether deferred construction draws the weights that construction on the device draws."""
    sim, mesh = load(), mesh_of(dist.get_world_size())
    with sim.running(seed):
        torch.manual_seed(3)
        with torch.device("sim"):
            plain = Net(layers=2)
        torch.manual_seed(3)
        with sw.deferred_init():
            model = Net(layers=2)
        for block in model.blocks:
            sw.fully_shard(block, mesh=mesh)
        sw.materialize(sw.fully_shard(model, mesh=mesh))
        pairs = zip(model.parameters(), plain.parameters(), strict=True)
        return all(torch.equal(full(p.detach()).cpu(), q.detach().cpu()) for p, q in pairs)


def resumed(case: Case, seed: int, folder: str, asynchronous: bool) -> tuple[Outcome, Outcome]:
    """A training that goes on after a checkpoint, and one that begins from it. The save may run beside the first."""
    sim, mesh, api = load(), mesh_of(*case.on.shape), torch.get_device_module("sim")
    with sim.running(seed):
        first, second = (Training(case, api, mesh, sim.device, dist.get_rank()) for _ in range(2))
        first.step(0)
        first.step(1)
        saver = sw.AsyncCheckpoint()
        if asynchronous:
            saver.save(folder, first.model, first.optimizer)
        else:
            sw.save_checkpoint(folder, first.model, first.optimizer)
        first.losses.clear()
        first.step(2)
        first.step(3)
        saver.wait()
        saver.close()
        sw.load_checkpoint(folder, second.model, second.optimizer)
        second.step(2)
        second.step(3)
        return outcome_of(first), outcome_of(second)


def threads_of_hooks(case: Case, seed: int) -> set[int]:
    """The threads on which modules' backward hooks of the user's ran."""
    sim, mesh = load(), mesh_of(*case.on.shape)
    threads: set[int] = set()
    with sim.running(seed):
        training = Training(case, torch.get_device_module("sim"), mesh, sim.device, dist.get_rank())
        for block in training.model.blocks:
            block.register_full_backward_hook(lambda *given: threads.add(threading.get_ident()))
        training.run(2)
    return threads
