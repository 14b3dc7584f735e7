"""Parametrizations of a module that is already sharded: torch takes NotImplementedError for a missing right inverse.

So an operation in ``right_inverse`` gives the result on the whole tensor, or raises an error that reaches the user.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import register_parametrization

import shardwright as sw
from tests.support import multirank, world_mesh

Operation = Callable[[torch.Tensor], torch.Tensor]


def first_row_zero(w: torch.Tensor) -> torch.Tensor:
    w = w.clone()
    w[0] = 0.0
    return w


def from_numpy(w: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(2 * w.detach().numpy())


def pickled(w: torch.Tensor) -> torch.Tensor:
    pickle.dumps(w)
    return 2 * w


def with_data(w: torch.Tensor) -> torch.Tensor:
    w = w.clone()
    w.data = torch.ones(6, 6)
    return w


def with_graph(w: torch.Tensor) -> torch.Tensor:
    w = w.detach().requires_grad_()
    with torch.enable_grad():
        (gradient,) = torch.autograd.grad((w * w).sum(), w, create_graph=True)
    return gradient.detach()


def loss_in_place(w: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        total = w.detach().sum()
        total += (torch.ones(2, requires_grad=True) ** 2).sum()
    return w * total.detach()


OPERATIONS: dict[str, Operation] = {
    "exp": torch.exp,
    "inverse": torch.linalg.inv,
    "cholesky": lambda w: torch.linalg.cholesky(w @ w.mT + torch.eye(6)),
    "matrix_exp": torch.linalg.matrix_exp,
    "qr": lambda w: torch.linalg.qr(w)[0],
    "svd": lambda w: torch.linalg.svd(w)[0],
    "sort": lambda w: w.sort(dim=0)[0],
    "cumsum": lambda w: w.cumsum(0),
    "roll": lambda w: w.roll(1, 0),
    "flip": lambda w: w.flip(0),
    "transpose": lambda w: w.mT.contiguous(),
    "triu": lambda w: w.triu(),
    "mean": lambda w: w - w.mean(0),
    "norm": lambda w: w / w.norm(dim=1, keepdim=True),
    "plain factor": lambda w: w * torch.arange(36.0).view(6, 6),
    "view": lambda w: (2 * w).view(-1).view(6, 6),
    "reshape": lambda w: (2 * w).reshape(3, 12).cumsum(1).reshape(6, 6),
    "first row": first_row_zero,
    "diagonal": lambda w: torch.diag(w.diagonal()),
    "as_strided": lambda w: w.as_strided((6, 6), (1, 6)).clone(),
    "fft": lambda w: torch.fft.rfft(w).abs().sum() * w,
    "einsum": lambda w: torch.einsum("ij,kj->ik", w, w),
    "histogram": lambda w: w * torch.histc(w, 3).sum(),
    "bucketize": lambda w: torch.bucketize(w, torch.tensor([-0.2, 0.0, 0.2])).float(),
    "put": lambda w: w.clone().put_(torch.tensor([1, 7]), torch.tensor([3.0, 4.0])),
    "scatter": lambda w: w.scatter(0, torch.zeros(1, 6, dtype=torch.long), 5.0),
    "unfold": lambda w: w.unfold(0, 6, 1)[0].clone(),
    "numpy": from_numpy,
    "tolist": lambda w: torch.tensor(w.tolist()) * 2,
    "redistribute": lambda w: (
        2 * w.redistribute(placements=w.placements) if hasattr(w, "placements") else 2 * w
    ),
    "pickle": pickled,
    "data": with_data,
    "double backward": with_graph,
    "loss in place": loss_in_place,
}


class Parametrization(nn.Module):
    def __init__(self, operation: Operation) -> None:
        super().__init__()
        self.operation = operation

    def forward(self, w: torch.Tensor) -> torch.Tensor:
        return w

    def right_inverse(self, w: torch.Tensor) -> torch.Tensor:
        return self.operation(w)


def whole(tensor: Any) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()


def linear(layout: str, strategy: str) -> tuple[nn.Linear, Any]:
    torch.manual_seed(0)
    plain = nn.Linear(6, 6)
    model: Any = nn.Linear(6, 6)
    model.load_state_dict(plain.state_dict())
    return plain, sw.fully_shard(model, mesh=world_mesh(2), layout=layout, strategy=strategy)


@pytest.mark.extensive("each layout with each strategy", but=("per_parameter-zero3-*", "ragged-ddp-*"))
@multirank(2)
@pytest.mark.parametrize("strategy", ["zero3", "ddp"])
@pytest.mark.parametrize("layout", ["per_parameter", "ragged"])
def test_operations_of_a_right_inverse(rank: int, world_size: int, layout: str, strategy: str) -> None:
    wrong = []
    for name, operation in OPERATIONS.items():
        plain, model = linear(layout, strategy)
        with torch.no_grad():
            expected = operation(plain.weight)
        try:
            register_parametrization(model, "weight", Parametrization(operation))
        except NotImplementedError as error:
            wrong.append((name, error))
        except Exception as error:
            print(name, type(error).__name__, str(error)[:150])
        else:
            actual = whole(model.parametrizations.weight.original)
            if not torch.allclose(actual, expected, atol=1e-5):
                wrong.append((name, "not applied" if torch.equal(actual, plain.weight) else actual))
    assert not wrong, wrong


@pytest.mark.extensive("each layout with each strategy", but=("ragged-zero3-*", "per_parameter-ddp-*"))
@multirank(2)
@pytest.mark.parametrize("strategy", ["zero3", "ddp"])
@pytest.mark.parametrize("layout", ["per_parameter", "ragged"])
def test_an_assigned_weight_passes_through_the_right_inverse(
    rank: int, world_size: int, layout: str, strategy: str
) -> None:
    """``module.weight = value`` calls it, too: of a module that was parametrized first, and then sharded."""
    wrong = []
    for name, operation in OPERATIONS.items():
        torch.manual_seed(0)
        model: Any = nn.Linear(6, 6)
        register_parametrization(model, "weight", Parametrization(lambda w: w))
        value = torch.randn(6, 6)
        with torch.no_grad():
            expected = operation(value)
        sw.fully_shard(model, mesh=world_mesh(2), layout=layout, strategy=strategy)
        parametrization = model.parametrizations.weight
        with torch.no_grad():
            sharded = parametrization.original.clone().copy_(cut_as(parametrization.original, value))
        parametrization[0].operation = operation
        try:
            with torch.no_grad():
                model.weight = sharded
        except NotImplementedError as error:
            wrong.append((name, error))
        except Exception as error:
            print(name, type(error).__name__, str(error)[:150])
        else:
            actual = whole(parametrization.original)
            if not torch.allclose(actual, expected, atol=1e-5):
                wrong.append((name, "not applied" if torch.equal(actual, value) else actual))
    assert not wrong, wrong


def cut_as(sharded: Any, value: torch.Tensor) -> Any:
    if isinstance(sharded, DTensor):
        return distribute_tensor(value, sharded.device_mesh, sharded.placements)
    return type(sharded.detach()).from_full(value, sharded.spec)


@multirank(2)
@pytest.mark.parametrize("layout", ["per_parameter", "ragged"])
def test_weight_norm_of_a_sharded_module(rank: int, world_size: int, layout: str) -> None:
    """Equal to the plain module's, or an error that names the parameter and the way out."""
    plain, model = linear(layout, "zero3")
    x = torch.randn(3, 6)
    try:
        parametrizations.weight_norm(model)
    except RuntimeError as error:
        assert layout == "ragged" and "parameter 'weight'" in str(error) and "per_parameter" in str(error)
        assert not isinstance(error, NotImplementedError)
        assert torch.equal(model(x), plain(x))  # nothing has changed
    else:
        parametrizations.weight_norm(plain)
        for kind in ("original0", "original1"):
            actual = whole(getattr(model.parametrizations.weight, kind))
            torch.testing.assert_close(actual, getattr(plain.parametrizations.weight, kind).detach())
        torch.testing.assert_close(model(x), plain(x))


@multirank(2)
@pytest.mark.parametrize("layout", ["per_parameter", "ragged"])
def test_data_of_gradients_and_results(rank: int, world_size: int, layout: str) -> None:
    """An assignment changes the values, or raises."""
    plain, model = linear(layout, "zero3")
    for module in (plain, model):
        module(torch.ones(2, 6)).square().mean().backward()
        for p in module.parameters():
            p.grad.data = p.grad.data / 2
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(whole(q.grad), p.grad)
        with pytest.raises(NotImplementedError, match="copy_ under no_grad"):
            q.grad.data = p.grad.clone()
        with pytest.raises(NotImplementedError, match="copy_ under no_grad"):
            q.detach().clone().data = p.detach().clone()
    for module in (plain, model):
        torch.optim.SGD(module.parameters(), 0.1).step()
        module.zero_grad()
        module(torch.ones(2, 6)).square().mean().backward()
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(whole(q.grad), p.grad)
