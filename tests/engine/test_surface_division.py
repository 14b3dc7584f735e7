"""How gradients are divided, as with torch's ``fully_shard``; unused parameters count as zero."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

from tests.engine.kit.subclasses import backward, check, data, full, gradients, loss_of
from tests.engine.kit.surface import Policy, averaged, both, build, need, ours, shard
from tests.support import multirank


@multirank(2)
@both
@pytest.mark.parametrize("reduce_dtype", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("factor", [1.0, 3.0, 16])
def test_gradient_divide_factor_of_one_unit(
    rank: int, world_size: int, library: str, factor: float, reduce_dtype: torch.dtype | None
) -> None:
    expected = averaged(build(), world_size)
    for name in expected:
        if name.startswith("blocks.1."):
            expected[name] = expected[name] * (world_size / factor)
    model = shard(library, build(), mp_policy=Policy(reduce_dtype=reduce_dtype))
    model.set_force_sum_reduction_for_comms(True)
    model.blocks[1].set_force_sum_reduction_for_comms(True)  # gloo has no other way with FSDP2
    model.blocks[1].set_gradient_divide_factor(factor)
    backward(model, rank)
    check(gradients(model), expected, tol=1e-5 if reduce_dtype is None else 2e-2)


@multirank(1, 2)
@ours
def test_gradient_divide_factor_needs_nothing_else(rank: int, world_size: int, library: str) -> None:
    """FSDP2 asks gloo for a reduction that it does not have and raises; on one rank it divides twice with sums."""
    expected = averaged(build(), world_size)
    model = shard(library, build())
    for module in (model, *model.blocks):
        module.set_gradient_divide_factor(8.0)
    backward(model, rank)
    expected = {n: g * (world_size / 8) for n, g in expected.items()}
    check(gradients(model), expected)
    model.zero_grad()
    for module in (model, *model.blocks):
        module.set_force_sum_reduction_for_comms(True)
    backward(model, rank)
    check(gradients(model), expected)


@multirank(2)
@both
def test_the_old_name_of_the_divide_factor_warns(rank: int, world_size: int, library: str) -> None:
    model = shard(library, build())
    model.set_force_sum_reduction_for_comms(True)
    with pytest.warns((DeprecationWarning, FutureWarning), match="set_gradient_divide_factor"):
        model.set_reduce_scatter_divide_factor(1.0)
    backward(model, rank)
    expected = averaged(build(), world_size)
    check(gradients(model), {n: g * (2 if n.startswith("head") else 1) for n, g in expected.items()})


@multirank(2, 3)
@both
@pytest.mark.parametrize("reduce_dtype", [None, torch.float16])
def test_sums_instead_of_averages_change_nothing(
    rank: int, world_size: int, library: str, reduce_dtype: torch.dtype | None
) -> None:
    model = shard(library, build(), mp_policy=Policy(reduce_dtype=reduce_dtype))
    for module in (model, *model.blocks):
        module.set_force_sum_reduction_for_comms(True)
    with CommDebugMode() as comm:
        backward(model, rank)
    assert comm.get_total_counts() == 7 + 4
    check(gradients(model), averaged(build(), world_size), tol=2e-2 if reduce_dtype else 1e-5)


class Either(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.use = "ab"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self.use:
            x = getattr(self, name)(x)
        return x


@multirank(2)
@both
def test_unused_parameters_on_one_rank_count_as_zero(rank: int, world_size: int, library: str) -> None:
    need(library, "set_reduce_scatter_unused_params")

    def loss(model: Any, r: int, _: int) -> torch.Tensor:
        model.use = "ab" if r == 0 else "a"
        return loss_of(model(data(r)))

    torch.manual_seed(0)
    plain = Either()
    expected = averaged(plain, world_size, loss=loss)
    model = shard(library, plain)
    model.set_reduce_scatter_unused_params(True)
    loss(model, rank, 0).backward()
    check(gradients(model), expected)


@multirank(2)
@pytest.mark.parametrize("library", ["torch", "shardwright"])
def test_parameters_unused_on_every_rank(rank: int, world_size: int, library: str) -> None:
    """Zeros, which weight decay acts on."""
    need(library, "set_reduce_scatter_unused_params")
    torch.manual_seed(0)
    model = shard(library, Either())
    model.set_reduce_scatter_unused_params(True)
    model.use = "a"
    backward(model, rank)
    assert not full(model.b.weight.grad).any()


@multirank(2)
@both
def test_an_event_after_the_optimizer(rank: int, world_size: int, library: str) -> None:
    model, plain = shard(library, build()), build()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, plain)]
    for micro in range(3):
        for name, gradient in averaged(
            plain, world_size, loss=lambda m, r, _, i=micro: loss_of(m(data(r, i)))
        ).items():
            plain.get_parameter(name).grad = gradient
        backward(model, rank, micro)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        model.set_post_optim_event(
            torch.Event(device="cpu")
        )  # a new one for each step; the CPU has nothing to wait
    check({n: full(p) for n, p in model.named_parameters()}, dict(plain.named_parameters()))
