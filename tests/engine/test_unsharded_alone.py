"""Full parameters that one rank alone asks for: every rank hears who does what."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwright as sw
from shardwright.engine import UNIT
from shardwright.engine.front import whole
from shardwright.engine.model.root import attach
from shardwright.engine.tensors.numbers import reading
from tests.support import multirank

#: Said by a rank whose model was called, and by one whose model was not.
GOES_ON = (
    r"diverged: rank 0 .*full parameters.*; rank 1 \w+ .*unit|"
    r"diverged: ranks \[0\] of \[0, 1\] read .* full parameters \(unsharded\), and ranks \[1\] run a unit|"
    r"diverged: ranks \[0\] gather full parameters \(unsharded, stream_weights\); ranks \[1\] run a unit"
)


def build(called: bool, **options: Any) -> Any:
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    sw.fully_shard(model[0], **options)
    sw.fully_shard(model, **options)
    if called:
        model(torch.ones(2, 5)).sum().backward()
    return model


@multirank(2)
def test_one_rank_shows_full_parameters_and_another_goes_on(rank: int, world_size: int) -> None:
    for called in (False, True):
        for options in ({}, {"layout": "ragged"}, {"strategy": "zero1"}):
            model = build(called, **options)
            with pytest.raises(RuntimeError, match=GOES_ON):
                if rank == 0:
                    with sw.unsharded(model):
                        pass
                else:
                    model(torch.ones(2, 5))
            if not called and rank == 0:
                attach(model)  # as the other has, so that both count the models of the group alike
            if called:
                with sw.unsharded(model):  # what was shown to the others is over
                    assert model[0].weight.shape == (4, 5)
        with pytest.raises(RuntimeError, match=r"not all the same|rank 1 reads a number"):
            if rank == 0:
                with sw.unsharded(model):
                    pass
            else:
                model[0].weight.norm().item()


@multirank(2)
def test_one_rank_shows_full_parameters_and_another_waits_elsewhere(rank: int, world_size: int) -> None:
    for called in (False, True):
        model = build(called)
        store = dist.PrefixStore(f"alone {called}", dist.distributed_c10d._get_default_store())
        if rank == 0:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(reading, "LIMIT_OF_FULL", timedelta(milliseconds=200))
                with pytest.raises(RuntimeError, match=r"full parameters .*Enter unsharded on every"):
                    sw.unsharded(model).__enter__()
            store.set("failed", "yes")
            store.wait(["taken"])
        else:
            store.wait(["failed"])
            # The other's message is under way still: take it, so that the next case finds the group as it was.
            whole.agree_to_gather([getattr(model, UNIT), getattr(model[0], UNIT)])
            store.set("taken", "yes")
