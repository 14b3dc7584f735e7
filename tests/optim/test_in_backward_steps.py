"""When an optimizer in backward steps: once per step, and never for gradients of inputs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardwright as sw
from tests.engine.kit.models import full
from tests.support import multirank

SETTINGS: list[dict[str, Any]] = [
    {},
    {"strategy": "ddp", "layout": "ragged"},
    {"offload_policy": sw.CPUOffloadPolicy(pin_memory=False)},
]


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))


def data(step: int, rank: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(100 * step + rank))


def made(**options: Any) -> tuple[Any, Any]:
    model: Any = layers()
    for each in (model[0], model[2], model[4], model):
        sw.fully_shard(each, **options)
    return model, sw.optim.in_backward(torch.optim.AdamW(model.parameters(), lr=0.1))


def values(model: nn.Module) -> torch.Tensor:
    return torch.cat([full(p.detach()).flatten() for p in model.parameters()])


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def grad_of_inputs(model: nn.Module, x: torch.Tensor) -> None:
    torch.autograd.grad(loss_of(model, x), x)


def backward_to_inputs(model: nn.Module, x: torch.Tensor) -> None:
    loss_of(model, x).backward(inputs=[x])


@multirank(2)
@pytest.mark.parametrize("of_inputs", [grad_of_inputs, backward_to_inputs])
def test_gradients_of_inputs_never_step(
    rank: int, world_size: int, of_inputs: Callable[[nn.Module, torch.Tensor], None]
) -> None:
    """Neither alone, nor between micro-batches, nor after them."""
    for options in SETTINGS:
        model, optimizer = made(**options)
        plain = layers()
        ordinary = torch.optim.AdamW(plain.parameters(), lr=0.1)
        for step in range(2):
            before = values(model)
            x = data(step, rank).requires_grad_()
            of_inputs(model, x)
            model.set_is_last_backward(False)
            loss_of(model, data(10 + step, rank)).backward()
            of_inputs(model, x)
            model.set_is_last_backward(True)
            of_inputs(model, x)
            assert torch.equal(values(model), before), options
            loss_of(model, data(20 + step, rank)).backward()
            of_inputs(model, x)
            optimizer.step()
            for r in range(world_size):
                sum(loss_of(plain, data(n + step, r)) / world_size for n in (10, 20)).backward()  # type: ignore[union-attr]
            ordinary.step()
            ordinary.zero_grad()
            # Sums of two ranks are added in another order, and AdamW divides by their roots.
            torch.testing.assert_close(values(model), values(plain), rtol=1e-4, atol=1e-4)


@multirank(2)
def test_two_backwards_of_a_step_raise_and_say_how_to_accumulate(rank: int, world_size: int) -> None:
    for options in SETTINGS:
        model, optimizer = made(**options)
        x = data(0, rank).requires_grad_()
        loss_of(model, x).backward()  # for x.grad, as in adversarial training
        optimizer.zero_grad()
        loss_of(model, x + x.grad.sign()).backward()
        with pytest.raises(RuntimeError, match=r"Two backwards of one step.*set_is_last_backward\(False\)"):
            optimizer.step()
        optimizer.step()
        for step in range(2):  # from now on the second one raises before it steps
            loss_of(model, data(step, rank)).backward()
            before = values(model)
            loss = loss_of(model, data(5 + step, rank))
            with pytest.raises(RuntimeError, match="Two backwards of one step reached unit"):
                loss.backward()
            assert torch.equal(values(model), before)
            optimizer.step()
            optimizer.zero_grad()


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("no memory is left")


@multirank(2)
def test_a_step_that_failed_half_way_is_not_repeated(rank: int, world_size: int) -> None:
    model, optimizer = made()
    saved = copy.deepcopy(layers().state_dict()), copy.deepcopy(optimizer.state_dict())

    def train() -> None:
        loss_of(model, data(0, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()

    train()
    first = values(model)
    handle = model[0].register_forward_hook(lambda module, args, output: Fails.apply(output))
    with pytest.raises(torch.OutOfMemoryError):
        train()
    handle.remove()
    optimizer.zero_grad()
    assert not torch.equal(values(model), first)
    with pytest.raises(RuntimeError, match="failed half-way, load model and optimizer again"):
        train()
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    train()
    torch.testing.assert_close(values(model), first)


@multirank(2)
def test_backwards_of_two_models_are_one_step(rank: int, world_size: int) -> None:
    one, other = layers(), layers()
    for model in (one, other):
        sw.fully_shard(model)
    both = torch.optim.AdamW([*one.parameters(), *other.parameters()], lr=0.1)
    optimizer = sw.optim.in_backward(both)
    for step in range(2):
        for model in (one, other):
            loss_of(model, data(step, rank)).backward()
        optimizer.step()
    assert torch.equal(values(one), values(other))


class Adapted(nn.Module):
    """A layer and an adapter beside it."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.adapter = base, nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.adapter(x)  # type: ignore[no-any-return]


@multirank(2)
@pytest.mark.parametrize("later", ["root", "block", "adapter"])
def test_parameters_that_a_later_fully_shard_shards_are_refused_or_followed(
    rank: int, world_size: int, later: str
) -> None:
    def build() -> tuple[Any, Callable[[], None]]:
        model: Any = layers()
        sw.fully_shard(model[0])
        if later == "adapter":
            model[2] = Adapted(model[2])
        if later != "root":
            return model, lambda: sw.fully_shard(model[2])  # type: ignore[arg-type,return-value]
        return model, lambda: sw.fully_shard(model)  # type: ignore[arg-type,return-value]

    model, shard_the_rest = build()
    optimizer = sw.optim.in_backward(torch.optim.AdamW(model.parameters(), lr=0.1))
    shard_the_rest()
    with pytest.raises(RuntimeError, match=r"were sharded after sw\.optim\.in_backward"):
        optimizer.step()
    with pytest.raises(RuntimeError, match=r"were sharded after sw\.optim\.in_backward"):
        loss_of(model, data(0, rank)).backward()
    before = [full(p.detach()).clone() for p in model.parameters()]
    sw.fully_shard_optimizer(optimizer)
    loss_of(model, data(0, rank)).backward()
    sharded = [hasattr(p, "full_tensor") for p in model.parameters()]
    gone = [type(p.grad).__name__ == "SteppedGradient" for p in model.parameters()]
    assert gone == sharded  # it steps the new units in backward, too
    optimizer.step()
    assert not any(torch.equal(full(p.detach()), b) for p, b in zip(model.parameters(), before, strict=True))
