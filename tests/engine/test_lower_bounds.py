"""Bytes that each rank sends in a step, of every strategy: equal to the lower bound, plus small terms with reasons.

One process counts all collectives of rank 0 of eight, where torch dispatches them; the other ranks do not exist. How
many collectives there are is tested in test_strategy_costs.py.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardwright as sw
from tests.engine.kit.places import NAMED
from tests.engine.kit.wire import Wire
from tests.support.fake import fake_ranks

BF16, FP32 = torch.bfloat16, torch.float32
#: Matrices of a unit, and elements of one. They divide evenly by all ranks in each dtype, so nothing is padded.
MATRICES, DIM = 2, 64
ALIGNMENT = 16  #: bytes: what a rank sends beside its data begins on as many, and is filled up to as many


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(DIM, DIM, bias=False) for _ in range(MATRICES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


class Net(Block):
    """Two units of a block, and the root with a block's matrices of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return super().forward(x)


class Bound(NamedTuple):
    """The least that a rank must send, from the strategy alone.

    A rank that has one of n parts of B bytes gets the others by receiving B (n - 1) / n. Together the ranks send what
    they receive, so on average each sends as much. The same bytes leave a rank whose B bytes are summed into n parts
    of n ranks. If r ranks need the same part of a sum, they get it by a gather after that: over p parts the sum takes
    B (p r - 1) / (p r) + B / p (r - 1) / r bytes, which is 2 B (r - 1) / r for a sum that all ranks need (Patarasuk and
    Yuan 2009, Bandwidth optimal all-reduce algorithms for clusters of workstations).

    The strategy says what memory is for. Parameters that are sharded on an axis leave a rank after each use, so they
    are gathered there for each forward and each backward; otherwise once per step. Gradients that are sharded on an
    axis are summed there in each backward; otherwise once per step.
    """

    stages: tuple[int, ...]
    shape: tuple[int, ...]

    def ranks(self, *stages: int) -> int:
        """The number of ranks of the axes with these stages."""
        return math.prod(size for size, stage in zip(self.shape, self.stages, strict=True) if stage in stages)

    def gathers(self, nbytes: int, uses: int) -> float:
        """Bytes of gathers of ``nbytes``, which are used ``uses`` times in a step."""
        each_use, once = self.ranks(3), self.ranks(1, 2)
        return uses * _part(nbytes, each_use) + _part(nbytes / each_use, once)

    def sums(self, nbytes: int, micros: int) -> float:
        """Bytes of sums of ``nbytes`` in each of ``micros`` backwards."""
        each_backward, late, replicas = self.ranks(2, 3), self.ranks(1), self.ranks(0)
        rest = nbytes / each_backward
        last = _part(rest, late * replicas) + _part(rest / late, replicas)
        return micros * _part(nbytes, each_backward) + last


def _part(nbytes: float, ranks: int) -> float:
    return nbytes * (ranks - 1) / ranks


EVERY = [
    Bound(stages, shape)
    for shape in ((8,), (2, 4))
    for stages in itertools.product(range(4), repeat=len(shape))
]
IDS = [NAMED.get(bound.stages) or "-".join(map(str, bound.stages)) for bound in EVERY]


@pytest.fixture
def eight_ranks() -> Iterator[None]:
    with fake_ranks(8):
        yield


def sent(
    bound: Bound, layout: str | sw.Ragged, dtypes: tuple[torch.dtype, torch.dtype], micros: int
) -> tuple[float, float]:
    """Bytes that rank 0 sends in the third step: of forward and backward, and of clipping and the optimizer."""
    torch.manual_seed(0)
    model = Net()
    options = {
        "mesh": init_device_mesh("cpu", bound.shape),
        "strategy": sw.Strategy.of_stages(*bound.stages),
        "layout": layout,
        "mp_policy": sw.MixedPrecisionPolicy(*dtypes),
    }
    for block in model.blocks:
        sw.fully_shard(block, **options)
    sw.fully_shard(model, **options)
    optimizer = sw.fully_shard_optimizer(torch.optim.AdamW(model.parameters()))
    for _ in range(3):
        with Wire() as training:
            for micro in range(micros):
                model.set_is_last_backward(micro == micros - 1)
                model(torch.randn(2, DIM, dtype=dtypes[0])).float().sum().backward()
        with Wire() as step:
            sw.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        optimizer.zero_grad()
    return sum(c.sent for c in training.collectives), sum(c.sent for c in step.collectives)


@pytest.mark.extensive("each strategy", but=("zero3_0", "zero2_0", "hsdp", "ddp0", "2-1"))
@pytest.mark.usefixtures("eight_ranks")
@pytest.mark.parametrize("bound", EVERY, ids=IDS)
def test_bytes_sent_are_the_least(bound: Bound) -> None:
    """Beside data each rank sends 16 bytes with a gather that fills a unit's memory: the unit's number, which shows a
    wrong prefetch. With each part of a sum it sends flags of 16 bytes: the parameters that the rank has used.

    Clipping sums one number for each parameter, as torch does, and not their sum, so that results have torch's bits.
    The optimizer sends nothing.
    """
    parts = bound.ranks(1, 2, 3)
    # The ranks of the gather that fills the memory, and the stage there.
    last_stage, _, last = max(zip(bound.stages, itertools.count(), bound.shape, strict=False))
    for layout, (compute, reduce), micros in itertools.product(
        ("per_parameter", sw.Ragged("row"), sw.Ragged("element")),
        ((BF16, FP32), (BF16, BF16)),
        (1, 3),
    ):
        numel = MATRICES * DIM * DIM
        least = small = 0.0
        for uses in (
            2 * micros,
            2 * micros,
            micros,
        ):  # the root keeps its parameters from forward to backward
            least += bound.gathers(numel * compute.itemsize, uses)
            least += bound.sums(numel * reduce.itemsize, micros)
            if last_stage:
                small += (uses if last_stage == 3 else 1) * _part(ALIGNMENT * last, last)
            small += bound.sums(ALIGNMENT * parts, micros)
        found, clipping = sent(bound, layout, (compute, reduce), micros)
        where = layout, compute, reduce, micros
        assert found == least + small, (where, found - least, small)
        assert clipping == 2 * _part(4 * 3 * MATRICES, parts), where
        assert small + clipping < 0.03 * least
