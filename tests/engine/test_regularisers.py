"""Penalties of sharded parameters (L1, L2, their kin): alone and beside a loss they train as on one device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

import shardwright as sw
from shardwright.engine import as_sharded
from shardwright.engine.compat.autograd import gradient_hooks
from shardwright.engine.tensors.parameter import become
from tests.engine.kit.models import full
from tests.engine.kit.torch_versions import subclasses_dispatch
from tests.support import multirank, world_mesh

PENALTIES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "L1": lambda p: p.abs().sum(),
    "L2": lambda p: (p**2).sum(),
    "mean of squares": lambda p: p.pow(2).mean(),
    "norm": lambda p: p.norm(),
    "sum": lambda p: p.sum(),
    "torch.sum of a product": lambda p: torch.sum(3 * p),
    "mean beside squares": lambda p: p.mean() + (p**2).sum(),
    "of one tensor twice": lambda p: torch.mean(p) + torch.mean(p * p) + p.sum(),
}
SETTINGS: list[dict[str, Any]] = [
    {},
    {"layout": "ragged"},
    {"layout": sw.Ragged("element")},
    {"strategy": "ddp"},
    {"strategy": "zero1", "layout": "ragged"},
    {"layout": "ragged", "memory": "arena"},
]


def build() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def shard(plain: Any, memory: str = "dynamic", **options: Any) -> Any:
    model = copy.deepcopy(plain)
    sw.fully_shard(model[0], **options)
    return sw.fully_shard(model, memory=memory, **options)


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))


def loss_of(model: Any, ranks: range, step: int) -> torch.Tensor:
    return sum((model(batch(r, step)).square().sum() for r in ranks), torch.zeros(())) / len(ranks)


def penalty_of(model: Any, penalty: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return 0.1 * sum(penalty(p) for p in model.parameters())


def train(model: Any, optimizer: Any, ranks: range, penalty: Any, step: int) -> list[torch.Tensor]:
    """One step, with the penalty alone, added, or added in place. Returns the gradients."""
    if step == 0:
        penalty_of(model, penalty).backward()
    elif step == 1:
        (loss_of(model, ranks, step) + penalty_of(model, penalty)).backward()
        (loss_of(model, ranks, 5) - penalty_of(model, penalty)).backward()
    else:
        loss = loss_of(model, ranks, step)
        loss += penalty_of(model, penalty)
        (loss / 2).backward()
    gradients = [full(p.grad).clone() for p in model.parameters()]
    optimizer.step()
    optimizer.zero_grad()
    return gradients


@pytest.mark.extensive("each penalty in each layout")
@pytest.mark.skipif(not subclasses_dispatch, reason="sums of sharded parameters are torch's own there")
@multirank(2)
def test_penalties_train_as_on_one_device(rank: int, world_size: int) -> None:
    for options in SETTINGS:
        few = set(options) - {"layout"}
        for name in list(PENALTIES)[1:8:5] if few else PENALTIES:
            penalty = PENALTIES[name]
            plain = build()
            model = shard(plain, **options)
            twins = [(plain, range(world_size)), (model, range(rank, rank + 1))]
            optimizers = [torch.optim.SGD(plain.parameters(), lr=1e-2)]
            optimizers += [sw.fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=1e-2))]
            for step in range(3):
                expected, gradients = (
                    train(each, optimizer, ranks, penalty, step)
                    for (each, ranks), optimizer in zip(twins, optimizers, strict=True)
                )
                torch.testing.assert_close(gradients, expected, msg=f"{options}, {name}, step {step}")
            torch.testing.assert_close(
                [full(p.detach()) for p in model.parameters()], [p.detach() for p in plain.parameters()]
            )


@multirank(2)
def test_logged_sums_leave_gradients_in_their_memory(rank: int, world_size: int) -> None:
    """A sum for a log is no reason to deliver gradients parameter by parameter."""
    model = shard(build(), layout="ragged")
    for p in model.parameters():
        assert p.sum().requires_grad
    loss_of(model, range(rank, rank + 1), 0).backward()
    assert len({p.grad.to_local().untyped_storage().data_ptr() for p in model[0].parameters()}) == 1


@multirank(2)
def test_a_gradient_of_a_gradient_is_refused_where_parameters_are_ragged(rank: int, world_size: int) -> None:
    weight = shard(build(), layout="ragged")[0].weight
    with pytest.raises(NotImplementedError, match="create_graph=True"):
        total = (weight**2).sum()
        torch.autograd.grad((total**2), weight, create_graph=True)


class Scaled(nn.Module):
    """With a parameter that has no dimensions, which forward uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.scale = nn.Linear(5, 3), nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale


