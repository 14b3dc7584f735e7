"""Hooks on sharded parameters, clipping and loss scaling, as with torch's ``fully_shard``."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.engine.kit.subclasses import backward, check, data, full, gradients, loss_of
from tests.engine.kit.surface import averaged, both, build, ours, shard
from tests.support import multirank

# -- hooks on sharded parameters -------------------------------------------------------------------------------------


@multirank(2)
@both
def test_post_accumulate_grad_hooks_see_the_reduced_gradient(
    rank: int, world_size: int, library: str
) -> None:
    model, expected = shard(library, build()), averaged(build(), world_size)
    names = {p: n for n, p in model.named_parameters()}
    seen: dict[str, torch.Tensor] = {}
    calls: list[str] = []

    def hook(parameter: Any) -> None:
        calls.append(names[parameter])
        assert isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor)
        seen[names[parameter]] = parameter.grad._local_tensor.clone()

    handles = [p.register_post_accumulate_grad_hook(hook) for p in model.parameters()]
    for _ in range(2):
        backward(model, rank)
    assert sorted(calls) == sorted(2 * list(names.values()))
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad._local_tensor, seen[name], rtol=0, atol=0)
        torch.testing.assert_close(full(p.grad), 2 * expected[name], rtol=1e-5, atol=1e-6)
    for handle in handles:
        handle.remove()
    backward(model, rank)
    assert len(calls) == 2 * len(names)


@multirank(2)
@both
def test_the_optimizer_in_backward(rank: int, world_size: int, library: str) -> None:
    """The recipe of the hook: step and forget each gradient as it comes."""
    model, plain = shard(library, build()), build()
    optimizers = {p: torch.optim.SGD([p], lr=0.5) for p in model.parameters()}

    def step(parameter: Any) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    for micro in range(3):
        with torch.no_grad():
            for name, g in averaged(
                plain, world_size, loss=lambda m, r, _, i=micro: loss_of(m(data(r, i)))
            ).items():
                plain.get_parameter(name).sub_(0.5 * g)
        backward(model, rank, micro)
        assert all(p.grad is None for p in model.parameters())
        check({n: full(p) for n, p in model.named_parameters()}, dict(plain.named_parameters()))


@multirank(2)
@both
def test_hooks_are_silent_while_gradients_are_held(rank: int, world_size: int, library: str) -> None:
    model = shard(library, build())
    calls: list[int] = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda _: calls.append(1))
    model.set_requires_gradient_sync(False)
    backward(model, rank)
    assert not calls
    model.set_requires_gradient_sync(True)
    backward(model, rank)
    assert len(calls) == len(list(model.parameters()))


@multirank(2)
@ours
def test_tensor_hooks_see_the_reduced_gradient_before_it_is_added(
    rank: int, world_size: int, library: str
) -> None:
    """As in plain PyTorch. With FSDP2 they never fire."""
    model, expected = shard(library, build()), averaged(build(), world_size)
    seen: list[Any] = []
    weight = model.blocks[1].up.weight
    handle = weight.register_hook(lambda g: seen.append(g) or 3 * g)
    model.head.weight.register_hook(lambda g: seen.append(None))  # returns nothing: changes nothing
    for _ in range(2):
        backward(model, rank)
    kept = [g for g in seen if g is not None]
    assert len(kept) == 2 and len(seen) == 4
    for gradient in kept:  # each backward's own, not the sum
        assert isinstance(gradient, DTensor)
        torch.testing.assert_close(full(gradient), expected["blocks.1.up.weight"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(full(weight.grad), 6 * expected["blocks.1.up.weight"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        full(model.head.weight.grad), 2 * expected["head.weight"], rtol=1e-5, atol=1e-6
    )
    handle.remove()
    model.zero_grad()
    backward(model, rank)
    check(gradients(model), expected)


# -- clipping and loss scaling ---------------------------------------------------------------------------------------


@multirank(2)
@both
@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
@pytest.mark.parametrize("foreach", [None, False])
def test_torchs_clip_grad_norm(
    rank: int, world_size: int, library: str, norm_type: float, foreach: bool | None
) -> None:
    plain = build()
    for name, gradient in averaged(plain, world_size).items():
        plain.get_parameter(name).grad = gradient
    model = shard(library, build())
    backward(model, rank)
    arguments: Any = {"max_norm": 0.05, "norm_type": norm_type, "foreach": foreach}
    found = torch.nn.utils.clip_grad_norm_(model.parameters(), **arguments)
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), **arguments)
    assert isinstance(found, DTensor)
    torch.testing.assert_close(found.full_tensor(), expected, rtol=1e-5, atol=1e-6)
    check(gradients(model), {n: p.grad for n, p in plain.named_parameters() if p.grad is not None})


@multirank(2)
@both
def test_torchs_clipping_in_two_parts_and_its_refusal(rank: int, world_size: int, library: str) -> None:
    model, expected = shard(library, build()), averaged(build(), world_size)
    backward(model, rank)
    norm: Any = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.05, norm)
    total = torch.stack([g.norm() for g in expected.values()]).norm()
    torch.testing.assert_close(norm.full_tensor(), total, rtol=1e-5, atol=1e-6)
    check(gradients(model), {n: g * (0.05 / total) for n, g in expected.items()})
    torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)
    assert max(g.abs().max().item() for g in gradients(model).values()) <= 1.001e-3
    if rank == 1:
        model.head.bias.grad._local_tensor.fill_(math.nan)
    with pytest.raises(RuntimeError, match="non-finite"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)


@multirank(2)
@both
@pytest.mark.parametrize("overflow", [None, 0, 1])
def test_the_gradient_scaler(rank: int, world_size: int, library: str, overflow: int | None) -> None:
    """An overflow on one rank must skip the step on all, and lower the scale on all."""
    model, plain = shard(library, build()), build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    scaler.scale(loss_of(model(data(rank)))).backward()
    if overflow == rank:
        model.head.bias.grad._local_tensor.fill_(math.inf)
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    scaler.step(optimizer)
    scaler.update()
    if overflow is None:
        with torch.no_grad():
            for name, gradient in averaged(plain, world_size).items():
                plain.get_parameter(name).sub_(0.5 * gradient)
    check({n: full(p) for n, p in model.named_parameters()}, dict(plain.named_parameters()))
    assert scaler.get_scale() == (2048.0 if overflow is None else 512.0)
