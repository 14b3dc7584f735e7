"""Meshes whose ranks are in any order: training, states and checkpoints are those of the plain model."""

from __future__ import annotations

import functools
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import shardwright as sw
from tests.engine.kit.meetings import fresh_meetings
from tests.engine.kit.models import Model, build, full, loss_of, shard, tokens
from tests.engine.kit.places import strategy_of
from tests.support import multirank

Ranks = tuple[int, ...]
#: Two steps of AdamW on sums of gradients that are added in another order.
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def grids_of(ranks: int) -> list[Any]:
    """Every order of the ranks in one dimension, and of 4 ranks also in two."""
    orders = list(itertools.permutations(range(ranks)))
    lines = [list(order) for order in orders]
    return lines + ([[list(o[:2]), list(o[2:])] for o in orders] if ranks == 4 else [])


@functools.cache
def _mesh(grid: str) -> DeviceMesh:
    """A mesh by its text, once per process, because its process groups stay until the pool ends."""
    return DeviceMesh("cpu", json.loads(grid), mesh_dim_names=("replicate", "shard")[-(1 + ("]," in grid)) :])


def mesh_of(grid: Any) -> DeviceMesh:
    return _mesh(str(grid))


def stages_of(mesh: DeviceMesh) -> list[Ranks]:
    return [(1,), (2,), (3,)] if mesh.ndim == 1 else [(0, 3), (3, 3), (1, 3), (2, 1), (0, 1)]


