"""The engines: a class for each name of `[parallel] engine`, with the calls of a job in which engines differ.

`engine_of` chooses one. `config/catalog/engines.py` has the facts that are known without importing an engine.
"""

from __future__ import annotations

from shardwright.train.config import ParallelConfig
from shardwright.train.config.catalog.engines import EngineName
from shardwright.train.parallel.engines.base import Engine
from shardwright.train.parallel.engines.shardwright import ShardwrightEngine
from shardwright.train.parallel.engines.torch_engines import DDPEngine, FSDP1Engine, FSDP2Engine, PlainEngine

CLASSES: dict[EngineName, type[Engine]] = {
    "shardwright": ShardwrightEngine,
    "fsdp2": FSDP2Engine,
    "fsdp1": FSDP1Engine,
    "ddp": DDPEngine,
    "none": PlainEngine,
}


def engine_of(config: ParallelConfig) -> Engine:
    return CLASSES[config.engine](config)


__all__ = ["CLASSES", "Engine", "engine_of"]
