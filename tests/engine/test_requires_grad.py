"""``requires_grad`` that changes between forward and backward, as peft's ``disable_adapter`` changes it, beside plain
modules."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwright as sw
from tests.engine.kit.models import full
from tests.engine.kit.places import On, on, on_meshes
from tests.engine.kit.training import units_of
from tests.support import multirank
from tests.support.matrix import select, together

WIDTH = 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base, self.adapter = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(x) + self.adapter(x))


class Model(nn.Module):
    """Blocks, each of which is recomputed or not. ``pairs``: a checkpoint has two blocks."""

    def __init__(self, recomputes: str) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(4)), nn.Linear(WIDTH, WIDTH)
        self.recomputes = recomputes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        run: Any = lambda call, x: call(x)  # noqa: E731
        if self.recomputes != "no":
            run = functools.partial(checkpoint, use_reentrant=self.recomputes == "reentrant")
        size = 2 if self.recomputes == "pairs" else 1
        for first in range(0, 4, size):
            x = run(nn.Sequential(*self.blocks[first : first + size]), x)
        return self.head(x)


def adapters(model: Any) -> list[nn.Parameter]:
    return [block.adapter.weight for block in model.blocks]


@contextmanager
def disabled(model: Any) -> Iterator[None]:
    for p in adapters(model):
        p.requires_grad_(False)
    yield
    for p in adapters(model):
        p.requires_grad_(True)


def freeze(model: Any, *numbers: int) -> None:
    for number in numbers:
        adapters(model)[number].requires_grad_(False)


def evaluate(model: Any) -> None:
    with torch.no_grad():
        model(torch.ones(2, WIDTH))


def reference_between(model: Any) -> None:
    with disabled(model):
        evaluate(model)


def toggle(model: Any) -> None:
    with disabled(model):
        pass


def frozen_from_now(model: Any) -> None:
    freeze(model, 0, 2)


def frozen_and_evaluated(model: Any) -> None:
    freeze(model, 0, 2)
    evaluate(model)


def back(model: Any) -> None:
    for block in model.blocks:
        block.base.requires_grad_(False)
        block.adapter.requires_grad_(True)


#: Changes of a model between a forward and its backward.
BETWEEN: dict[str, Callable[[Any], None]] = {
    "evaluated": evaluate,
    "reference": reference_between,
    "toggled": toggle,
    "frozen": frozen_from_now,
    "frozen and evaluated": frozen_and_evaluated,
}
CASES = select(
    (
        row
        for row in itertools.product(
            [
                *on("zero3", (1,), (2,), (3,)),
                *on("zero2", (2,)),
                *on("zero1", (2,)),
                *on("ddp", (2,)),
                *on("hsdp", (2, 2)),
            ],
            ["per_parameter", "ragged"],
            ["no", "reentrant", "nonreentrant", "pairs"],
            BETWEEN,
            [1, 2],
        )
        # Plain torch, too, raises CheckpointError when a recomputation saves other tensors than the first forward.
        if row[2] in ("no", "reentrant") or "frozen" not in row[3]
    ),
    lambda row, strength: together(strength, *row),
)


def batch(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(3, WIDTH, generator=generator).requires_grad_()  # for reentrant checkpointing


@on_meshes(CASES)
def test_gradients_are_those_of_a_plain_model(
    rank: int,
    world_size: int,
    at: On,
    layout: str,
    recomputes: str,
    between: str,
    micros: int,
) -> None:
    torch.manual_seed(0)
    plain = Model(recomputes)
    model: Any = copy.deepcopy(plain)
    for block in model.blocks:
        sw.fully_shard(block, strategy=at.strategy, mesh=at.mesh, layout=layout)
    sw.fully_shard(model, strategy=at.strategy, mesh=at.mesh, layout=layout)
    for step in range(3):
        outputs = [model(batch(rank, 10 * step + micro)) for micro in range(micros)]
        BETWEEN[between](model)
        for output in outputs:
            output.square().sum().backward()
        expected = [
            [plain(batch(r, 10 * step + micro)) for micro in range(micros)] for r in range(world_size)
        ]
        BETWEEN[between](plain)
        for output in itertools.chain(*expected):
            (output.square().sum() / world_size).backward()
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), (step, name)
            if q.grad is not None:
                torch.testing.assert_close(full(p.grad), q.grad, rtol=1e-5, atol=1e-6, msg=f"{step} {name}")
        for each in (model, plain):
            back(each)
            if step == 1:  # the next step adds to gradients that are there
                each.zero_grad()


class Beside(nn.Module):
    """Blocks with a result each."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [block(x) for block in self.blocks]


@pytest.mark.extensive(
    "each change", but=("*True-reference-per*", "*True-frozen-ragged*", "*False-toggled-per*")
)
@multirank(2)
@pytest.mark.parametrize("layout", ["per_parameter", "ragged"])
@pytest.mark.parametrize("between", ["reference", "toggled", "frozen"])
@pytest.mark.parametrize("held", [False, True])
def test_a_unit_that_one_rank_leaves_out_follows_too(
    rank: int, world_size: int, layout: str, between: str, held: bool
) -> None:
    torch.manual_seed(0)
    plain = Beside()
    model: Any = copy.deepcopy(plain)
    for block in model.blocks:
        sw.fully_shard(block, layout=layout)
    sw.fully_shard(model, layout=layout)
    model.set_reduce_scatter_unused_params(True)
    for step in range(4):
        holds = held and step % 2 == 0
        model.set_requires_gradient_sync(not holds)
        for each, ranks in ((model, [rank]), (plain, range(2))):
            # Rank 1 leaves out the first block.
            results = [torch.stack(each(batch(r, step))[r:]).square().sum() for r in ranks]
            BETWEEN[between](each)
            for result in results:
                (result / len(ranks)).backward()
            back(each)
        if holds:
            continue
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            if q.grad is not None:
                torch.testing.assert_close(full(p.grad), q.grad, rtol=1e-5, atol=1e-6, msg=f"{step} {name}")
        model.zero_grad()
        plain.zero_grad()


@multirank(2)
def test_a_change_back_takes_the_same_reductions(rank: int, world_size: int) -> None:
    model: Any = Model("no")
    for block in model.blocks:
        sw.fully_shard(block)
    sw.fully_shard(model)
    for micro in range(8):
        model.set_requires_gradient_sync(micro == 7)
        output = model(batch(rank, micro))
        reference_between(model)
        output.square().sum().backward()
        assert {len(unit.gradients.reductions) for unit in units_of(model)} == {1}
