"""In-place edits of results of sharded tensors: of sums that are not reduced yet, of their views, and of gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardwright as sw
from tests.engine.kit.models import full
from tests.engine.kit.torch_versions import subclasses_dispatch
from tests.support import multirank, world_mesh

pytestmark = pytest.mark.skipif(not subclasses_dispatch, reason="torch's own DTensor computes there")

REDUCTIONS: dict[str, Callable[[Any], Any]] = {
    "sum": lambda w: w.sum(),
    "sum 0": lambda w: w.sum(0),
    "sum 1": lambda w: w.sum(1),
    "keepdim": lambda w: w.sum(0, keepdim=True),
    "mean": lambda w: w.mean(),
    "mean 0": lambda w: w.mean(0),
    "norm": lambda w: w.norm(),
    "norm 0": lambda w: w.norm(dim=0),
    "largest 0": lambda w: w.amax(0),
    "least": lambda w: w.min(),
    "product": lambda w: w.mT @ w,
    "squares": lambda w: w.pow(2).sum(),
    "two": lambda w: w.sum(0) + w.abs().sum(0),
}
EDITS: dict[str, Callable[[Any, Any], Any]] = {
    "mul_": lambda s, w: s.mul_(2),
    "div_": lambda s, w: s.div_(4),
    "add_ number": lambda s, w: s.add_(1.0),
    "add_ sum": lambda s, w: s.add_(w.sum()),
    "itself": lambda s, w: s.add_(s),
    "sub_": lambda s, w: s.sub_(w.mean()),
    "pow_": lambda s, w: s.pow_(2),
    "clamp_": lambda s, w: s.clamp_(min=0.5, max=1.5),
    "zero_": lambda s, w: s.zero_(),
    "fill_": lambda s, w: s.fill_(2.0),
    "neg_": lambda s, w: s.neg_(),
    "masked_fill_": lambda s, w: s.masked_fill_(s > 1, 0.0),
    "copy_": lambda s, w: s.copy_(s * 3),
    "first": lambda s, w: s.view(-1)[:1].mul_(5),
    "item": lambda s, w: s.view(-1).__setitem__(0, 7.0),
    "of a view": lambda s, w: s.unsqueeze(0).add_(1),
    "twice": lambda s, w: s.add_(w.sum()).mul_(0.5).add_(w.abs().sum()),
    "lerp_": lambda s, w: s.lerp_(s * 2, 0.25),
    "sqrt_": lambda s, w: s.abs_().sqrt_(),
}


STRATEGIES = ("zero3", "zero1", "ddp", "hsdp")


@pytest.mark.extensive("each edit of each result")
@multirank(2, 3)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_edits_are_those_of_the_plain_tensor(rank: int, world_size: int, strategy: str) -> None:
    """Each edit of each reduction with and without gradients, each in two of the strategies."""
    turn = STRATEGIES.index(strategy) + world_size
    torch.manual_seed(0)
    plain = nn.Linear(4, 5, bias=False).double()
    mesh = (
        world_mesh(1, world_size, names=("replicate", "shard"))
        if strategy == "hsdp"
        else world_mesh(world_size)
    )
    model: Any = nn.Linear(4, 5, bias=False).double()
    model.load_state_dict(plain.state_dict())
    sw.fully_shard(model, mesh=mesh, strategy=strategy)
    wrong = []
    for i, (name, reduction) in enumerate(REDUCTIONS.items()):
        for j, (how, edit) in enumerate(EDITS.items()):
            for grad in (False, True):
                if (i + j + grad + turn) % 2:
                    continue
                results = []
                for module in (plain, model):
                    w = module.weight if grad else module.weight.detach()
                    with torch.set_grad_enabled(grad):
                        s = reduction(w * 1)
                        try:
                            edit(s, w)
                            out = [full(s).detach()]
                            if grad and s.requires_grad:
                                out.append(full(torch.autograd.grad(s.pow(2).sum(), module.weight)[0]))
                        except RuntimeError as error:
                            results.append(error)
                            continue
                    results.append(out)
                expected, actual = results
                if isinstance(expected, RuntimeError):
                    continue
                same = not isinstance(actual, RuntimeError) and all(
                    torch.allclose(a, b, rtol=1e-10, atol=1e-12, equal_nan=True)
                    for a, b in zip(actual, expected, strict=True)
                )
                if not same:
                    wrong.append(f"{name}, {how}, grad {grad}: {actual}, expected {expected}")
    assert not wrong, "\n".join(wrong[:20]) + f"\n{len(wrong)} are wrong"
    model(torch.ones(2, 4).double()).sum().backward()
    total = model.weight.grad.pow(2).sum()
    total += model.weight.grad.abs().sum()
    grad = full(model.weight.grad)
    assert torch.allclose(full(total), grad.pow(2).sum() + grad.abs().sum())
