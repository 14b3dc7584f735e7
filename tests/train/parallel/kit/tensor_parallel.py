"""Trainers over a tensor-parallel axis."""

from __future__ import annotations

import torch

from shardwright.train.config import Config
from shardwright.train.parallel.world import World
from shardwright.train.step.trainer import Trainer
from tests.train.kit.parallel import dataset_of
from tests.train.kit.text import Text


def trainer(config: Config, rank: int, world_size: int, text: Text | None = None) -> Trainer:
    world = World.of(config.parallel, rank, world_size, torch.device("cpu"))
    return Trainer(config, world, dataset_of(config, text))
