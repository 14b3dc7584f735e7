"""A caller changes in place the views that a unit returns. Gradients are those of the plain model.

An in-place operation on a view gives it a new node in the graph, so backward must reach the unit on another way.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import itertools
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwright as sw
from tests.engine.kit.edits import average, check_same
from tests.support import multirank, world_mesh

Tensor = torch.Tensor

#: What a unit makes of the result of its first operation, of shape (2, 3, 4).
VIEWS: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda t: t,
    "transpose": lambda t: t.transpose(0, 1),
    "permute": lambda t: t.permute(2, 0, 1),
    "mT": lambda t: t.mT,
    "movedim": lambda t: t.movedim(0, -1),
    "squeeze": lambda t: t.unsqueeze(1).squeeze(1),
    "unsqueeze": lambda t: t.unsqueeze(0),
    "reshape": lambda t: t.reshape(6, 4),
    "view": lambda t: t.view(2, 12),
    "flatten": lambda t: t.flatten(),
    "unflatten": lambda t: t.unflatten(-1, (2, 2)),
    "row": lambda t: t[0],
    "rows": lambda t: t[:, 1:],
    "step": lambda t: t[..., ::2],
    "ellipsis": lambda t: t[...],
    "narrow": lambda t: t.narrow(1, 0, 2),
    "select": lambda t: t.select(2, 1),
    "diagonal": lambda t: t.diagonal(0, 1, 2),
    "expand": lambda t: t.expand(5, 2, 3, 4),
    "as_strided": lambda t: t.as_strided((2, 4), (4, 1)),
    "view of views": lambda t: t.transpose(0, 1)[1:].flatten(1)[:, :3],
    "two views": lambda t: (t[..., :2], t[..., 2:]),
    "both": lambda t: (t, t.transpose(0, 1)),
    "pieces": lambda t: t.chunk(2, -1),
    "rows apart": lambda t: t.unbind(0),
    "real": lambda t: torch.view_as_real(torch.view_as_complex(t.unflatten(-1, (2, 2)))),
    "copy": lambda t: t.clone().transpose(0, 1),
    "later result": lambda t: t.tanh().transpose(0, 1),
    "changed inside": lambda t: t.mul_(2).transpose(0, 1),
}


class Pair(NamedTuple):
    first: Any
    second: Any = None


@dataclasses.dataclass
class Output:
    hidden: Any
    text: str = "text"


class Opaque:
    def __init__(self, value: Any) -> None:
        self.value = value


WRAPS: dict[str, Callable[[Any], Any]] = {
    "bare": lambda t: t,
    "tuple": lambda t: (t, 1),
    "list": lambda t: [t],
    "dict": lambda t: {"hidden": t},
    "nested": lambda t: {"a": [(None, {"b": t})]},
    "ordered": lambda t: collections.OrderedDict(hidden=t),
    "namedtuple": lambda t: Pair(t),
    "dataclass": lambda t: Output(t),
    "object": lambda t: Opaque([t]),
    "namespace": lambda t: types.SimpleNamespace(hidden=t),
}


def tensors_in(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, (Opaque, types.SimpleNamespace, Output)):
        output = list(vars(output).values())
    if isinstance(output, dict):
        output = list(output.values())
    return [t for item in output for t in tensors_in(item)] if isinstance(output, (list, tuple)) else []


def add(t: Tensor) -> Tensor:
    t += 0.5
    return t


def assign(t: Tensor) -> Tensor:
    t[..., 0] = 2.0
    return t


def scale_a_view(t: Tensor) -> Tensor:
    t[..., -1:].mul_(3)
    return t


def in_between(t: Tensor) -> Tensor:
    t.mul_(2)
    t.view_as(t).add_(t.detach())
    return t


#: What the caller does with each view.
WRITES: dict[str, Callable[[Tensor], Tensor]] = {
    "nothing": lambda t: t,
    "add": add,
    "mul_": lambda t: t.mul_(3),
    "tanh_": lambda t: t.tanh_(),
    "assign": assign,
    "view of it": scale_a_view,
    "twice": in_between,
    "add_ of itself": lambda t: t.add_(t * 2),
    "copy_": lambda t: t.copy_(t * 2),
    "without gradient": lambda t: torch.no_grad()(add)(t),
}


class Unit(nn.Module):
    """Its first operation is the first node of the call, if its input needs no gradient."""

    def __init__(self, first: str, view: str, wrap: str) -> None:
        super().__init__()
        self.first, self.make, self.wrap = first, VIEWS[view], WRAPS[wrap]
        self.table, self.linear = nn.Embedding(8, 4), nn.Linear(4, 4)

    def forward(self, ids: Tensor, x: Tensor) -> Any:
        if self.first == "embedding":
            t = self.table(ids)
        elif self.first == "linear":
            t = self.linear(x)
        elif self.first == "matmul":
            t = x @ self.linear.weight
        elif self.first == "product":  # of weights alone
            t = (self.table.weight[:6] * 2).view(2, 3, 4) + 0 * self.linear.bias
        else:
            t = F.embedding(ids, self.table.weight) * self.linear.bias
        return self.wrap(self.make(t))


class Model(nn.Module):
    def __init__(self, unit: Unit, write: str) -> None:
        super().__init__()
        self.unit, self.write = unit, WRITES[write]
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        return self.scale * loss_of(self.unit(ids, x), self.write)


def loss_of(output: Any, write: Callable[[Tensor], Tensor]) -> Tensor:
    total = torch.zeros(())
    for t in tensors_in(output):
        written = write(t)
        weights = torch.linspace(-1, 1, written.numel()).view(written.shape)
        total = total + (written * weights).sum() + written.square().mean()
    for t in tensors_in(output):
        total = total + t.sum()  # reads every view after all writes
    return total


FIRSTS = ("embedding", "linear", "matmul", "product", "functional")
INPUTS = ("no gradient", "gradient")
PLACES = ("inner", "root", "inner, no gradient before")
OPTIONS: tuple[dict[str, Any], ...] = (
    {}, {"layout": "ragged"}, {"layout": "element"}, {"strategy": "ddp"}, {"strategy": "zero1"},
    {"reshard_after_forward": False},
)  # fmt: skip


def run(model: Any, place: str, write: str, x_needs_grad: bool, rank: int) -> Tensor | None:
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(0, 8, (2, 3), generator=generator)
    x = torch.randn(2, 3, 4, generator=generator).requires_grad_(x_needs_grad)
    if place == "inner, no gradient before":
        with torch.no_grad():
            model(ids, x)
    loss = loss_of(model(ids, x), WRITES[write]) if place == "root" else model(ids, x)
    loss.backward()
    return x.grad


def check(
    view: str, wrap: str, write: str, first: str, inputs: str, place: str, options: dict[str, Any]
) -> bool:
    """Returns False if plain PyTorch cannot do it."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.manual_seed(0)
    unit = Unit(first, view, wrap)
    plain = unit if place == "root" else Model(unit, write)
    model: Any = copy.deepcopy(plain)
    needs_grad = inputs == "gradient"
    try:
        expected = run(plain, place, write, needs_grad, rank)
    except RuntimeError:
        return False
    average(plain)
    mesh = world_mesh(world)
    if place != "root":
        sw.fully_shard(model.unit, mesh=mesh, **options)
    sw.fully_shard(model, mesh=mesh, **options)
    found = run(model, place, write, needs_grad, rank)
    torch.testing.assert_close(found, expected)
    check_same(plain, model)
    return True


FEW_VIEWS = ("itself", "transpose", "rows", "view of views", "two views", "copy")
FEW_WRITES = ("add", "assign", "twice")


def rows() -> list[tuple[Any, ...]]:
    """Every view with some writes; some views with every write and container. The other settings take turns."""
    pairs = [(view, "bare", write) for view, write in itertools.product(VIEWS, FEW_WRITES)]
    pairs += [(view, "bare", write) for view, write in itertools.product(FEW_VIEWS, WRITES)]
    pairs += [(view, wrap, "add") for view, wrap in itertools.product(FEW_VIEWS[1:], WRAPS)]
    turns = [itertools.cycle(values) for values in (FIRSTS, (*INPUTS, *INPUTS, *INPUTS[:1]), PLACES, OPTIONS)]
    return [(*pair, *(next(turn) for turn in turns)) for pair in pairs]


@pytest.mark.extensive("each kind of view")
@multirank(2, timeout=300)
def test_views_that_a_unit_returns_may_be_changed_in_place(rank: int, world_size: int) -> None:
    done = 0
    for row in rows():
        try:
            done += check(*row)
        except BaseException as error:
            error.add_note(f"view, container, write, first operation, inputs, place, options: {row}")
            raise
    assert done > len(rows()) * 0.75
