"""Sharded models under torch.func: values and gradients of a plain model, and ordinary steps that stay right after it.

Every rank has data of its own. After each use, also one that raises, a step and its parameters are compared.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.utils.checkpoint import checkpoint

import shardwright as sw
from tests.engine.kit.models import full
from tests.engine.twins import (
    SETTINGS,
    assert_same_gradients,
    assert_steps_right,
    data,
    models,
    reduce_plain,
)
from tests.support import multirank, world_mesh

Use = Callable[[nn.Module, torch.Tensor], Any]


def total(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda t: model(t).square().sum()


def penalty(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A gradient of a gradient: the parameters' gradients come through the inner backward's own graph."""
    slope = grad(total(model))(x)
    slope.square().sum().backward()
    return slope


def backwards(output: torch.Tensor) -> torch.Tensor:
    output.square().sum().backward()
    return output


def gradient_and_loss(model: nn.Module, x: torch.Tensor) -> Any:
    slope, (value, output) = torch.func.grad_and_value(
        lambda t: ((y := model(t)).square().sum(), y), has_aux=True
    )(x)
    (value + output.sum()).backward()
    return slope, value, output


def pull_back_later(model: nn.Module, x: torch.Tensor) -> Any:
    """Other calls of the model stand between a call and its transform's backward."""
    y, pull = vjp(model, x)
    model(2 * x).sum().backward()
    with torch.no_grad():
        model(3 * x)
    return y, *pull(torch.ones_like(y)), *pull(2 * torch.ones_like(y))


def inside_no_grad(model: nn.Module, x: torch.Tensor) -> Any:
    with torch.no_grad():
        return grad(total(model))(x), vmap(model, randomness="different")(x)


def nested(model: nn.Module, x: torch.Tensor) -> Any:
    model.eval()  # transforms inside others draw no numbers
    per_row, curvature = vmap(jacrev(model))(x), vmap(hessian(total(model)))(x)
    result = per_row, curvature, jacfwd(jacrev(total(model)))(x[0])
    model.train()
    return result


def with_full_weights(model: nn.Module, x: torch.Tensor) -> Any:
    """Gradients with regard to weights that are lent to the model, of each row."""
    weights = {name: full(p.detach()) for name, p in model.named_parameters()}

    def loss(these: Any, row: torch.Tensor) -> torch.Tensor:
        return functional_call(model, these, (row,)).square().sum()

    return vmap(grad(loss), in_dims=(None, 0), randomness="same")(weights, x)


def some_full_weights(model: nn.Module, x: torch.Tensor) -> Any:
    """One unit has lent weights, the others their own, whose gradients arrive."""
    lent = {"4.weight": full(model.get_parameter("4.weight").detach()) * 2}
    backwards(vmap(lambda row: functional_call(model, lent, (row,)), randomness="different")(x))
    return functional_call(model, dict(model.named_parameters()), (x,))


def recomputed(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    forward = vmap(model, randomness="different")
    return backwards(checkpoint(forward, x.clone().requires_grad_(), use_reentrant=False))


def batched_rows(model: nn.Module, x: torch.Tensor) -> Any:
    return torch.autograd.functional.jacobian(model, x, vectorize=True)


def duals(model: nn.Module, x: torch.Tensor) -> Any:
    import torch.autograd.forward_ad as forward_ad

    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x.clone().requires_grad_(), x)
        output = model(dual)
        backwards(output)
        return forward_ad.unpack_dual(output).tangent.detach()


def traced(model: nn.Module, x: torch.Tensor) -> Any:
    with torch.no_grad():
        output, push = linearize(model.eval(), x)
        result = output, push(x), push(2 * x)
    model.train()
    return result


USES: dict[str, Use] = {
    "grad": lambda m, x: grad(total(m))(x),
    "grad, then backward": gradient_and_loss,
    "grad of grad": penalty,
    "vmap, then backward": lambda m, x: backwards(vmap(m, randomness="different")(x)),
    "vmap in chunks": lambda m, x: backwards(vmap(m, randomness="same", chunk_size=3)(x)),
    "jvp": lambda m, x: jvp(m, (x,), (x + 1,)),
    "vjp, later": pull_back_later,
    "no_grad": inside_no_grad,
    "nested": nested,
    "functionalize": lambda m, x: backwards(torch.func.functionalize(m)(x)),
    "functional_call": with_full_weights,
    "functional_call of some": some_full_weights,
    "checkpoint": recomputed,
    "jacobian": batched_rows,
    "dual numbers": duals,
    "linearize": traced,
}


def outcomes(use: Use, *models: nn.Module, x: torch.Tensor) -> Iterator[Any]:
    for model in models:
        torch.manual_seed(11)
        yield use(model, x)


#: Uses that take long, for torch's sake, and depend on no setting.
LONG = ("nested", "linearize", "jacobian", "checkpoint")


@pytest.mark.extensive("each setting")
@multirank(2)
@pytest.mark.parametrize("number", range(len(SETTINGS)))
def test_transforms_give_what_a_plain_model_gives(rank: int, world_size: int, number: int) -> None:
    later = models(**SETTINGS[number])
    assert_steps_right(*later, rank, step=0)
    for step, (name, use) in enumerate(USES.items()):
        if name in LONG and number > 1:
            continue
        first = [models(**SETTINGS[number])] if step % len(SETTINGS) == number else []
        for model, plain in (*first, later):
            ours, theirs = outcomes(use, model, plain, x=data(rank, step))
            torch.testing.assert_close(ours, theirs, msg=lambda text, name=name: f"{name}: {text}")
            assert_same_gradients(model, plain)
            assert_steps_right(model, plain, rank, step)


