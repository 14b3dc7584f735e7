"""One rank that has all of a parameter computes with its shard: no gather, no slab, and all rules for edits hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import shardwright as sw
from shardwright.comm_hooks import Int8Blocks
from shardwright.engine import UNIT
from shardwright.engine.compat import storage_key
from tests.engine.kit.models import shard_layers, three_layers
from tests.engine.kit.training import units_of
from tests.support import multirank


def in_place(model: nn.Module) -> list[bool]:
    """For each parameter, whether its full form is its shard."""
    return [storage_key(p.view) == storage_key(p.local) for unit in units_of(model) for p in unit.parameters]


class Operations(TorchDispatchMode):
    """The names of operations, except those that make views."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        if name not in ("t", "detach", "view"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def step_of(model: Any, optimizer: torch.optim.Optimizer, rank: int) -> None:
    generator = torch.Generator().manual_seed(rank)
    model(torch.randn(4, 6, generator=generator)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@multirank(1)
@pytest.mark.parametrize("layout", ["per_parameter", "ragged"])
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_a_step_copies_no_weights(rank: int, world_size: int, strategy: str, layout: str) -> None:
    model = shard_layers(three_layers(), strategy=strategy, layout=layout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step_of(model, optimizer, rank)
    assert all(in_place(model))
    assert all(unit.weights.copies.training.slab.nbytes == 0 for unit in units_of(model))
    x = torch.randn(4, 6)
    with Operations() as seen, torch.no_grad():
        model(x)
    assert seen.names == ["addmm", "tanh", "addmm", "tanh", "addmm"]


@multirank(2)
def test_ddp_holds_its_parameters_once(rank: int, world_size: int) -> None:
    model = shard_layers(three_layers(), strategy="ddp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step_of(model, optimizer, rank)
    assert all(in_place(model))


@multirank(1)
def test_other_dtypes_have_a_slab(rank: int, world_size: int) -> None:
    model = shard_layers(three_layers(), mp_policy=sw.MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    step_of(model, torch.optim.SGD(model.parameters(), lr=0.1), rank)
    assert not any(in_place(model))
    unit = getattr(model[0], UNIT)
    assert unit.weights.copies.training.slab.nbytes >= 2 * sum(p.numel() for p in model[0].parameters())


@multirank(1)
def test_full_precision_in_eval_needs_no_slab(rank: int, world_size: int) -> None:
    policy = sw.PrecisionPolicy(param_dtype=torch.bfloat16, full_precision_in_eval=True)
    model = shard_layers(three_layers(), mp_policy=policy)
    plain = three_layers()
    x = torch.randn(4, 6)
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(x), plain(x), rtol=0, atol=0)
    assert all(unit.weights.copies.stored.slab.nbytes == 0 for unit in units_of(model) if unit.parameters)
    model.train()
    assert model(x).dtype == torch.bfloat16


@multirank(1)
def test_backward_over_weights_that_were_stepped_raises(rank: int, world_size: int) -> None:
    model = shard_layers(three_layers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step_of(model, optimizer, rank)
    loss = model(torch.randn(4, 6, requires_grad=True)).square().mean()
    model[2].weight.grad = torch.zeros_like(model[2].weight)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Halves(nn.Module):
    """Halves its weight in each forward, and may return a view of it."""

    def __init__(self, returns: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6, 6))
        self.returns = returns

    def forward(self, x: torch.Tensor) -> Any:
        with torch.no_grad():
            self.weight.mul_(0.5)
        return (x @ self.weight, self.weight.view(-1)) if self.returns else x @ self.weight


@multirank(1)
def test_an_edit_in_forward_stays_and_is_no_edit_of_a_later_shard(rank: int, world_size: int) -> None:
    model = sw.fully_shard(Halves())
    for number in range(1, 4):
        out = model(torch.ones(2, 6, requires_grad=True))
        torch.testing.assert_close(out, torch.full((2, 6), 6 * 0.5**number))
        out.sum().backward()
        assert (model.weight.full_tensor() == 0.5**number).all()
    first = model(torch.ones(2, 6, requires_grad=True))
    model(torch.ones(2, 6))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        first.sum().backward()


@multirank(1)
def test_an_output_that_is_a_view_of_a_weight_is_a_copy(rank: int, world_size: int) -> None:
    """As on several ranks. So code that was tried on one rank does the same on several."""
    model = sw.fully_shard(Halves(returns=True))
    _, view = model(torch.ones(2, 6))
    assert (view == 0.5).all()
    model(torch.ones(2, 6))
    assert (view == 0.5).all()
    view.sum().backward()
    assert (model.weight.grad.full_tensor() == 1).all()


@multirank(1)
def test_values_through_the_shard_are_seen_at_once(rank: int, world_size: int) -> None:
    model = shard_layers(three_layers())
    x = torch.ones(4, 6)
    before = model(x)
    with torch.no_grad():
        model[4].weight.zero_()
        model[4].bias.fill_(3.0)
    assert not torch.equal(model(x), before)
    assert (model(x) == 3.0).all()
    model[4].bias.data = torch.full_like(model[4].bias.full_tensor(), 4.0)
    assert (model(x) == 4.0).all()
    assert all(in_place(model))


class TwoReads(nn.Module):
    """Reads its scale at the begin and at the end of forward."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.inner = nn.Parameter(torch.ones(6)), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x * self.scale) * self.scale


@multirank(2)
def test_an_edit_of_the_shard_inside_backward_raises_as_in_a_plain_model(rank: int, world_size: int) -> None:
    model: Any = TwoReads()
    sw.fully_shard(model.inner, strategy="ddp")
    sw.fully_shard(model, strategy="ddp")
    out = model(torch.randn(2, 6, requires_grad=True))

    def edit(gradient: torch.Tensor) -> None:
        with torch.no_grad():
            shard.mul_(100.0)

    shard = model.scale.to_local().detach()
    model.inner.weight.register_hook(edit)
    edit(out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@multirank(1)
def test_a_module_may_keep_aliases_of_its_shard(rank: int, world_size: int) -> None:
    model = sw.fully_shard(nn.Linear(6, 6))
    model.kept = [model.weight, model.bias.to_local().detach()]
    model.whole = model.weight.full_tensor().detach()
    model(torch.randn(2, 6, requires_grad=True)).sum().backward()
    assert torch.equal(model.bias.grad.full_tensor(), torch.full((6,), 2.0))


class Logs(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.norm = float(self.weight.data.norm())
        return super().forward(x)


@multirank(1)
def test_reading_data_is_no_edit(rank: int, world_size: int) -> None:
    model = sw.fully_shard(Logs(6, 6))
    for _ in range(2):
        penalty = model.weight.to_local().square().sum() + model.weight.full_tensor().square().sum()
        (model(torch.randn(2, 6)).sum() + penalty).backward()


@multirank(1)
def test_an_edit_in_forward_with_a_codec(rank: int, world_size: int) -> None:
    """No weight travels, so the codec has rounded none."""
    model: Any = sw.fully_shard(Halves())
    model.set_all_gather_codec(Int8Blocks(4))
    for number in range(1, 3):
        model(torch.ones(2, 6))
        assert (model.weight.full_tensor() == 0.5**number).all()


class ReturnsInputToo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, self.linear(x)


@multirank(1)
def test_a_unit_that_returns_its_input_beside_its_result_is_reduced_once(rank: int, world_size: int) -> None:
    module: Any = sw.fully_shard(ReturnsInputToo())
    x, y = module(torch.randn(4, 6, requires_grad=True) * 1.0)
    gradients = getattr(module, UNIT).gradients
    reductions: list[Any] = []
    reduce = gradients.reduce
    gradients.reduce = lambda *args: reductions.append(args) or reduce(*args)
    (x + y).sum().backward()
    assert len(reductions) == 1
