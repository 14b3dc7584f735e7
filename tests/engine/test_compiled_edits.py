"""Compiled functions that take sharded parameters: optimizers, averages, edits. The numbers of the same, not compiled.

Each graph edits weights without an operation that the engine sees run, so kept slabs and shards are compared after each
step: outputs, state dicts, full parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardwright as sw
from tests.engine.kit.models import full
from tests.support import multirank, world_mesh

SETTINGS: list[dict[str, Any]] = [
    {},
    {"layout": "ragged", "strategy": "zero1"},
    {"strategy": "ddp"},
    {"layout": sw.Ragged("element")},
]
Compile = Callable[..., Any]
Use = Callable[[nn.Module, Compile], Callable[[], list[torch.Tensor]]]


def average(averages: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    for one, other in zip(averages, values, strict=True):
        one.lerp_(other, 0.25)


def shrink(tensors: list[torch.Tensor]) -> None:
    for t in tensors:
        t.mul_(0.9).sub_(t.norm() * 0.001)


def optimizer_of(make: Callable[[Any], Any]) -> Use:
    def use(model: nn.Module, compiled: Compile) -> Callable[[], list[torch.Tensor]]:
        optimizer = make(model.parameters())
        step = compiled(optimizer.step)

        def run() -> list[torch.Tensor]:
            step()
            return [full(t) for p in model.parameters() for t in optimizer.state[p].values() if t.ndim]

        return run

    return use


def averaged(model: nn.Module, compiled: Compile) -> Callable[[], list[torch.Tensor]]:
    """An average of weights, which is no parameter, and reads them."""
    averages = [p.detach().clone() for p in model.parameters()]
    function = compiled(average, fullgraph=True)
    plain = optimizer_of(lambda p: torch.optim.SGD(p, 0.1))(model, lambda step: step)

    def run() -> list[torch.Tensor]:
        plain()
        function(averages, [p.detach() for p in model.parameters()])
        return [full(a) for a in averages]

    return run


def edited(through: Callable[[nn.Parameter], torch.Tensor]) -> Use:
    def use(model: nn.Module, compiled: Compile) -> Callable[[], list[torch.Tensor]]:
        function = compiled(torch.no_grad()(shrink))

        def run() -> list[torch.Tensor]:
            function([through(p) for p in model.parameters()])
            return []

        return run

    return use


USES: dict[str, Use] = {
    "SGD": optimizer_of(lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)),
    "AdamW": optimizer_of(lambda p: torch.optim.AdamW(p, 1e-2, foreach=True)),
    "wrapped": optimizer_of(lambda p: sw.fully_shard_optimizer(torch.optim.AdamW(p, 1e-2, foreach=True))),
    "average": averaged,
    "parameters": edited(lambda p: p),
    "data": edited(lambda p: p.data),
    "detach": edited(lambda p: p.detach()),
}


def trained(use: Use, compiled: Compile, rank: int, options: dict[str, Any]) -> list[torch.Tensor]:
    """The visible state of a model after each of three steps."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3))
    for module in (model[0], model):
        sw.fully_shard(module, mesh=world_mesh(2), **options)
    run, seen = use(model, compiled), []
    for step in range(3):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))
        model(x).square().mean().backward()
        seen += run()
        model.zero_grad()
        with torch.no_grad():
            seen.append(model(x))
        seen += [full(value).clone() for value in model.state_dict().values()]
        seen += [full(p.detach()).clone() for p in copy.deepcopy(model).parameters()]
    return seen


def by(backend: str) -> Compile:
    return lambda function, **options: torch.compile(function, backend=backend, **options)


@pytest.mark.extensive("many compiled graphs")
@multirank(2, timeout=180)
@pytest.mark.parametrize("number", range(len(SETTINGS)))
def test_compiled_edits_are_those_of_eager(rank: int, world_size: int, number: int) -> None:
    backend = "eager" if number == 2 else "aot_eager"
    for name, use in USES.items():
        if number > 2 and name in ("SGD", "AdamW", "wrapped"):
            continue  # depends on no layout that the first have not shown
        ours = trained(use, by(backend), rank, SETTINGS[number])
        eager = trained(use, lambda function, **_: function, rank, SETTINGS[number])
        # Graphs round other intermediate results than eager kernels.
        torch.testing.assert_close(
            ours, eager, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


@multirank(2)
def test_gathers_of_ragged_tensors_do_not_enter_graphs(rank: int, world_size: int) -> None:
    layer = sw.fully_shard(nn.Linear(5, 6), mesh=world_mesh(2), layout="ragged")
    dense = sw.fully_shard(nn.Linear(5, 6), mesh=world_mesh(2))
    function = torch.compile(lambda a, b: a.copy_(b), backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="outside of the compiled function"), torch.no_grad():
        function(layer.weight.detach(), dense.weight.detach())
