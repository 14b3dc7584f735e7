"""Every dtype of gradients passes every collective: on gloo, on shared memory, and with the dtypes that NCCL has."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from shardwright.engine.comm import Communicator, Division, collectives
from shardwright.engine.compat.collectives import ReduceScatterOptions, reduce_scatter_of
from tests.support import multirank
from tests.support.sim import load, on_sim

#: Gradients have these dtypes. Gathers carry bytes.
REDUCED = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
)  # fmt: skip
DIVISIONS = (Division(average=True), Division(after=3.0), Division(before=2.0))


def check(device: torch.device, rank: int, world_size: int) -> None:
    comm = Communicator(dist.group.WORLD, device)
    for dtype in REDUCED:
        for division in DIVISIONS:
            by = (world_size if division.average else 1) * division.before * division.after
            whole = torch.arange(2 * world_size, dtype=torch.float64)
            total = (whole * sum(range(1, world_size + 1)) / by).to(dtype)
            mine = (whole * (rank + 1)).to(dtype)
            outputs = [torch.empty(2, dtype=dtype, device=device) for _ in range(2)]
            for count in (1, 2):
                given = [mine.clone().to(device) for _ in range(count)]  # divided in place
                comm.reduce_scatter(outputs[:count], given, division).wait()
                for each in outputs[:count]:
                    torch.testing.assert_close(
                        each.cpu(), total[2 * rank : 2 * rank + 2], rtol=1e-2, atol=1e-2
                    )
            summed = mine.clone().to(device)
            comm.all_reduce(summed, division).wait()
            torch.testing.assert_close(summed.cpu(), total, rtol=1e-2, atol=1e-2)


@multirank(2)
def test_every_dtype_of_gradients_is_reduced(rank: int, world_size: int) -> None:
    check(torch.device("cpu"), rank, world_size)


@multirank(2, 3)
def test_large_and_small_tensors_over_gloo(rank: int, world_size: int) -> None:
    """All tensors apart, some of them, or none: the same results, in every dtype."""
    comm = Communicator(dist.group.WORLD, torch.device("cpu"))
    sizes = (3, 40, 5, 24)
    for limit in (1, 80, 1 << 30):
        with mock.patch.object(collectives, "_LARGE", limit):
            for dtype in REDUCED:
                for division in DIVISIONS:
                    by = (world_size if division.average else 1) * division.before * division.after
                    wholes = [torch.arange(n * world_size, dtype=torch.float64) % 7 for n in sizes]
                    given = [(whole * (rank + 1) / division.before).to(dtype) for whole in wholes]
                    outputs = [torch.full((n,), -1, dtype=dtype) for n in sizes]
                    run(comm._scatter_on_gloo(outputs, given, division))
                    for n, whole, output in zip(sizes, wholes, outputs, strict=True):
                        total = whole * sum(range(1, world_size + 1)) / by
                        expected = total.to(dtype)[n * rank : n * (rank + 1)]
                        torch.testing.assert_close(output, expected, rtol=1e-2, atol=1e-2)
            sent = [torch.full((n,), 10 * rank + i, dtype=torch.uint8) for i, n in enumerate(sizes)]
            gathered = [torch.empty(n * world_size, dtype=torch.uint8) for n in sizes]
            run(comm._gather_on_gloo(gathered, sent))
            for i, each in enumerate(gathered):
                assert [row.unique().tolist() for row in each.view(world_size, -1)] == [
                    [10 * r + i] for r in range(world_size)
                ]


def run(way: Any) -> None:
    for work in [collective() for collective in way.collectives]:
        work.wait()
    way.finish()


@on_sim(2)
def test_every_dtype_of_gradients_is_reduced_with_those_that_nccl_has(rank: int, world_size: int) -> None:
    sim = load()
    sim.join_groups()
    with sim.running(1):
        check(sim.device, rank, world_size)
        for dtype, name in ((torch.complex64, "ComplexFloat"), (torch.int16, "Short")):
            given = torch.zeros(2 * world_size).to(dtype).to(sim.device)
            with pytest.raises(RuntimeError, match=f"NCCL has no {name}"):
                reduce_scatter_of(dist.group.WORLD)(given[:2].clone(), given, ReduceScatterOptions())