def train(model: nn.Module, world_size: int, ranks: range, steps: int = 2) -> Any:
    """Train on the batches of ``ranks`` as the mean of all ranks, return the optimizer."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.03, eps=1e-3)
    for step in range(steps):
        optimizer.zero_grad()
        losses = [loss_of(model(batch), batch) for batch in (tokens(step, 0, r) for r in ranks)]
        (sum(losses) / len(losses)).backward()  # type: ignore[union-attr]
        optimizer.step()
    return optimizer


def compare(model: nn.Module, plain: nn.Module) -> None:
    for (name, p), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full(p.detach()), expected, **CLOSE, msg=lambda m, n=name: f"{n}: {m}")


def trains(grid: Any, rank: int, world_size: int, **options: Any) -> None:
    plain = build()
    model = shard(build(), mesh=mesh_of(grid), **options)
    train(plain, world_size, range(world_size))
    train(model, world_size, range(rank, rank + 1))
    compare(model, plain)


@multirank(2, 3)
@pytest.mark.parametrize("layout", ["per_parameter", "element"])
@pytest.mark.parametrize("transport", ["pages", "gloo"])
def test_each_order_of_one_dimension_trains_as_the_plain_model(
    rank: int, world_size: int, layout: str, transport: str
) -> None:
    with fresh_meetings(transport):
        for grid in grids_of(world_size)[1:]:
            for stages in stages_of(mesh_of(grid)):
                trains(grid, rank, world_size, layout=layout, strategy=strategy_of(stages))


@multirank(4, timeout=120)
@pytest.mark.parametrize(
    "grids",
    [
        pytest.param([[[1, 0], [3, 2]], [[0, 3], [2, 1]]], id="some"),
        pytest.param(
            grids_of(4)[1:],
            id="all",
            marks=pytest.mark.extensive("each order of four ranks takes half a minute"),
        ),
    ],
)
def test_each_order_of_four_ranks_trains_as_the_plain_model(
    rank: int, world_size: int, grids: list[Any]
) -> None:
    layouts = itertools.cycle(("per_parameter", "element", "element"))
    for number, grid in enumerate(grids):
        stages = stages_of(mesh_of(grid))
        for each in (stages[number % len(stages)], stages[(number + 1) % len(stages)]):
            trains(grid, rank, world_size, layout=next(layouts), strategy=strategy_of(each))


@multirank(3)
@pytest.mark.parametrize("layout", ["per_parameter", "element"])
def test_checkpoints_are_those_of_an_ascending_mesh(
    rank: int, world_size: int, tmp_path: Path, layout: str
) -> None:
    plain, model = build(), shard(build(), mesh=mesh_of([2, 0, 1]), layout=layout)
    expected, optimizer = (
        train(plain, world_size, range(world_size)),
        train(model, world_size, range(rank, rank + 1)),
    )
    sw.save_checkpoint(tmp_path / "c", model, optimizer)
    for other in (
        shard(build(1), mesh=mesh_of([0, 1, 2]), layout=layout),
        shard(build(1), mesh=mesh_of([1, 2, 0])),
    ):
        its = torch.optim.AdamW(other.parameters(), lr=0.03, eps=1e-3)
        sw.load_checkpoint(tmp_path / "c", other, its)
        compare(other, plain)
        for p, q in zip(other.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(full(its.state[p]["exp_avg"]), expected.state[q]["exp_avg"], **CLOSE)
    sw.save_pretrained(model, tmp_path / "p")
    again = shard(build(1), mesh=mesh_of([1, 2, 0]), layout=layout)
    sw.load_pretrained(again, tmp_path / "p")
    compare(again, plain)


@multirank(2)
def test_states_parts_and_deferred_values_follow_the_mesh_of_the_parameter(
    rank: int, world_size: int
) -> None:
    plain = build()
    with sw.deferred_init():
        model: Model = build()
    shard(model, mesh=mesh_of([1, 0]))
    sw.materialize(model)
    compare(model, plain)
    assert all(p.device_mesh.mesh.tolist() == [0, 1] for p in model.parameters())
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.redistribute(placements=[Replicate()]).to_local(), q)
        assert torch.equal(
            distribute_tensor(q.detach(), p.device_mesh, p.placements).to_local(), p.to_local()
        )
    model.load_state_dict({k: v * 2 for k, v in plain.state_dict().items()})
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(full(p), 2 * q)
    with sw.unsharded(model, rank0_only=True, writeback=False):
        assert isinstance(model.head.weight, DTensor) == (rank > 0)


@multirank(2)
def test_values_of_the_lowest_rank_are_sent(rank: int, world_size: int) -> None:
    model = shard(build(rank), mesh=mesh_of([1, 0]), sync_module_states=True)
    compare(model, build(0))


@multirank(2)
def test_a_parameter_on_another_mesh_may_name_it_in_another_order(rank: int, world_size: int) -> None:
    plain, model = build(), build()
    for grids in ([0, 1], [1, 0]), ([1, 0], [0, 1]), ([1, 0], [1, 0]):
        call, own = map(mesh_of, grids)
        model = build()
        sw.fully_shard(
            model,
            mesh=call,
            shard_placement_fn=lambda p, m=model, own=own: (  # type: ignore[misc]
                sw.ShardPlacementResult(Shard(0), own) if p is m.head.weight else None
            ),
        )
        assert all(isinstance(p, DTensor) for p in model.parameters())
        train(model, world_size, range(rank, rank + 1))
        plain = build()
        train(plain, world_size, range(world_size))
        compare(model, plain)


@pytest.mark.central("two dimensions need four ranks", ranks=4)
@multirank(4)
def test_tensor_parallelism_over_ranks_that_do_not_ascend_is_refused_on_all(
    rank: int, world_size: int
) -> None:
    for grid in [[1, 0], [3, 2]], [[2, 3], [0, 1]], [[0, 3], [2, 1]]:
        mesh = DeviceMesh("cpu", grid, mesh_dim_names=("dp", "tp"))
        model = nn.Linear(8, 8)
        parallelize_module(model, mesh["tp"], ColwiseParallel())
        with pytest.raises(NotImplementedError, match=r"do not ascend along '[dt]p'.*init_device_mesh"):
            sw.fully_shard(model, mesh=mesh["dp"])
        with pytest.raises(ValueError, match="do not ascend along"):
            sw.fully_shard(nn.Linear(8, 8), mesh=mesh, dp_mesh_dims=sw.DataParallelMeshDims(shard="dp"))


@multirank(2)
def test_a_tensor_of_the_user_on_such_a_mesh_is_not_saved(rank: int, world_size: int, tmp_path: Path) -> None:
    cut = distribute_tensor(torch.arange(4.0), mesh_of([1, 0]), [Shard(0)])
    with pytest.raises(Exception, match=r"extra\.cut.*do not ascend"):
        sw.save_checkpoint(tmp_path / "c", shard(build()), extra={"cut": cut})
    dist.barrier()
