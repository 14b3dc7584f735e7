"""The configuration of a job: TOML and the command line in, one checked value out, mistakes in one line each.

`sections` has the keys, `conflicts` the values that do not go together, `schema` the whole. `load` reads files; `keys`
and `mistakes` have the words of help and errors. `shapes` has models as numbers, `catalog` all that a key can name:
engines, kinds of models, optimizers, sinks, hooks. `plans` has configurations as plans need them. Nothing here imports
torch, so that `--help` and a mistyped key are answered at once. The names below are imported when they are
used, because `shapes` must not need pydantic: a machine with torch alone builds native models from them.
"""

from typing import TYPE_CHECKING

from shardwright.common.doors import door

if TYPE_CHECKING:
    from shardwright.train.config.load import load_config, stored_config, with_special_tokens
    from shardwright.train.config.schema import Config
    from shardwright.train.config.sections.activations import ActivationConfig
    from shardwright.train.config.sections.checkpoint import CheckpointConfig
    from shardwright.train.config.sections.data import DataConfig
    from shardwright.train.config.sections.fault import FaultConfig
    from shardwright.train.config.sections.finetune import FinetuneConfig
    from shardwright.train.config.sections.log import LogConfig, ProfileConfig
    from shardwright.train.config.sections.model import ModelConfig, RopeScalingConfig
    from shardwright.train.config.sections.optimizer import OptimizerConfig
    from shardwright.train.config.sections.parallel import ParallelConfig
    from shardwright.train.config.sections.run import RunConfig
    from shardwright.train.config.sections.train import TrainConfig
    from shardwright.train.config.sections.validation import ValidationConfig

if not TYPE_CHECKING:
    __all__, __getattr__, __dir__ = door(__spec__)
