"""The one reduction of a step: each value of a rank arrives under its own name, with and without norm and metrics."""

from __future__ import annotations

import dataclasses
import signal

import pytest
import torch

from shardwright.train.config import ParallelConfig
from shardwright.train.parallel.world import World
from shardwright.train.step.reduction import OwnPart, agree, split
from tests.support import multirank


def test_a_row_has_its_parts_in_their_order() -> None:
    parts = {"two": [0, 0], "none": [], "one": [0]}
    assert split([1.0, 2.0, 3.0], parts) == {"two": [1.0, 2.0], "none": [], "one": [3.0]}


QUIET = OwnPart(
    shares=torch.zeros(2, dtype=torch.float64),
    flag=torch.zeros(1, dtype=torch.float64),
    norm=None,
    data_seconds=0.0,
    signal=None,
    save_ended=False,
    stops_early=False,
    votes=[],
    sums=[],
)
"""A rank that has nothing to say."""
METRICS = ("accuracy", "entropy")


def agreed_by_one(rank: int, world_size: int, metrics: tuple[str, ...], **own: object) -> dict[str, object]:
    """The last rank adds `own`, the others nothing: the fields of all ranks that differ from those without it."""
    world = World.of(ParallelConfig(), rank, world_size, torch.device("cpu"))
    quiet = dataclasses.replace(QUIET, sums=[0.0] * 2 * len(metrics))
    part = dataclasses.replace(quiet, **own) if rank == world_size - 1 else quiet
    agreed, before = (dataclasses.asdict(agree(world, each, metrics)) for each in (part, quiet))
    return {name: value for name, value in agreed.items() if value != before[name]}


@multirank(1, 2)
@pytest.mark.parametrize("metrics", [(), METRICS])
def test_each_value_arrives_under_its_name_alone(
    rank: int, world_size: int, metrics: tuple[str, ...]
) -> None:
    def alone(**own: object) -> dict[str, object]:
        return agreed_by_one(rank, world_size, metrics, **own)

    shares = torch.tensor([2.5, 0.25], dtype=torch.float64)
    assert alone(shares=shares) == {"losses": [2.5, 0.25]}
    assert alone(flag=torch.ones(1, dtype=torch.float64)) == {"flags": 1.0}
    assert alone(data_seconds=3.5) == {"data_seconds": 3.5}
    assert alone(signal=signal.SIGTERM) == {"signal": signal.SIGTERM}
    assert alone(save_ended=True) == {"save_ended": True}
    assert alone(stops_early=True) == {"stops_early": True}
    assert alone(votes=["skip", "rewind"]) == {"action": "rewind"}
    if metrics:
        assert alone(sums=[3.0, 4.0, 0.0, 0.0]) == {"metrics": {"accuracy": 0.75}}
        assert alone(sums=[0.0, 0.0, 5.0, 2.0]) == {"metrics": {"entropy": 2.5}}
        where = f"rank {world_size - 1}" if world_size > 1 else ""
        assert alone(sums=[0.0, 0.0, float("inf"), 2.0]) == {
            "metrics": {"entropy": float("inf")},
            "not_finite": {"entropy": where},
        }


@multirank(1, 2)
@pytest.mark.parametrize("metrics", [(), METRICS])
@pytest.mark.parametrize("norm", [None, 7.0])
def test_values_of_all_ranks_travel_together(
    rank: int, world_size: int, metrics: tuple[str, ...], norm: float | None
) -> None:
    world = World.of(ParallelConfig(), rank, world_size, torch.device("cpu"))
    part = OwnPart(
        shares=torch.tensor([1.5, 0.125], dtype=torch.float64) * (rank + 1),
        flag=torch.zeros(1, dtype=torch.float64),
        norm=None if norm is None else torch.tensor(norm),
        data_seconds=10.0 - rank,
        signal=signal.SIGINT if rank == 0 else signal.SIGUSR1,
        save_ended=rank == 0,
        stops_early=False,
        votes=["skip"],
        sums=[11.0, 1.0, torch.tensor(13.0), 2.0][: 2 * len(metrics)],
    )
    agreed = agree(world, part, metrics)
    total = sum(range(1, world_size + 1))
    assert agreed.losses == [1.5 * total, 0.125 * total]
    assert (agreed.flags, agreed.norm, agreed.data_seconds) == (0.0, norm, 10.0)
    assert (agreed.signal, agreed.action) == (signal.SIGINT, "skip")
    assert agreed.save_ended and not agreed.stops_early
    assert agreed.metrics == ({"accuracy": 11.0, "entropy": 6.5} if metrics else {})
    assert agreed.not_finite == {}