class Broken(Exception):
    pass


@multirank(2)
def test_a_function_that_fails_under_a_transform_leaves_the_model_right(rank: int, world_size: int) -> None:
    def failing(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        model(x)
        raise Broken

    for options in SETTINGS[:3]:
        model, plain = (each.eval() for each in models(**options))  # a failed call may leave numbers drawn
        for step, transform in enumerate((grad, vmap, jacrev)):
            handle = model[3].register_forward_hook(lambda *_: (_ for _ in ()).throw(Broken()))
            with pytest.raises(Broken):  # inside a unit
                transform(lambda x, m=model: m(x).sum())(data(rank))
            handle.remove()
            with pytest.raises(Broken):
                transform(lambda x, m=model: failing(m, x))(data(rank))
            assert_steps_right(model, plain, rank, step)


class Energy(nn.Module):
    """Forces in forward, as models of molecules have them: part of them is a unit of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 6), nn.Sequential(nn.Tanh(), nn.Linear(6, 1))

    def energy(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)).sum()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return vmap(grad(self.energy))(x) + self.second(self.first(x))


@multirank(2)
def test_gradient_penalties(rank: int, world_size: int) -> None:
    """The way that the error for ``create_graph=True`` names."""
    for options in SETTINGS:
        torch.manual_seed(5)
        plain = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 1))
        model: Any = copy.deepcopy(plain)
        sw.fully_shard(model, mesh=world_mesh(2), **options)
        for step in range(3):
            for each, ranks in ((model, [rank]), (plain, range(2))):
                for r in ranks:
                    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + r))
                    slopes = vmap(grad(lambda x, each=each: each(x[None]).sum()))(x)
                    loss = (slopes.norm(dim=1) - 1).square().mean() + each(x).mean()
                    (loss / len(ranks)).backward()
            for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(full(p.grad), q.grad)
            with torch.no_grad():
                for p in (*model.parameters(), *plain.parameters()):
                    p.sub_(0.1 * p.grad)  # type: ignore[operator]
            model.zero_grad()
            plain.zero_grad()


@multirank(2)
def test_transforms_inside_a_forward(rank: int, world_size: int) -> None:
    for options in SETTINGS:
        torch.manual_seed(5)
        plain = nn.Sequential(nn.Linear(5, 5), Energy(), nn.Linear(5, 3))
        model = copy.deepcopy(plain)
        inner = {key: value for key, value in options.items() if key != "memory"}
        sw.fully_shard(model[1].second, mesh=world_mesh(2), **inner)
        sw.fully_shard(model[1], mesh=world_mesh(2), **inner)
        sw.fully_shard(model, mesh=world_mesh(2), **options)
        for step in range(3):
            assert_steps_right(model, plain, rank, step)


@multirank(2)
def test_optimizers_that_step_in_backward_see_all_gradients_of_copies(rank: int, world_size: int) -> None:
    for options in SETTINGS[:3]:
        model, plain = models(**options)
        stepping = sw.optim.in_backward(torch.optim.SGD(model.parameters(), lr=0.1))
        optimizer = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.1)
        for step in range(3):
            for each in (model, plain):
                torch.manual_seed(step)
                rows = vmap(each, randomness="different")
                (rows(data(rank, step)).square().mean() + rows(data(rank, step + 1)).sum()).backward()
            reduce_plain(plain)
            stepping.step()
            optimizer.step()
            optimizer.zero_grad()
            for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(full(p), q)


class Shrinking(nn.Module):
    """Edits its own weight in forward, in both ways."""

    def __init__(self, through_data: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 5))
        self.through_data = through_data

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            (self.weight.data if self.through_data else self.weight).mul_(0.5)
        return x @ self.weight


@multirank(2)
def test_edits_of_copies_reach_the_shards(rank: int, world_size: int) -> None:
    for options in SETTINGS:
        for through_data in (False, True):
            torch.manual_seed(7)
            plain = nn.Sequential(Shrinking(through_data), nn.Linear(5, 3))
            model = sw.fully_shard(copy.deepcopy(plain), mesh=world_mesh(2), **options)
            ours, theirs = outcomes(lambda m, x: vmap(m)(x), model, plain, x=data(rank))
            torch.testing.assert_close(ours, theirs)
            torch.testing.assert_close(full(model[0].weight), plain[0].weight)
            assert_steps_right(model, plain, rank, 1)


@multirank(2)
def test_sharded_values_in_the_place_of_parameters_are_refused(rank: int, world_size: int) -> None:
    for options in SETTINGS[:3]:
        model, plain = models(**options)
        sharded = dict(model.named_parameters())
        detached = {name: p.detach() for name, p in sharded.items()}
        with pytest.raises(RuntimeError, match=r"'4\.weight' of unit.*functional_call.*full_tensor"):
            functional_call(model, detached, (data(rank),))
        with pytest.raises(RuntimeError, match=r"functional_call.*full_tensor"):
            grad(lambda these, m=model: functional_call(m, these, (data(rank),)).sum())(sharded)
        assert_steps_right(model, plain, rank, 1)
