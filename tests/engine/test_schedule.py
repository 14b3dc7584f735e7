"""When gathers are issued and awaited: one unit ahead, in forward and backward, and never at construction."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import shardwright as sw
from shardwright.engine import UNIT
from shardwright.engine.comm import HostStreams, collectives
from tests.engine.kit.models import build, full, loss_of, shard, tokens
from tests.engine.kit.observing import observe
from tests.support import multirank, world_mesh


class Collectives(TorchDispatchMode):
    """Names of the collectives dispatched inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional"):
            self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


class Recorder:
    """Gathers issued and awaited, and modules that compute, in the order in which they happen."""

    def __init__(self, model: nn.Module) -> None:
        self.events: list[str] = []
        observe(model, lambda event, weights: self.events.append(f"{event} {weights.place.name}"))
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear) and name.endswith("up"):
                block = name.removesuffix(".up")
                module.register_forward_hook(lambda m, a, o, b=block: self.events.append(f"forward {b}"))
                module.register_full_backward_hook(
                    lambda m, i, o, b=block: self.events.append(f"backward {b}")
                )

    def take(self) -> list[str]:
        events, self.events = self.events, []
        return events

    def at(self, event: str) -> int:
        return self.events.index(event)


def step(model: nn.Module, rank: int, number: int = 0) -> None:
    batch = tokens(number, 0, rank)
    loss_of(model(batch), batch).backward()


@multirank(2)
def test_construction_communicates_nothing(rank: int, world_size: int) -> None:
    groups = len(dist.distributed_c10d._world.pg_map)
    with Collectives() as seen:
        model = shard(build(), mesh=world_mesh(world_size))
        torch.optim.AdamW(model.parameters())
    assert seen.names == []
    assert len(dist.distributed_c10d._world.pg_map) == groups


@multirank(2)
def test_gathers_run_one_unit_ahead(rank: int, world_size: int) -> None:
    model = shard(build(layers=4))
    step(model, rank)  # the first step records the order of forward
    recorder = Recorder(model)
    step(model, rank, 1)
    for i in range(3):
        now, after = f"blocks.{i}", f"blocks.{i + 1}"
        assert recorder.at(f"issue {after}") < recorder.at(f"forward {now}") < recorder.at(f"wait {after}")
    backward = recorder.events[recorder.at("forward blocks.3") + 1 :]
    for i in range(3, 0, -1):
        now, before = f"blocks.{i}", f"blocks.{i - 1}"
        assert (
            backward.index(f"issue {before}")
            < backward.index(f"backward {now}")
            < backward.index(f"wait {before}")
        )


@multirank(2)
def test_every_gather_is_issued_once_and_awaited_once(rank: int, world_size: int) -> None:
    model = shard(build(layers=3))
    step(model, rank)
    recorder = Recorder(model)
    step(model, rank, 1)
    events = recorder.take()
    for kind in ("issue", "wait"):
        counts = {i: events.count(f"{kind} blocks.{i}") for i in range(3)}
        assert counts == {0: 2, 1: 2, 2: 2}
        assert events.count(f"{kind} Model") == 1  # the root stays gathered between forward and backward


@multirank(2)
def test_collectives_per_step(rank: int, world_size: int) -> None:
    model = shard(build(layers=3), reshard_after_forward=True)
    with Collectives() as seen:
        step(model, rank)
    gathers = sum("gather" in n for n in seen.names)
    reductions = sum("alltoall" in n or "reduce_scatter" in n for n in seen.names)
    assert (gathers, reductions, len(seen.names)) == (8, 4, 12)


@multirank(2)
def test_at_most_two_slabs_and_the_kept_ones_are_alive(rank: int, world_size: int) -> None:
    model = shard(build(layers=5))
    step(model, rank)
    root = getattr(model, UNIT).root
    most = 0

    def watch(event: str, unit: object) -> None:
        nonlocal most
        most = max(
            most, len(root.gathered - {0}) + (event == "issue" and unit.place.number not in root.gathered)
        )

    observe(model, watch)
    step(model, rank, 1)
    assert most == 2
    assert not root.gathered


