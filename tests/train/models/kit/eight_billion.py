"""Run as a program by test_building.py: the trainer's 8B Llama as one of 1,024 ranks that are not there."""

from __future__ import annotations

import resource

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardwright.train.config import Config
from shardwright.train.parallel.world import World
from shardwright.train.step.trainer import Trainer
from tests.train.kit.datasets import byte_dataset

RANKS = 1024


def constant(weight: torch.Tensor, *args: float, **kwargs: object) -> torch.Tensor:
    """Instead of truncated normal numbers, which would take minutes. It writes every page of the memory, too."""
    return weight.fill_(0.25)


def peak() -> int:
    """Bytes that this process has held at most, as the operating system counts them."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> None:
    dist.init_process_group("fake", rank=3, world_size=RANKS, store=FakeStore())
    nn.init.trunc_normal_ = constant
    sections = {
        "model": {"preset": "8B"},
        "train": {"seq_len": 64, "global_batch": RANKS, "micro_batch": 1},
        "validation": {"every": 0},
    }
    config = Config.model_validate(sections)
    shape = config.model.shape()
    world = World.of(config.parallel, 3, RANKS, torch.device("cpu"))
    before = peak()
    trainer = Trainer(config, world, byte_dataset(config, bytes(4000), bytes(4000), "zeros"))
    grown = peak() - before

    whole = 4 * shape.parameters
    shards = sum(parameter.to_local().nbytes for parameter in trainer.model.parameters())
    assert whole / RANKS <= shards < 1.01 * whole / RANKS, shards
    tables = 4 * shape.table_numel
    # The shards, the largest matrix while it is drawn, and the tables with what they are computed from. The rest is
    # Python's objects and pieces of random numbers.
    bound = shards + 4 * shape.largest_parameter + 3 * tables + 256 * 2**20
    assert bound < 0.1 * whole, bound
    assert grown < bound, f"grown by {grown:,}, bound {bound:,}"
    assert all(bool((p.to_local() == 0.25).all()) for p in trainer.model.parameters() if p.ndim > 1)
    print(f"{grown:,} of {bound:,} bytes, the whole model {whole:,}")
    print("passed")


if __name__ == "__main__":
    main()
