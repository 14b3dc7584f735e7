"""Every dtype of gradients passes every collective: on gloo, on shared memory, and with the dtypes that NCCL has."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from shardwright._torch import ReduceScatterOptions, reduce_scatter_of
from shardwright.comm import Communicator, Division
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