@multirank(2)
def test_explicit_prefetch_replaces_the_recorded_order(rank: int, world_size: int) -> None:
    model = shard(build(layers=4))
    blocks = list(model.blocks)
    blocks[0].set_modules_to_forward_prefetch([blocks[1], blocks[2]])
    blocks[3].set_modules_to_backward_prefetch([blocks[2], blocks[1]])
    step(model, rank)
    recorder = Recorder(model)
    step(model, rank, 1)
    assert recorder.at("issue blocks.2") < recorder.at("forward blocks.0")
    backward = recorder.events[recorder.at("forward blocks.3") + 1 :]
    assert backward.index("issue blocks.1") < backward.index("backward blocks.3")


@multirank(2)
def test_an_unused_prefetch_is_dropped_with_its_call(rank: int, world_size: int) -> None:
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.skip = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.a(x)
            return x if self.skip else self.b(x)

    torch.manual_seed(0)
    model = Sometimes()
    for child in (model.a, model.b):
        sw.fully_shard(child)
    sw.fully_shard(model)
    x = torch.randn(2, 4)
    model(x).sum().backward()
    model.skip = True
    recorder = Recorder(model)
    model(x).sum().backward()
    assert "issue b" in recorder.events  # the guess
    assert not getattr(model, UNIT).root.gathered
    recorder.take()
    model(x).sum().backward()
    assert "issue b" not in recorder.take()  # the order was recorded anew


@multirank(2)
def test_diverging_ranks_are_named(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    a, b = nn.Linear(4, 4), nn.Linear(4, 4)
    model = nn.ModuleDict({"a": a, "b": b})

    class Choice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, x: torch.Tensor, part: str) -> torch.Tensor:
            return self.parts[part](x)

    choice = Choice()
    for child in (a, b):
        sw.fully_shard(child)
    sw.fully_shard(choice)
    with pytest.raises(
        RuntimeError,
        match=r"rank 0 gathers unit 1 \('parts.a'\); rank 1 gathers unit 2 \('parts.b'\). Every rank",
    ):
        choice(torch.randn(1, 4), "ab"[rank])


class OrderedStreams(HostStreams):
    """Collectives as an accelerator has them: queued, never asked for an asynchronous ``Work``."""

    asynchronous = False


def as_on_an_accelerator(model: nn.Module) -> nn.Module:
    """Let a model on the CPU take the paths of an accelerator, which show nothing of the other ranks to the host."""
    comm = getattr(model, UNIT).comm
    comm._gloo = comm.exchanges = False
    comm.streams = OrderedStreams()
    comm._gather_options = collectives.AllgatherOptions()
    comm._gather_options.asyncOp = False
    return model


@multirank(2, 3)
def test_the_accelerators_path_gives_the_same_gradients(rank: int, world_size: int) -> None:
    mesh = world_mesh(world_size)
    models = [shard(build(), mesh=mesh), as_on_an_accelerator(shard(build(), mesh=mesh))]
    comm = getattr(models[0], UNIT).comm
    assert comm is getattr(models[1], UNIT).comm
    gradients = []
    try:
        for model in reversed(models):
            for number in range(2):
                step(model, rank, number)
            gradients.append([full(p.grad) for p in model.parameters()])
    finally:
        comm.__init__(comm.group, comm.device)
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


@multirank(2)
def test_reductions_in_another_order_are_found_before_the_optimizer_steps(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    model.forward = lambda x: [part(x) for part in model]
    for part in model:
        sw.fully_shard(part, reshard_after_forward=False)
    outer = sw.fully_shard(nn.Sequential(nn.Identity(), model), mesh=world_mesh(2))
    as_on_an_accelerator(outer)
    comm = getattr(outer, UNIT).comm
    optimizer = torch.optim.SGD(outer.parameters(), lr=1.0)
    before = [p.to_local().clone() for p in outer.parameters()]
    try:
        outputs = outer(torch.randn(2, 4))
        sum(y.sum() for i, y in enumerate(outputs) if i != rank).backward()  # sizes are equal: nothing hangs
        with pytest.raises(
            RuntimeError, match=r"diverged: in the last backward .* gradients of different units"
        ):
            optimizer.step()
    finally:
        comm.__init__(comm.group, comm.device)
    for p, q in zip(outer.parameters(), before, strict=True):
        torch.testing.assert_close(p.to_local(), q, rtol=0, atol=0)
