"""``fully_shard`` checks first and then changes: one that raises leaves modules and parameters as they were."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import shardwright as sw
from shardwright.engine import ManagedParameter
from shardwright.engine.assembly import build
from shardwright.engine.front import api
from shardwright.engine.unit import owning
from tests.engine.kit.models import full
from tests.support import multirank, world_mesh


class Parts(nn.Module):
    """Tied weights, buffers, an LSTM (which keeps a second list of its parameters), hooks and attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.inner = nn.Linear(4, 4)
        self.lstm = nn.LSTM(4, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(4))
        self.head.weight.label = "tied"  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.inner(self.embed(x)) * self.scale)[0])


def picture(model: nn.Module) -> Any:
    """All that a call might change, by identity."""
    modules = [
        (type(m), list(m.__dict__), [(k, id(v)) for k, v in m._parameters.items()],
         [(k, id(v)) for k, v in m._buffers.items()], [id(p) for p in getattr(m, "_flat_weights", ())],
         {k: len(v) for k, v in m.__dict__.items() if "hooks" in k})
        for m in model.modules()
    ]  # fmt: skip
    parameters = [(type(p), sorted(p.__dict__), p.requires_grad, p.shape) for p in model.parameters()]
    return modules, parameters


def places() -> Iterator[tuple[Any, str]]:
    """Functions in which a failure is injected, early and late in a call."""
    for name in ("own_parameters", "borrow_parameters"):
        yield owning, name
    for name in ("build_memory", "build", "plan_unit", "make_cut"):
        yield build if name != "build_memory" else owning, name
    for name in ("_move_buffers", "install", "hook_optimizers"):
        yield api, name
    yield nn.Module, "register_forward_pre_hook"
    yield nn.Module, "register_load_state_dict_post_hook"
    yield ManagedParameter, "show"


@multirank(2)
def test_a_call_that_raises_leaves_the_module_as_it_was(rank: int, world_size: int) -> None:
    x = torch.tensor([[0, 1, 5]])
    for with_inner in (False, True):
        for owner, name in places():
            for after in (0, 1, 2):  # fails at the first call, or later
                torch.manual_seed(0)
                model: Any = Parts()
                expected = model(x)
                if with_inner:
                    sw.fully_shard(model.embed)  # lends its weight to the outer unit
                before = picture(model)
                original, calls = getattr(owner, name), [0]

                def fails(
                    *args: Any, _f: Any = original, _n: int = after, _c: Any = calls, **kwargs: Any
                ) -> Any:
                    _c[0] += 1
                    if _c[0] > _n:
                        raise MemoryError("on purpose")
                    return _f(*args, **kwargs)

                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(owner, name, fails)
                    try:
                        sw.fully_shard(model)
                    except MemoryError:
                        assert picture(model) == before, (name, after, with_inner)
                        torch.testing.assert_close(model(x) if not with_inner else expected, expected)
                    else:
                        continue
                sw.fully_shard(model)
                out = model(x)
                torch.testing.assert_close(out, expected)
                out.sum().backward()
                assert model.head.weight is model.embed.weight and model.embed.weight.grad is not None
                dist.barrier()


@multirank(4)
def test_a_call_that_raises_leaves_tensor_parallel_parameters(rank: int, world_size: int) -> None:
    mesh = world_mesh(2, 2, names=("data", "tensor"))
    torch.manual_seed(0)
    model: Any = nn.Linear(4, 4, bias=False)
    whole = model.weight.detach().clone()
    model.weight = nn.Parameter(distribute_tensor(whole, mesh["tensor"], [Shard(0)]))
    before, weight = picture(model), model.weight
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "install", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            sw.fully_shard(model, mesh=mesh["data"])
    assert picture(model) == before and model.weight is weight and type(weight.data) is DTensor
    assert weight.device_mesh == mesh["tensor"] and weight.placements == (Shard(0),)
    torch.testing.assert_close(weight.full_tensor(), whole)
    sw.fully_shard(model, mesh=mesh["data"])
    x = distribute_tensor(torch.eye(4), mesh["tensor"], [Replicate()])
    torch.testing.assert_close(full(model(x)), whole.T)


@multirank(2)
def test_scripted_modules(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(scripted))
    x = torch.randn(2, 4)
    expected, before = model(x), picture(model)
    with pytest.raises(
        ValueError, match=r"Module '1.0' of Sequential is a ScriptModule with parameters.*ignored_modules"
    ):
        sw.fully_shard(model)
    with pytest.raises(ValueError, match=r"got a ScriptModule"):
        sw.fully_shard(scripted)
    assert picture(model) == before
    torch.testing.assert_close(model(x), expected)
    sw.fully_shard(model, ignored_modules={scripted})
    out = model(x)
    torch.testing.assert_close(out, expected)
    out.sum().backward()
    assert model[0].weight.grad is not None and all(type(p) is nn.Parameter for p in scripted.parameters())
    model.load_state_dict(model.state_dict())
    without = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Tanh()))
    expected = without(x)
    torch.testing.assert_close(sw.fully_shard(copy.deepcopy(without))(x), expected)


class Yields(nn.Linear):
    def forward(self, x: torch.Tensor) -> Iterator[torch.Tensor]:  # type: ignore[override]
        yield super().forward(x)


class ReturnsGenerator(nn.Linear):
    def forward(self, x: torch.Tensor) -> Iterator[torch.Tensor]:  # type: ignore[override]
        return (nn.functional.linear(row, self.weight) for row in x)


class Awaited(nn.Linear):
    async def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x)


@multirank(2)
def test_forwards_that_run_later_are_refused(rank: int, world_size: int) -> None:
    for kind in (Yields, Awaited):
        module = kind(4, 4)
        before = picture(module)
        with pytest.raises(ValueError, match=rf"The forward of {kind.__name__} is a generator or coroutine"):
            sw.fully_shard(module)
        assert picture(module) == before
    model: Any = nn.Sequential(ReturnsGenerator(4, 4))
    sw.fully_shard(model)
    with pytest.raises(TypeError, match=r"returned a generator, which runs when the weights are released"):
        model(torch.randn(2, 4))
    inner: Any = nn.Module()  # a generator may call units
    inner.layer = sw.fully_shard(nn.Linear(4, 4))
    inner.forward = lambda x: (inner.layer(row[None]) for row in x)
    assert len(list(inner(torch.randn(2, 4)))) == 2
