"""The sections of CONFIG.toml as one value, before anything checks how they go together."""

from __future__ import annotations

from typing import Any

from shardwright.train.config.sections.activations import ActivationConfig
from shardwright.train.config.sections.base import Section
from shardwright.train.config.sections.checkpoint import CheckpointConfig
from shardwright.train.config.sections.data import DataConfig
from shardwright.train.config.sections.fault import FaultConfig
from shardwright.train.config.sections.finetune import FinetuneConfig
from shardwright.train.config.sections.log import LogConfig, ProfileConfig
from shardwright.train.config.sections.model import ModelConfig
from shardwright.train.config.sections.optimizer import OptimizerConfig
from shardwright.train.config.sections.parallel import ParallelConfig
from shardwright.train.config.sections.run import RunConfig
from shardwright.train.config.sections.train import TrainConfig
from shardwright.train.config.sections.validation import ValidationConfig


class Sections(Section):
    """Each section has only values that its keys can have."""

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    activations: ActivationConfig = ActivationConfig()
    finetune: FinetuneConfig = FinetuneConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    parallel: ParallelConfig = ParallelConfig()
    validation: ValidationConfig = ValidationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    fault: FaultConfig = FaultConfig()
    log: LogConfig = LogConfig()
    profile: ProfileConfig = ProfileConfig()

    def value_at(self, key: str) -> Any:
        """The value of a key, as SECTION.KEY."""
        section, _, name = key.partition(".")
        return getattr(getattr(self, section), name)

    def default_of(self, key: str) -> Any:
        """The default of such a key."""
        section, _, name = key.partition(".")
        fields = type(getattr(self, section)).model_fields
        return fields[name].get_default(call_default_factory=True)

    def changes(self, key: str) -> bool:
        """Whether the value of such a key is not the default."""
        return bool(self.value_at(key) != self.default_of(key))

    @property
    def gathers_float8(self) -> bool:
        """Whether weights are gathered in float8, which takes weights of a class that sees to it."""
        return self.train.float8 == "tensorwise" and self.parallel.facts.gathers_float8
