"""Run as a program by test_memory.py: an 8B Llama as one of 1,024 ranks that are not there."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwright as sw
from shardwright.train.config.shapes.presets import PRESETS
from shardwright.train.models.native.llama import Llama
from tests.support.live_bytes import LiveBytes


def constant(weight: torch.Tensor, *args: float, **kwargs: object) -> torch.Tensor:
    """Instead of truncated normal numbers, which would take minutes."""
    return weight.fill_(0.25)


def main() -> None:
    dist.init_process_group("fake", rank=3, world_size=1024, store=FakeStore())
    nn.init.trunc_normal_ = constant
    config = PRESETS["8B"]
    with LiveBytes() as live:
        with sw.deferred_init():
            model = Llama(config)
        assert sum(p.numel() for p in model.parameters()) == config.parameters > 8e9
        assert live.peak < 2**20, live.peak
        for layer in model.layers:
            sw.fully_shard(layer, layout="ragged")
        sw.fully_shard(model, layout="ragged")
        shards = sum(p.to_local().nbytes for p in model.parameters())
        assert shards < 1.02 * config.parameters * 4 / 1024, shards
    with LiveBytes(model) as live:
        sw.materialize(model.layers[5])
        assert live.peak < 1.1 * config.dim * config.ffn_dim * 4, live.peak
    for p in model.layers[5].parameters():
        assert p.ndim == 1 or bool((p.to_local() == 0.25).all())
    print("passed")


if __name__ == "__main__":
    main()
