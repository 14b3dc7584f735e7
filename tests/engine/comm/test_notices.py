"""A rank that ends leaves a notice, by which the others know why it does not come."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

import shardwright

SCRIPT = """
import atexit, torch
import torch.distributed as dist
from torch import nn
from shardwright import fully_shard

dist.init_process_group("gloo")
atexit.register(dist.destroy_process_group)  # as docs/engine.md says, and after the import
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
fully_shard(model[1])
fully_shard(model)
step = 0

def check(*_):
    if step == 2 and dist.get_rank() == 1:
        raise ValueError("bad batch")

model[0].register_forward_hook(check)
for step in range(4):
    try:
        model(torch.ones(2, 4)).sum().backward()
    except ValueError:
        pass
    model.zero_grad()
"""


@pytest.mark.extensive("programs of their own")
def test_the_exception_by_which_a_rank_has_left_or_ended_reaches_the_others() -> None:
    # The store outlives the ranks, as the store of torchrun does.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {
        **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(shardwright.__file__).parents[1]),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": "2",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT],
            env={**variables, "RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=120)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [1, 1]
    left = "has left the forward of unit 0 ('Sequential') by ValueError: bad batch"
    assert f"rank 1 {left}" in errors[0]
    assert "rank 0 has ended by RuntimeError: The ranks have diverged: " in errors[1]
    assert f"This rank {left} before" in errors[1]
