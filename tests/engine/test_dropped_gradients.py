"""Gradients of micro-batches that wait for a later reduction are dropped wherever plain gradients would be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

import shardwright as sw
from tests.engine.kit.models import full
from tests.support import multirank, world_mesh


def zero_grad_to_zeros(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad(set_to_none=False)


def assign_none(model: Any, optimizer: Any) -> None:
    for p in model.parameters():
        p.grad = None


def delete(model: Any, optimizer: Any) -> None:
    for p in model.parameters():
        del p.grad


def assign_zeros(model: Any, optimizer: Any) -> None:
    for p in model.parameters():
        p.grad = torch.zeros_like(p)


def of_an_outer_module(model: Any, optimizer: Any) -> None:
    nn.ModuleList([model]).zero_grad()


def one_parameter(model: Any, optimizer: Any) -> None:
    model[0].weight.grad = None


def a_bias(model: Any, optimizer: Any) -> None:
    model[2].bias.grad = None


def another_optimizer(model: Any, optimizer: Any) -> None:
    torch.optim.SGD([model[0].bias, *model[2].parameters()], lr=0.1).zero_grad()


def nothing(model: Any, optimizer: Any) -> None:
    pass


WAYS: list[Callable[[Any, Any], None]] = [
    lambda model, optimizer: optimizer.zero_grad(),
    lambda model, optimizer: model.zero_grad(),
    zero_grad_to_zeros,
    assign_none,
    delete,
    assign_zeros,
    of_an_outer_module,
    one_parameter,
    a_bias,
    another_optimizer,
    nothing,
]
#: How a micro-batch waits, by the mesh and the options: its gradients are whole, or sums over some ranks.
HOLDS: dict[str, tuple[tuple[int, ...], dict[str, Any], Callable[[Any, bool], None]]] = {
    "zero3": ((2,), {}, lambda m, holds: m.set_requires_gradient_sync(not holds)),
    "element": ((2,), {"layout": "element"}, lambda m, holds: m.set_requires_gradient_sync(not holds)),
    "columns": (
        (2,),
        {"shard_placement_fn": lambda p: Shard(p.ndim - 1)},
        lambda m, holds: m.set_requires_gradient_sync(not holds),
    ),
    "ddp": ((2,), {"strategy": "ddp"}, lambda m, holds: m.set_is_last_backward(not holds)),
    "zero1": (
        (2,),
        {"strategy": "zero1", "layout": "ragged"},
        lambda m, holds: m.set_is_last_backward(not holds),
    ),
    "bf16": (
        (2,),
        {"mp_policy": sw.MixedPrecisionPolicy(reduce_dtype=torch.float64)},
        lambda m, holds: m.set_requires_gradient_sync(not holds),
    ),
    "hsdp": ((2, 2), {}, lambda m, holds: m.set_requires_all_reduce(not holds)),
    "hsdp last": ((2, 2), {"layout": "element"}, lambda m, holds: m.set_is_last_backward(not holds)),
    "hfsdp": ((2, 2), {"strategy": "hfsdp"}, lambda m, holds: m.set_requires_gradient_sync(not holds)),
}


def layers() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def backward(model: Any, number: int, ranks: list[int]) -> None:
    generators = [torch.Generator().manual_seed(100 * number + rank) for rank in ranks]
    losses = [model(torch.randn(3, 4, generator=g)).square().mean() for g in generators]
    (sum(losses) / len(losses)).backward()  # type: ignore[union-attr]


def check_hold(rank: int, world_size: int, hold: str, wrapped: bool) -> None:
    shape, options, set_hold = HOLDS[hold]
    mesh = world_mesh(*shape, names=("replicate", "shard")[-len(shape) :])
    for number, drop in enumerate(WAYS):
        plain, model = layers(), layers()
        sw.fully_shard(model[0], mesh=mesh, **options)
        sw.fully_shard(model, mesh=mesh, **options)
        made = []
        for each, ranks in ((plain, list(range(world_size))), (model, [rank])):
            optimizer: Any = torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9)
            if each is model and wrapped:
                optimizer = sw.fully_shard_optimizer(optimizer)
            made.append(optimizer)
            for step in range(2):
                if each is model:
                    set_hold(model, True)
                backward(each, 10 * step, ranks)
                backward(each, 10 * step + 1, ranks)
                drop(each, optimizer)
                if step:
                    backward(each, 10 * step + 2, ranks)
                if each is model:
                    set_hold(model, False)
                backward(each, 10 * step + 3, ranks)
                optimizer.step()
                optimizer.zero_grad()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(
                full(p.detach()), q.detach(), msg=lambda m, n=number: f"{hold}, way {n}: {m}"
            )


@pytest.mark.extensive("every way to hold with both kinds", but=("False-zero3-*", "True-element-*"))
@multirank(2)
@pytest.mark.parametrize("hold", [name for name, (shape, *_) in HOLDS.items() if len(shape) == 1])
@pytest.mark.parametrize("wrapped", [False, True])
def test_held_gradients_are_dropped(rank: int, world_size: int, hold: str, wrapped: bool) -> None:
    check_hold(rank, world_size, hold, wrapped)


@pytest.mark.extensive("each way to hold", but=("hsdp-4ranks",))
@pytest.mark.central("two axes need four ranks", ranks=4)
@multirank(4)
@pytest.mark.parametrize("hold", [name for name, (shape, *_) in HOLDS.items() if len(shape) == 2])
def test_held_gradients_are_dropped_on_two_axes(rank: int, world_size: int, hold: str) -> None:
    check_hold(rank, world_size, hold, False)


class UsesGradient(nn.Linear):
    """A layer whose forward uses the gradient so far."""

    use = "read"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if self.use == "write":
            self.weight.grad = torch.zeros_like(self.weight)
        elif self.use == "clear":
            self.weight.grad = None
        elif self.weight.grad is not None:
            y = y + self.weight.grad.abs().sum()
        return y


@multirank(2)
@pytest.mark.parametrize("layout", ["per_parameter", "element"])
def test_a_forward_does_not_see_gradients_of_the_full_weight(rank: int, world_size: int, layout: str) -> None:
    """It reads None while there are none, as with a plain model; everything else raises."""
    for compiled in (False, True):
        model: Any = sw.fully_shard(UsesGradient(4, 6), layout=layout)
        called = torch.compile(model, backend="eager") if compiled else model
        x = torch.randn(3, 4)
        called(x).sum().backward()
        if compiled:
            continue
        for held in (False, True):
            for use in ("read", "write", "clear"):
                model.use = use
                with pytest.raises(
                    RuntimeError, match=r"of unit 'UsesGradient', of shape \(6, 4\), was (read|chang)"
                ):
                    called(x)
            model.zero_grad()
            model.set_requires_gradient_sync(held)
            model.use = "read"
            called(x).sum().backward()


class Marked(nn.Parameter):
    """A user's class of parameters."""


@multirank(2)
@pytest.mark.parametrize("layout", ["per_parameter", "element"])
def test_parameters_of_a_user_s_class_tell_of_assignments_too(
    rank: int, world_size: int, layout: str
) -> None:
    model = layers()
    model[0].weight = Marked(model[0].weight.detach())
    sw.fully_shard(model, layout=layout)
    weight = model[0].weight
    kind, shown = type(weight), weight.__class__
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.set_requires_gradient_sync(False)
    backward(model, 0, [rank])
    assert isinstance(weight, (Marked, nn.Parameter)) and weight.grad is None
    weight.grad = None
    model.set_requires_gradient_sync(True)
    backward(model, 1, [rank])
    assert type(weight) is kind and weight.__class__ is shown
    plain = layers()
    backward(plain, 1, [0, 1])
    torch.testing.assert_close(full(weight.grad), plain[0].weight.grad)
    weight.grad = full(weight.grad).tril()
    optimizer.step()
    torch.testing.assert_close(
        full(weight.detach()), (plain[0].weight - 0.1 * plain[0].weight.grad.tril()).detach()
    )
