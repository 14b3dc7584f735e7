"""State of a unit between uses: copies of weights until they change, and sums of earlier micro-batches.

Each of these tests was written for a deliberate defect (tests/defects) that no other found.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwright as sw
from shardwright.engine import UNIT
from tests.engine.kit.models import build, full, loss_of, tokens
from tests.engine.kit.observing import observe
from tests.engine.kit.places import On, on, on_meshes
from tests.engine.kit.training import (
    backward,
    check_gradients,
    expected_gradients,
    local_of,
    set_micro,
    sharded,
)
from tests.support import multirank
from tests.support.stand_in import stand_in_device


@on_meshes(on("hfsdp", (2, 2)))
@pytest.mark.parametrize("offloads", [False, True])
def test_what_outer_axes_have_gathered_goes_with_an_edit(
    rank: int, world_size: int, at: On, offloads: bool
) -> None:
    """In the middle of a step, where the engine sees the edit by the version counters only."""
    options: dict[str, Any] = {"offload_policy": sw.CPUOffloadPolicy()} if offloads else {}
    with stand_in_device() if offloads else contextlib.nullcontext():
        model, plain = sharded(at, **options), build()
        for number in range(3):
            batch = tokens(number, 0, rank)
            with torch.no_grad():
                torch.testing.assert_close(model(batch), plain(batch), rtol=1e-5, atol=1e-5)
                for one in (model, plain):
                    for p in one.parameters():
                        local_of(p).mul_(1.25)


class Written(torch.optim.Optimizer):
    """Writes as some kernels do: no version counter moves."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                memory = local_of(p.detach()).numpy()
                memory -= 0.1 * local_of(p.grad).numpy()


@on_meshes([*on("ddp", (2,)), *on("zero1", (2,)), *on("zero3", (2,))])
def test_kernels_that_move_no_version_counter(rank: int, world_size: int, at: On) -> None:
    options: dict[str, Any] = {"reshard_after_forward": False} if max(at.stages) == 3 else {}
    model, plain = sharded(at, **options), build()
    optimizer, expected = Written(model.parameters()), torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(3):
        model.zero_grad()
        backward(model, rank, step)
        plain.zero_grad()
        for r in range(world_size):
            (loss_of(plain(tokens(step, 0, r)), tokens(step, 0, r)) / world_size).backward()
        with torch.no_grad():
            model(tokens(step, 1, rank))  # after which weights are kept
        optimizer.step()
        expected.step()
        with torch.no_grad():
            batch = tokens(step, 2, rank)
            torch.testing.assert_close(model(batch), plain(batch), rtol=1e-4, atol=1e-5)


@multirank(2)
def test_memory_of_a_gather_that_an_interrupt_has_left_stays(rank: int, world_size: int) -> None:
    """It may still write there."""
    model = sw.fully_shard(nn.Linear(64, 64))
    x = torch.ones(2, 64)
    model(x).sum().backward()
    unit = getattr(model, UNIT)
    gather = unit.weights.copy.gather
    begin = gather.begin

    def interrupted(*given: Any) -> Any:
        begin(*given)
        raise KeyboardInterrupt

    gather.begin = interrupted
    with pytest.raises(KeyboardInterrupt):
        model(x)
    assert unit.weights.copy.slab.leased
    del gather.begin
    dist.barrier()
    y = model(x)
    torch.testing.assert_close(y, x @ full(model.weight).T + full(model.bias))
    y.sum().backward()
    assert not unit.weights.copy.slab.leased


class Halves(nn.Module):
    """Two layers; one micro-batch may leave out the second."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        x = torch.tanh(self.a(x))
        return self.b(x).square().sum() if both else x.square().sum()


@on_meshes(
    [*on("hsdp", (2, 2)), *on("hfsdp", (2, 2)), *on("zero1", (2,)), *on("zero2", (2,)), *on("zero3", (2,))]
)
@pytest.mark.parametrize("sync", [False, True])
def test_what_a_unit_holds_that_the_last_micro_batch_leaves_out(
    rank: int, world_size: int, at: On, sync: bool
) -> None:
    torch.manual_seed(0)
    plain = Halves()
    model = Halves()
    model.load_state_dict(plain.state_dict())
    for module in (model.a, model.b, model):
        sw.fully_shard(module, mesh=at.mesh, strategy=at.strategy)

    def data(micro: int, rank: int) -> torch.Tensor:
        return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * micro + rank))

    for micro, both in enumerate((True, False)):
        set_micro(model, sync or micro == 1, micro == 1)
        model(data(micro, rank), both).backward()
        for r in range(world_size):
            (plain(data(micro, r), both) / world_size).backward()
    check_gradients(model, [p.grad for p in plain.parameters()])


@on_meshes([*on("zero3", (2,)), *on("zero2", (2,)), *on("hsdp", (2, 2))])
@pytest.mark.parametrize("sync", [False, True])
def test_sums_that_a_failed_backward_had_taken_up_are_held_again(
    rank: int, world_size: int, at: On, sync: bool
) -> None:
    """The sums of the first micro-batch come with the next backward, whatever of the second has come."""

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    model = sharded(at)
    set_micro(model, sync, False)
    backward(model, rank, 0, 0)
    first = expected_gradients(world_size, 1)
    both = expected_gradients(world_size, 2)
    set_micro(model, True, True)
    handle = model.blocks[0].up.register_full_backward_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        backward(model, rank, 0, 1)
    handle.remove()
    batch = tokens(0, 2, rank)
    (loss_of(model(batch), batch) * 0.0).backward()
    for (name, p), one, two in zip(model.named_parameters(), first, both, strict=True):
        gradient = full(p.grad)
        assert any(torch.allclose(gradient, each, rtol=1e-4, atol=1e-6) for each in (one, two)), name


@multirank(2)
def test_a_unit_reduced_twice_in_one_backward_with_gradients_on_their_way(rank: int, world_size: int) -> None:
    """They are on the host before the next ones follow."""

    def loss_of_two_calls(one: nn.Module, rank: int) -> torch.Tensor:
        first, second = (torch.full((2, 4), float(n + rank), requires_grad=True) for n in (1, 5))
        return torch.tanh(one(first)).sum() + one(second).square().sum()

    torch.manual_seed(0)
    plain = nn.Linear(4, 4)
    model = nn.Linear(4, 4)
    model.load_state_dict(plain.state_dict())
    for r in range(world_size):
        (loss_of_two_calls(plain, r) / world_size).backward()
    with stand_in_device() as streams:
        streams.is_over = lambda mark: False  # type: ignore[method-assign]
        sw.fully_shard(model, offload_policy=sw.CPUOffloadPolicy())
        loss_of_two_calls(model, rank).backward()
        check_gradients(model, [p.grad for p in plain.parameters()])


class Heads(nn.Module):
    """Units side by side, whose inputs need no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(torch.tanh(head(x)).square().sum() for head in self.heads)  # type: ignore[return-value]


@multirank(2)
def test_units_whose_inputs_need_no_gradient_are_left_one_after_another(rank: int, world_size: int) -> None:
    model = Heads()
    for head in model.heads:
        sw.fully_shard(head)
    sw.fully_shard(model)
    model(torch.ones(2, 4)).backward()
    root = getattr(model, UNIT).root
    gathered: list[int] = []
    observe(model, lambda event, weights: gathered.append(len(root.gathered)) if root.backward else None)
    model(torch.ones(2, 4)).backward()
    assert gathered
    assert max(gathered) <= 3  # the one that computes, the one before it, and the next
