"""Materialising needs the shards and the tensors whose operations run, never the model."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

import shardwright as sw
from tests.support import multirank
from tests.support.live_bytes import LiveBytes

SIZE = 64


class Deep(nn.Module):
    """Matrices of one size, each initialised twice and changed afterwards."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(SIZE, SIZE, bias=False) for _ in range(layers))
        for layer in self.layers:
            nn.init.orthogonal_(layer.weight)
        for layer in self.layers:
            nn.init.normal_(layer.weight)
        with torch.no_grad():
            for layer in self.layers:
                layer.weight.mul_(0.5)


@multirank(2)
@pytest.mark.parametrize("layout", ["per_parameter", "ragged"])
def test_memory_does_not_grow_with_the_model(rank: int, world_size: int, layout: str) -> None:
    peaks = []
    for layers in (4, 24):
        with sw.deferred_init():
            model = Deep(layers).to(torch.float64)
        for layer in model.layers:
            sw.fully_shard(layer, layout=layout)
        sw.fully_shard(model, layout=layout)
        with LiveBytes(model) as live:
            sw.materialize(model)
        peaks.append(live.peak)
    matrix = SIZE * SIZE * 4
    assert peaks[0] == peaks[1] <= 3.1 * matrix  # one in float32 and its copy in float64


@multirank(2)
def test_stand_ins_of_a_meta_model_need_no_more(rank: int, world_size: int) -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(SIZE, SIZE) for _ in range(24)))
    for layer in model:
        sw.fully_shard(layer)
    sw.fully_shard(model)
    with LiveBytes(model) as live:
        sw.materialize(model)
    assert live.peak <= 1.1 * SIZE * SIZE * 4 + torch.get_rng_state().nbytes


@pytest.mark.extensive("a model of 8 billion parameters")
def test_8b_parameters_as_one_of_1024_ranks() -> None:
    # In a process of its own, since its process group is not that of the pool.
    command = [sys.executable, "-m", "tests.init.eight_billion"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0 and ended.stdout.split()[-1:] == ["passed"], ended.stdout + ended.stderr