#: Of a loss and a parameter without dimensions, the loss with that parameter added.
SUMS_WITH_LOSS: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
    lambda loss, s: loss + s,
    lambda loss, s: s + loss,
    lambda loss, s: loss - 2 * s,
    lambda loss, s: torch.add(loss, s**2, alpha=3) + s,
    lambda loss, s: (loss * 1).add_(s.abs()),
    lambda loss, s: s.square() - loss + s.sum(),
]


@pytest.mark.skipif(not subclasses_dispatch, reason="sums of sharded parameters are torch's own there")
@multirank(2)
def test_parameters_without_dimensions_are_added_to_losses(rank: int, world_size: int) -> None:
    for options in SETTINGS:
        options = {k: v for k, v in options.items() if k != "memory"}
        plain = Scaled()
        model: Any = sw.fully_shard(copy.deepcopy(plain), **options)
        twins = [(plain, range(world_size)), (model, range(rank, rank + 1))]
        optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each, _ in twins]
        for step, added in enumerate(SUMS_WITH_LOSS):
            for (each, ranks), optimizer in zip(twins, optimizers, strict=True):
                optimizer.zero_grad()
                total = added(loss_of(each, ranks, step), each.scale)
                assert type(total) is torch.Tensor
                total.backward()
            assert type(model.scale.grad).__name__ != "Tensor", f"{options}, sum {step}"
            for one, other in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(full(one.grad), other.grad, msg=f"{options}, sum {step}")
            for optimizer in optimizers:
                optimizer.step()
            for one, other in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(full(one.detach()), other.detach(), msg=f"{options}, sum {step}")


@pytest.mark.skipif(not subclasses_dispatch, reason="sums of sharded parameters are torch's own there")
@multirank(2)
def test_a_loss_is_not_added_into_a_sharded_penalty(rank: int, world_size: int) -> None:
    for layout in ("per_parameter", "ragged"):
        model: Any = sw.fully_shard(Scaled(), layout=layout)
        penalties = [2 * model.scale]
        penalties += [model.linear.weight.abs().sum()] if layout == "per_parameter" else []
        for penalty in penalties:
            with pytest.raises(NotImplementedError, match=r"Write `loss = loss \+ penalty`"):
                penalty += loss_of(model, range(rank, rank + 1), 0)


@pytest.mark.skipif(not subclasses_dispatch, reason="sums of sharded parameters are torch's own there")
@multirank(2)
def test_gradients_follow_a_parameter_that_is_cut_along_another_dimension(rank: int, world_size: int) -> None:
    """A sum before leaves nothing behind that would cut gradients as the parameter was cut then."""
    mesh, values = world_mesh(2), torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    weight: Any = nn.Parameter(as_sharded(distribute_tensor(values, mesh, [Shard(0)])))
    seen: list[Any] = []
    weight.register_hook(lambda gradient: seen.append(gradient))
    weight.sum().backward()
    assert weight.grad.placements == (Shard(0),)
    weight.grad = None
    become(weight, distribute_tensor(values, mesh, [Shard(1)]))
    assert len(gradient_hooks(weight) or {}) == 1  # the user's
    factor = as_sharded(distribute_tensor(values, mesh, [Shard(1)]))
    torch.autograd.backward(weight * weight, factor)
    assert weight.grad.placements == (Shard(1),) and len(seen) == 2
    torch.testing.assert_close(weight.grad.full_tensor(), 2 * values * values)
    weight.grad = None
    weight.sum().backward()
    assert weight.grad.placements == (Shard(1),)
