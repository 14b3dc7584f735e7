"""Groups that the package makes wait as long as the job's own group."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from shardwright.engine.comm import make_group, make_mesh
from shardwright.engine.compat.collectives import backend_for, set_group_timeout, timeout_of
from tests.support import multirank


@multirank(4)
def test_groups_and_meshes_have_the_timeout_of_the_job(rank: int, world_size: int) -> None:
    device, world = torch.device("cpu"), dist.group.WORLD
    before, own = timeout_of(backend_for(world, device)), timedelta(seconds=77)
    set_group_timeout(world, own)
    try:
        groups = [
            make_group([rank // 2 * 2, rank // 2 * 2 + 1]),
            make_group(range(world_size)),
            *make_mesh("cpu", (2, 2), ("outer", "inner")).get_all_groups(),
        ]
        assert [timeout_of(backend_for(group, device)) for group in groups] == [own] * 4
    finally:
        set_group_timeout(world, before)
