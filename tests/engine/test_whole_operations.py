"""Operations on sharded parameters that compute on whole tensors, beside those of torch's table."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import shardwright as sw
from shardwright.engine import RaggedTensor
from tests.support import multirank, seed_all

LAYOUTS: list[dict[str, Any]] = [{}, {"strategy": "ddp"}, {"layout": "ragged"}]
NAMED = r"(?s)arameter 'weight' of unit '\w*'.*(full_tensor\(\)|unsharded\()"


@torch.library.custom_op("shardwright_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


@torch.library.custom_op("shardwright_tests::double_", mutates_args=("x",))
def double_(x: torch.Tensor) -> None:
    x.mul_(2)


@doubled.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def layer(rows: int = 5, columns: int = 3, **settings: Any) -> tuple[torch.Tensor, Any, nn.Module]:
    """The plain weight, the sharded one and its module."""
    torch.manual_seed(1)
    module = nn.Linear(columns, rows, bias=False)
    plain = module.weight.detach().clone().requires_grad_()
    sw.fully_shard(module, **settings)
    return plain, module.weight, module


@multirank(2)
@pytest.mark.parametrize("settings", LAYOUTS, ids=str)
@pytest.mark.parametrize("operation", ["doubled", "double_"])
def test_operations_of_users_raise(
    rank: int, world_size: int, settings: dict[str, Any], operation: str
) -> None:
    plain, weight, _ = layer(**settings)
    with pytest.raises((RuntimeError, NotImplementedError), match=NAMED) as caught:
        globals()[operation](weight.detach())
    assert "shardwright_tests" in str(caught.value)
    assert torch.equal(weight.full_tensor(), plain)


VECTORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cumsum": lambda p: p.cumsum(-1),
    "cumprod": lambda p: p.cumprod(-1),
    "logcumsumexp": lambda p: p.logcumsumexp(-1),
    "argmax": lambda p: p.argmax(-1),
    "argmin": lambda p: p.argmin(-1),
    "cummax": lambda p: p.cummax(-1)[0],
    "softmax": lambda p: p.softmax(-1),
    "flip": lambda p: p.flip(-1),
    "roll": lambda p: p.roll(1, -1),
    "sort": lambda p: p.sort(-1)[0],
    "kthvalue": lambda p: p.kthvalue(2, -1)[0],
}


@multirank(2, 3)
@pytest.mark.parametrize("settings", LAYOUTS[:2], ids=str)
def test_dimensions_counted_from_the_end(rank: int, world_size: int, settings: dict[str, Any]) -> None:
    torch.manual_seed(1)
    norm = nn.LayerNorm(7)
    nn.init.normal_(norm.weight)
    plain = norm.weight.detach().clone()
    sw.fully_shard(norm, **settings)
    weight: Any = norm.weight.detach()
    for name, operation in VECTORS.items():
        result: Any = operation(weight)
        torch.testing.assert_close(result.full_tensor(), operation(plain), msg=name)


@multirank(2, 3)
@pytest.mark.parametrize("settings", LAYOUTS[:2], ids=str)
def test_a_difference_of_plain_tensors_in_backward_raises(
    rank: int, world_size: int, settings: dict[str, Any]
) -> None:
    """Rows that only this rank reads have a gradient on this rank alone."""
    plain, weight, _ = layer(**settings)
    rows = torch.tensor([0, 2])
    weight[rows].square().sum().backward()
    plain[rows].square().sum().backward()
    assert torch.allclose(weight.grad.full_tensor(), plain.grad)
    with pytest.raises(RuntimeError, match="diverged"):
        weight[rows + rank].square().sum().backward()


@multirank(2, 3)
@pytest.mark.parametrize("settings", LAYOUTS[:1], ids=str)
def test_draws_with_other_seeds_are_parts_of_one_tensor(
    rank: int, world_size: int, settings: dict[str, Any]
) -> None:
    _, weight, _ = layer(**settings)
    seed_all(rank)
    first: Any = torch.randn_like(weight)
    seed_all(rank)
    own = torch.randn(5, 3)
    rows = first.to_local().shape[0]
    start = -(-5 // world_size) * rank
    assert first.placements == weight.placements
    assert torch.equal(first.to_local().detach(), own[start : start + rows])


@multirank(2)
def test_a_shape_changed_in_place(rank: int, world_size: int) -> None:
    plain, weight, _ = layer(4, 4)
    for change in (
        torch.Tensor.t_,
        lambda t: t.unsqueeze_(0),
        lambda t: t.transpose_(0, 1),
        lambda t: t.squeeze_(),
    ):
        found, expected = weight.exp(), plain.exp()
        change(found)
        change(expected)
        assert found.shape == expected.shape
        assert torch.equal(found.full_tensor(), expected)
        assert torch.equal((found * 2).full_tensor(), expected * 2)


@multirank(2)
def test_parametrizations_do_not_swallow_the_error_of_a_ragged_parameter(rank: int, world_size: int) -> None:
    _, _, module = layer(layout="ragged")
    assert isinstance(module.weight, RaggedTensor)
    with pytest.raises(RuntimeError, match=NAMED) as caught:
        weight_norm(module)
    assert not isinstance(caught.value, NotImplementedError)


@multirank(2)
def test_a_plain_tensor_beside_gets_the_whole_weight(rank: int, world_size: int) -> None:
    plain, weight, _ = layer()
    for operation in (
        lambda w: w.exp() + torch.ones(5, 3),
        lambda w: torch.cdist(w * 2, torch.ones(5, 3)),
        lambda w: torch.ones(5, 3).add_(w.detach()),
        lambda w: torch.addmm(torch.ones(5, 5), w, w.t()),
    ):
        torch.testing.assert_close(operation(weight), operation(plain))


@multirank(2)
def test_a_hook_multiplies_a_rank_s_own_tensor_by_a_weight(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    plain: Any = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    model: Any = copy.deepcopy(plain)
    sw.fully_shard(model[0])
    sw.fully_shard(model)
    gradients = []
    for each in (plain, model):
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(rank)).requires_grad_()
        with torch.no_grad():
            own = x.clone()
        each[0].register_forward_hook(
            lambda module, args, output, own=own: (
                output.register_hook(lambda g: g + (own @ module.weight.t()) * g) and None
            )
        )
        each(x).sum().backward()
        gradients.append(x.grad)
    torch.testing.assert_close(*gradients)
