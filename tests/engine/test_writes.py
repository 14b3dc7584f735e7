"""Writes into indices, slices and views of sharded tensors are those of the plain tensor, or an error; never others.

Each edit is made on a plain parameter and on the sharded one, with the generators seeded alike.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import shardwright as sw
from shardwright.engine.tensors.rows.tensor import ShardedTensor
from tests.engine.kit.torch_versions import subclasses_dispatch
from tests.support import multirank, world_mesh

pytestmark = pytest.mark.skipif(not subclasses_dispatch, reason="torch asks no subclass of DTensor")

Tensor = torch.Tensor
ROWS, COLUMNS = 7, 6


def index(*numbers: int) -> Tensor:
    return torch.tensor(numbers)


def assign(t: Tensor, place: Any, value: Any) -> None:
    t[place] = value


EDITS: dict[str, Callable[[Tensor], Any]] = {
    "row": lambda t: t[0].zero_(),
    "last row": lambda t: t[-1].fill_(3),
    "rows": lambda t: t[1:3].fill_(7),
    "rows of several ranks": lambda t: t[2:6].mul_(2),
    "every other row": lambda t: t[::2].neg_(),
    "columns": lambda t: t[:, 1:3].fill_(7),
    "block": lambda t: t[1:5, 2:4].add_(1),
    "element": lambda t: t[3, 2].fill_(9),
    "assigned row": lambda t: assign(t, 0, 0.0),
    "assigned rows": lambda t: assign(t, slice(1, 3), 7.0),
    "assigned column": lambda t: assign(t, (slice(None), 1), 2.0),
    "assigned element": lambda t: assign(t, (6, 5), 2.0),
    "assigned tensor": lambda t: assign(t, slice(2, 4), torch.arange(12.0).view(2, 6)),
    "assigned rows by index": lambda t: assign(t, index(0, 5), 7.0),
    "assigned by mask": lambda t: assign(t, torch.arange(42).view(7, 6) % 5 == 0, 7.0),
    "assigned by its own mask": lambda t: assign(t, t > 0.1, 7.0),
    "assigned everything": lambda t: assign(t, ..., 2.0),
    "own row": lambda t: t[0].copy_(t[5]),
    "flat": lambda t: t.view(-1)[::2].zero_(),
    "flat whole": lambda t: t.view(-1).copy_(torch.arange(42.0)),
    "flat part": lambda t: t.flatten()[5:20].add_(1),
    "reshaped": lambda t: t.view(6, 7)[2].zero_(),
    "three dimensions": lambda t: t.view(7, 2, 3)[:, 1].zero_(),
    "select": lambda t: t.select(0, 4).zero_(),
    "select column": lambda t: t.select(1, 4).zero_(),
    "narrow": lambda t: t.narrow(0, 2, 3).fill_(2),
    "chunk": lambda t: t.chunk(3)[1].fill_(2),
    "split": lambda t: t.split([2, 4, 1])[1].mul_(2),
    "split of columns": lambda t: t.split(4, dim=1)[1].mul_(2),
    "unbind": lambda t: [row.fill_(n) for n, row in enumerate(t.unbind(0))],
    "iterate": lambda t: [row.add_(n) for n, row in enumerate(t)],
    "transposed": lambda t: t.t().copy_(torch.arange(42.0).view(6, 7)),
    "row of the transposed": lambda t: t.t()[2].zero_(),
    "diagonal": lambda t: t.diagonal().fill_(5),
    "fill diagonal": lambda t: t.fill_diagonal_(5),
    "lower": lambda t: t.tril_(),
    "upper": lambda t: t.triu_(1),
    "index fill": lambda t: t.index_fill_(0, index(1, 6), 4.0),
    "index fill of columns": lambda t: t.index_fill_(1, index(1, 3), 4.0),
    "index copy": lambda t: t.index_copy_(0, index(6, 2), torch.arange(12.0).view(2, 6)),
    "index add": lambda t: t.index_add_(0, index(6, 2), torch.arange(12.0).view(2, 6)),
    "masked fill": lambda t: t.masked_fill_(torch.arange(42).view(7, 6) % 4 == 0, 4.0),
    "masked fill by its own": lambda t: t.masked_fill_(t > 0, 4.0),
    "masked scatter": lambda t: t.masked_scatter_(torch.arange(42).view(7, 6) % 4 == 0, torch.arange(42.0)),
    "scatter": lambda t: t.scatter_(0, torch.tensor([[6, 1, 2, 3, 4, 5]]), 4.0),
    "scatter add": lambda t: t.scatter_add_(1, torch.tensor([[0], [3]]), torch.ones(2, 1)),
    "put": lambda t: t.put_(index(0, 40), torch.tensor([1.0, 2.0])),
    "random row": lambda t: t[3].normal_(),
    "random rows": lambda t: t[4:].uniform_(-1, 1),
    "random": lambda t: t.normal_(),
    "alias, then the row": lambda t: t.detach()[4].detach().zero_(),
    "unsqueezed": lambda t: t.unsqueeze(0)[0, 5].zero_(),
    "orthogonal": nn.init.orthogonal_,
    "eye": nn.init.eye_,
    "sparse": lambda t: nn.init.sparse_(t, 0.3),
    "truncated": nn.init.trunc_normal_,
    "kaiming": nn.init.kaiming_normal_,
    "xavier": nn.init.xavier_uniform_,
    "dirac": lambda t: nn.init.dirac_(t.view(7, 2, 3)),
    "cumulated": lambda t: t[2:].cumsum_(0),
    "renormalised": lambda t: t[2:].renorm_(2, 0, 1.0),
    "sorted into": lambda t: torch.sort(torch.arange(6.0), descending=True, out=(t[2], index(*range(6)))),
    "many": lambda t: torch._foreach_zero_([t[0], t[3]]),
    "resized": lambda t: t[1:3].t_(),
}
#: They raise an error in every layout.
REFUSED = {"cumulated", "renormalised", "sorted into", "many", "resized"}
READS: dict[str, Callable[[Tensor], Tensor]] = {
    "row": lambda t: t[2],
    "rows": lambda t: t[1:6:2],
    "by index": lambda t: t[index(6, 0)],
    "flat": lambda t: t.view(-1)[3:20],
    "diagonal": lambda t: t.diagonal(),
    "transposed": lambda t: t.t()[2],
    "chunk": lambda t: t.chunk(3)[2],
    "sum of a row": lambda t: t[3].sum(),
}


class Weight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(ROWS, COLUMNS))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight.t()).square().sum()


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def outcome(edit: Callable[[Tensor], Any], tensor: Tensor) -> str:
    """Either is 'done' or the error, the same on every rank."""
    torch.manual_seed(1)
    try:
        with torch.no_grad():
            edit(tensor)
    except (NotImplementedError, RuntimeError, ValueError) as error:
        return str(error)
    return "done"


def same(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(full(one.detach()), other.detach(), rtol=1e-5, atol=1e-6)


def check_writes(how: str) -> None:
    """In the parameter, its ``.data`` and its gradient, and what the next forward uses is what was written."""
    plain = Weight()
    model = sw.fully_shard(
        copy.deepcopy(plain),
        strategy="zero1" if how == "columns" else "ddp" if how == "whole" else "zero3",
        shard_placement_fn=(lambda p: Shard(1)) if how == "columns" else None,
    )
    before = {"weight": plain.weight.detach().clone()}
    x = torch.ones(2, COLUMNS)
    wrong = []
    for name, edit in EDITS.items():
        for m in (plain, model):
            m.zero_grad()
            m(x).backward()
        q, p = plain.weight, model.weight
        for what, target, twin in (
            ("data", p.data, q.data),
            ("parameter", p, q),
            ("gradient", p.grad, q.grad),
        ):
            said = outcome(edit, target)
            if name in REFUSED and said != "done":
                continue
            if said != "done" or outcome(edit, twin) != "done":
                wrong.append((name, what, said))
            elif not same(p, q) or not same(p.grad, q.grad):
                wrong.append((name, what, "other values"))
        if not torch.allclose(model(x), plain(x), rtol=1e-4):
            wrong.append((name, "used", "other values"))
        for m in (plain, model):
            m.load_state_dict(before)
    assert not wrong, wrong


@multirank(1, 3, timeout=120)
def test_writes_are_those_of_the_plain_tensor(rank: int, world_size: int) -> None:
    check_writes("rows")


@pytest.mark.extensive("each layout")
@multirank(2, timeout=120)
@pytest.mark.parametrize("how", ["columns", "whole"])
def test_writes_are_those_of_the_plain_tensor_cut_otherwise(rank: int, world_size: int, how: str) -> None:
    check_writes(how)


@multirank(1, 3)
def test_reads_through_views_are_those_of_the_plain_tensor(rank: int, world_size: int) -> None:
    plain = Weight()
    model = sw.fully_shard(copy.deepcopy(plain))
    q, p = plain.weight.data, model.weight.data
    for name, read in READS.items():
        one, other = read(q), read(p)
        torch.testing.assert_close(full(other), one, msg=name)
        for t in (q, p):
            t.mul_(2)
        torch.testing.assert_close(full(other), one if one._is_view() else read(q) / 2, msg=f"{name}, later")
        assert name == "by index" or isinstance(other, ShardedTensor)
    rows = [t[1:5] for t in (q, p)]
    for t in rows:
        t[0].fill_(3)
        t[1:3].add_(1)
        t.mul_(2)
    torch.testing.assert_close(full(rows[1]), rows[0])
    torch.testing.assert_close(full(model.weight.detach()), plain.weight.detach())
    assert rows[1].sum().item() == pytest.approx(rows[0].sum().item(), rel=1e-5)


@pytest.mark.extensive("each layout")
@multirank(2)
def test_ragged_layouts_write_the_same_or_raise(rank: int, world_size: int) -> None:
    for layout in ("ragged", sw.Ragged("element")):
        refused = 0
        for name, edit in EDITS.items():
            plain = Weight()
            model = sw.fully_shard(copy.deepcopy(plain), layout=layout)
            said = outcome(edit, model.weight.data)
            if said != "done":
                assert "unsharded(model)" in said or "from_full" in said, (name, said)
                refused += 1
            else:
                assert outcome(edit, plain.weight.data) == "done"
            assert same(model.weight, plain.weight), name
        assert refused < len(EDITS)


@multirank(4)
def test_writes_beside_tensor_parallelism_and_replicas(rank: int, world_size: int) -> None:
    names = ("row", "rows", "assigned column", "index fill", "flat", "random rows", "lower")
    mesh = world_mesh(2, 2, names=("dp", "tp"))
    for kind in ("tensor parallel", "hsdp"):
        for name in names:
            torch.manual_seed(0)
            plain = nn.Linear(COLUMNS, 8, bias=False)
            model = nn.Sequential(copy.deepcopy(plain))
            if kind == "hsdp":
                sw.fully_shard(model, mesh=world_mesh(2, 2, names=("replicate", "shard")))
            else:
                parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
                sw.fully_shard(model, mesh=mesh["dp"])
            said = outcome(EDITS[name], model[0].weight.data)
            assert said == "done" or (kind != "hsdp" and "unsharded(model)" in said), (kind, name, said)
            if said == "done":
                outcome(EDITS[name], plain.weight.data)
            torch.testing.assert_close(full(model[0].weight.detach()), plain.weight.detach(), msg=name)
