"""The configuration of a job: TOML and the command line in, one checked value out, mistakes in one line each.

`sections` has the keys, `conflicts` the values that do not go together, `schema` the whole. `load` reads files; `keys`
and `mistakes` have the words of help and errors. `shapes` has models as numbers, `catalog` all that a key can name:
engines, kinds of models, optimizers, sinks, hooks. `plans` has configurations as plans need them. Nothing here imports
torch, so that `--help` and a mistyped key are answered at once. The names below are imported when they are
used, because `shapes` must not need pydantic: a machine with torch alone builds native models from them.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwright.train.config.load import load_config as load_config
    from shardwright.train.config.load import stored_config as stored_config
    from shardwright.train.config.load import with_special_tokens as with_special_tokens
    from shardwright.train.config.schema import Config as Config
    from shardwright.train.config.sections.activations import ActivationConfig as ActivationConfig
    from shardwright.train.config.sections.checkpoint import CheckpointConfig as CheckpointConfig
    from shardwright.train.config.sections.data import DataConfig as DataConfig
    from shardwright.train.config.sections.fault import FaultConfig as FaultConfig
    from shardwright.train.config.sections.finetune import FinetuneConfig as FinetuneConfig
    from shardwright.train.config.sections.log import LogConfig as LogConfig
    from shardwright.train.config.sections.model import ModelConfig as ModelConfig
    from shardwright.train.config.sections.model import RopeScalingConfig as RopeScalingConfig
    from shardwright.train.config.sections.optimizer import OptimizerConfig as OptimizerConfig
    from shardwright.train.config.sections.parallel import ParallelConfig as ParallelConfig
    from shardwright.train.config.sections.run import RunConfig as RunConfig
    from shardwright.train.config.sections.train import TrainConfig as TrainConfig
    from shardwright.train.config.sections.validation import ValidationConfig as ValidationConfig

#: The module of this folder that has each name.
_MODULES = {
    "Config": "schema",
    "load_config": "load",
    "stored_config": "load",
    "with_special_tokens": "load",
    "ActivationConfig": "sections.activations",
    "CheckpointConfig": "sections.checkpoint",
    "DataConfig": "sections.data",
    "FaultConfig": "sections.fault",
    "FinetuneConfig": "sections.finetune",
    "LogConfig": "sections.log",
    "ModelConfig": "sections.model",
    "RopeScalingConfig": "sections.model",
    "OptimizerConfig": "sections.optimizer",
    "ParallelConfig": "sections.parallel",
    "RunConfig": "sections.run",
    "TrainConfig": "sections.train",
    "ValidationConfig": "sections.validation",
}


def __getattr__(name: str) -> Any:
    """A name of the list above, from its module."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
