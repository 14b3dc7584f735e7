"""Parameters that a backward does not use: None, or gradients of zero with ``set_reduce_scatter_unused_params(True)``.

Compared with a plain model on every rank's data, whose missing gradients are filled with zeros by hand. Every rank uses
other parameters, some no rank uses, and some units are not run in every step.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn

import shardwright as sw
from tests.engine.kit.models import full
from tests.support import multirank, world_mesh
from tests.support.stand_in import stand_in_device

Use = dict[str, tuple[str, ...]]  #: doors that are run, and which part of each every rank uses


class Door(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(5, 5), nn.Linear(5, 5, bias=False)
        self.never = nn.Parameter(torch.randn(3))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)

    def forward(self, x: torch.Tensor, which: str) -> torch.Tensor:
        for side in which.split():
            x = x + getattr(self, side)(x)
        return x


class House(nn.Module):
    def __init__(self, scalar: bool = True) -> None:
        super().__init__()
        self.doors = nn.ModuleDict({name: Door() for name in ("front", "back", "cellar")})
        self.head = nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.ones(() if scalar else (1,)))

    def forward(self, x: torch.Tensor, use: Use, rank: int) -> torch.Tensor:
        for name, sides in use.items():
            x = self.doors[name](x, sides[rank % len(sides)])
        return self.head(x)


#: Of each step its micro-batches. The cellar is run in the second step for the first time; a door whose part is the
#: empty string is run and used by nobody.
STEPS: list[list[Use]] = [
    [{"front": ("left", "right"), "back": ("",)}, {"front": ("left",)}],
    [{"cellar": ("right", "left right")}, {"back": ("left",)}],
    [{"front": ("",), "back": ("left", "right")}],
]


class Row(NamedTuple):
    strategy: str
    layout: Any = "per_parameter"
    micros: str = "reduced"  #: or "held" without communication, or left to the "last" backward
    in_backward: bool = False
    offload: bool = False
    shape: tuple[int, ...] = (2,)
    memory: str = "dynamic"


def data(rank: int, step: int, micro: int) -> torch.Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))


def expected_gradients(
    plain: House, micros: list[tuple[int, int, Use]], world_size: int, ran: set[str]
) -> None:
    """Leaves averages over the ranks in ``plain``, and zeros where a unit has run and a parameter was not used."""
    for step, micro, use in micros:
        ran.update(use)
        for rank in range(world_size):
            (plain(data(rank, step, micro), use, rank).square().mean() / world_size).backward()
    for name, p in plain.named_parameters():
        if p.requires_grad and p.grad is None and (not name.startswith("doors") or name.split(".")[1] in ran):
            p.grad = torch.zeros_like(p)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1, weight_decay=0.5)


def train(row: Row, rank: int, world_size: int, use_torch: bool = False) -> None:
    torch.manual_seed(0)
    plain = House(scalar=not use_torch)  # which FSDP2 does not take
    model: Any = copy.deepcopy(plain)
    mesh = world_mesh(*row.shape, names=("replicate", "shard")[-len(row.shape) :])
    if use_torch:
        for door in model.doors.values():
            torch_fsdp.fully_shard(door, mesh=mesh)
        torch_fsdp.fully_shard(model, mesh=mesh)
    else:
        options: dict[str, Any] = {"mesh": mesh, "strategy": row.strategy, "layout": row.layout}
        if row.offload:
            options["offload_policy"] = sw.CPUOffloadPolicy()
        for door in model.doors.values():
            sw.fully_shard(door, **options)
        sw.fully_shard(model, **options, memory=row.memory)
    model.set_reduce_scatter_unused_params(True)
    expected = optimizer_of(plain)
    optimizer = optimizer_of(model)
    if not use_torch:
        optimizer = (
            sw.optim.in_backward(optimizer) if row.in_backward else sw.fully_shard_optimizer(optimizer)
        )
    ran: set[str] = set()
    for step, uses in enumerate(STEPS):
        for micro, use in enumerate(uses):
            last = micro == len(uses) - 1
            model.set_requires_gradient_sync(last or row.micros != "held")
            model.set_is_last_backward(last or row.micros != "last")
            model(data(rank, step, micro), use, rank).square().mean().backward()
        expected_gradients(plain, [(step, m, use) for m, use in enumerate(uses)], world_size, ran)
        if not row.in_backward:
            compare(model, plain, f"{row}, gradient of step {step}", gradients=True)
        optimizer.step()
        expected.step()
        optimizer.zero_grad()
        expected.zero_grad()
        compare(model, plain, f"{row}, step {step}", gradients=False)


def compare(model: nn.Module, plain: nn.Module, where: str, gradients: bool) -> None:
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        one, other = (p.grad, q.grad) if gradients else (p.detach(), q.detach())
        assert (one is None) == (other is None), f"{where}: {name}"
        if one is not None and other is not None:
            torch.testing.assert_close(
                full(one), other, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{where}: {n}: {m}"
            )


@pytest.mark.extensive("every setting")
@multirank(2)
def test_unused_parameters_get_zeros_in_every_setting(rank: int, world_size: int) -> None:
    ragged, element = sw.Ragged("row"), sw.Ragged("element")
    for row in (
        Row("zero3"), Row("zero3", ragged, "held"), Row("zero3", element, "last"), Row("zero3", memory="arena"),
        Row("zero3", in_backward=True, micros="held"), Row("zero3", element, "held", in_backward=True),
        Row("zero2", micros="last"), Row("zero2", ragged), Row("zero1", element, "held"), Row("zero1", micros="last"),
        Row("ddp"), Row("ddp", ragged, "last"), Row("ddp", micros="held", in_backward=True),
        Row("zero3", offload=True), Row("zero3", ragged, "held", in_backward=True, offload=True),
    ):  # fmt: skip
        with stand_in_device() if row.offload else nullcontext():
            train(row, rank, world_size)


@pytest.mark.extensive("each mesh")
@multirank(4)
def test_unused_parameters_get_zeros_on_meshes_of_two_axes(rank: int, world_size: int) -> None:
    for strategy, micros in (("hsdp", "reduced"), ("hsdp", "last"), ("hfsdp", "held")):
        train(Row(strategy, micros=micros, shape=(2, 2)), rank, world_size)


@multirank(2)
def test_torch_does_the_same(rank: int, world_size: int) -> None:
    if not hasattr(torch_fsdp.FSDPModule, "set_reduce_scatter_unused_params"):
        return  # torch 2.11
    for micros in ("reduced", "held"):
        train(Row("zero3", micros=micros), rank, world_size, use_torch=True)


@multirank(2)
def test_the_setting_holds_for_the_units_it_was_called_for_and_for_copies(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model: Any = House()
    for door in model.doors.values():
        sw.fully_shard(door)
    sw.fully_shard(model)
    use: Use = {"front": ("left",), "back": ("left",)}

    def without_gradient(model: Any) -> set[str]:
        model.zero_grad()
        model(data(rank, 0, 0), use, rank).sum().backward()
        dist.barrier()
        return {n for n, p in model.named_parameters() if p.grad is None and p.requires_grad}

    rest = {f"doors.cellar.{n}" for n in ("left.weight", "left.bias", "right.weight", "never")}
    unused = {f"doors.{d}.{n}" for d in ("front", "back") for n in ("right.weight", "never")}
    assert without_gradient(model) == {*rest, *unused, "scale"}
    model.doors["front"].set_reduce_scatter_unused_params(True)
    assert without_gradient(model) == {*rest, "scale", "doors.back.right.weight", "doors.back.never"}
    model.set_reduce_scatter_unused_params(True, recurse=False)
    assert without_gradient(model) == {*rest, "doors.back.right.weight", "doors.back.never"}
    model.set_reduce_scatter_unused_params(True)
    assert without_gradient(model) == rest
    assert without_gradient(copy.deepcopy(model)) == rest
    model.set_reduce_scatter_unused_params(False)
    assert without_gradient(model) == {*rest, *unused, "scale"}
