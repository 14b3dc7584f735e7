"""How a case runs: the sharded and the plain model side by side, compared after every step; and a sharded net."""

from __future__ import annotations

import dataclasses
import os
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import shardwright as sw
from tests.engine.cases.base import BF16, DIM, FP32, FP64, Batch, Case, Net, loss_of
from tests.engine.kit.places import On
from tests.engine.programs import LAYOUTS, differences

#: Both models start every step from the same bits (`differences`), so only the order of sums over ranks and
#: micro-batches differs: some 1e-7 of the largest element. With bfloat16 the sums over ranks are float32 as well.
TOLERANCE = 1e-5


def sharded_modules(model: nn.Module) -> list[sw.FSDPModule]:
    return [m for m in model.modules() if isinstance(m, sw.FSDPModule)]


def run(
    case: Case,
    rank: int,
    world_size: int,
    accumulation: str,
    precision: str,
    reshard: bool | None,
    place: Place | None,
) -> None:
    """Train the sharded and the plain model side by side and compare after every step.

    Without a ``place`` both are plain, on one rank: that checks the case itself.
    """
    compute = BF16 if precision == "bf16" else FP32
    tolerance = 1e-2 if compute is BF16 and case.sums_differ_in_bf16 else TOLERANCE
    torch.manual_seed(0)
    model: Any = case.build()
    case.before_sharding(model)
    plain = case.clone(model)
    policy = sw.MixedPrecisionPolicy(
        None if compute is FP32 else compute, reduce_dtype=FP32 if compute is BF16 else None
    )
    sharded = place is not None
    if place is not None:
        options: dict[str, Any] = {
            "mesh": place.at.mesh,
            "strategy": place.at.strategy,
            "layout": LAYOUTS[place.layout],
            # True is refused where full parameters are kept for the step.
            "reshard_after_forward": reshard if reshard in place.at.reshards else None,
            "mp_policy": policy,
        }
        for unit in case.units(model):
            sw.fully_shard(unit, **options)
    case.after_sharding(model)
    case.after_sharding(plain)
    optimizer, expected = make_optimizer(model, sharded), make_optimizer(plain, False)
    micros = 1 if accumulation == "single" else 2
    for step in range(case.steps):
        with torch.random.fork_rng():
            model = case.edit(model, step) or model
        plain = case.edit(plain, step) or plain
        if case.rebuild_optimizer:
            optimizer, expected = make_optimizer(model, sharded), make_optimizer(plain, False)
        batch = Batch(step, 7, micros, rank, world_size, FP32)
        if type(case).mishap is not Case.mishap:
            case.mishap(work_copy(case, plain, compute), dataclasses.replace(batch, dtype=compute))
            case.mishap(model, batch)
        zero_grad(model, optimizer, step)
        zero_grad(plain, expected, step)
        wrong: list[str] = []
        for micro in range(micros):
            case.between(model, step, micro)
            case.between(plain, step, micro)
            for module in sharded_modules(model):
                module.set_requires_gradient_sync(accumulation != "hold" or micro == micros - 1)
                module.set_requires_all_reduce(accumulation != "late" or micro == micros - 1)
            batch = Batch(step, micro, micros, rank, world_size, FP32)
            told = detached(case.train(model, batch))
            wanted = reference_step(case, plain, batch, compute)
            wrong += output_differences(told, wanted, f"step {step} micro-batch {micro}", tolerance)
        found = differences(model, plain, tolerance, wrong)
        assert not found, f"step {step}, gradients:\n" + "\n".join(found)
        told, wanted = (
            detached(case.update(optimizer, model, step)),
            detached(case.update(expected, plain, step)),
        )
        wrong = output_differences(told, wanted, f"after step {step}", tolerance)
        found = differences(model, plain, tolerance, wrong, adopt=True)
        assert not found, f"step {step}, after the optimizer:\n" + "\n".join(found)


def make_optimizer(model: nn.Module, sharded: bool) -> torch.optim.Optimizer:
    # Weight decay moves a parameter whose gradient should be None and is zero instead.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.05)
    return sw.fully_shard_optimizer(optimizer) if sharded else optimizer


def zero_grad(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """The ways in which people clear gradients, in turn."""
    if step % 3 == 0:
        model.zero_grad()
    elif step % 3 == 1:
        optimizer.zero_grad()
    else:
        for p in model.parameters():
            p.grad = None


def work_copy(case: Case, plain: nn.Module, compute: torch.dtype) -> nn.Module:
    """The plain model in the compute dtype, without gradients. Buffers keep their dtype, as under a policy."""
    work = case.clone(plain)
    for p in work.parameters():
        p.grad = None
        if compute is not FP32:
            p.data = p.data.to(compute)
    return work


def reference_step(case: Case, plain: nn.Module, own: Batch, compute: torch.dtype) -> Any:
    """Run this rank's micro-batch on a copy of ``plain``, and add the mean over all ranks to ``plain``'s gradients.

    The mean is by one plain all-reduce in float64, so every rank must call it.
    """
    work = work_copy(case, plain, compute)
    told = detached(case.train(work, dataclasses.replace(own, dtype=compute)))
    for mine, buffer in zip(plain.buffers(), work.buffers(), strict=True):
        mine.copy_(buffer)
    parameters = list(zip(work.parameters(), plain.parameters(), strict=True))
    # In the dtype of the parameter, as gradients are handed over. The last items say how many ranks have one.
    gradients = [torch.zeros_like(q) if p.grad is None else p.grad.to(q.dtype) for p, q in parameters]
    there = torch.tensor([p.grad is not None for p, _ in parameters], dtype=FP64)
    everything = torch.cat([*(g.detach().flatten().to(FP64) for g in gradients), there])
    if own.world_size > 1:
        dist.all_reduce(everything)
    *totals, there = everything.split([*(g.numel() for g in gradients), len(there)])
    for (_, q), total, users in zip(parameters, totals, there, strict=True):
        if users:
            mean = (total / own.world_size).view(q.shape).to(q.dtype)
            q.grad = mean if q.grad is None else q.grad + mean
    return told


def detached(told: Any) -> list[torch.Tensor]:
    told = [] if told is None else [told] if isinstance(told, torch.Tensor) else told
    return [t.detach().clone() for t in told]


def output_differences(
    told: list[torch.Tensor], wanted: list[torch.Tensor], where: str, tolerance: float
) -> list[str]:
    found = [] if len(told) == len(wanted) else [f"{where}: {len(told)} results instead of {len(wanted)}"]
    for i, (mine, theirs) in enumerate(zip(told, wanted, strict=False)):
        error = (
            (mine.float() - theirs.float()).abs().max().item() if mine.shape == theirs.shape else float("inf")
        )
        if not error <= tolerance * max(1.0, theirs.float().abs().max().item()):
            found.append(f"{where}: result {i} is off by {error:.1e}")
    return found


class Place(NamedTuple):
    """A strategy on a mesh, and a layout."""

    at: On
    layout: str

    def __str__(self) -> str:
        return f"{self.at}/{self.layout}"


def sharded_net(net: Any = None, **options: Any) -> Any:
    os.environ["SHARDWRIGHT_POISON"] = "1"
    torch.manual_seed(0)
    net = Net() if net is None else net
    for unit in [*net.blocks, net]:
        sw.fully_shard(unit, **options)
    return net


def step_of(model: Any, rank: int, path: tuple[int, ...] | None = None, rows: int = 3) -> None:
    x = torch.randn(rows, DIM, generator=torch.Generator().manual_seed(rank))
    loss_of(model(x, path)).backward()
