"""The sections of CONFIG.toml as one value, before anything checks how they go together."""

from __future__ import annotations

from typing import Any

from shardwright.train.config.catalog.losses import AUTO
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
from shardwright.train.config.values import BuildSettings, DataSettings


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
        """Return the value of a key, as SECTION.KEY."""
        section, _, name = key.partition(".")
        return getattr(getattr(self, section), name)

    def default_of(self, key: str) -> Any:
        """Return the default of such a key."""
        section, _, name = key.partition(".")
        fields = type(getattr(self, section)).model_fields
        return fields[name].get_default(call_default_factory=True)

    def changes(self, key: str) -> bool:
        """Return whether the value of such a key is not the default."""
        return bool(self.value_at(key) != self.default_of(key))

    @property
    def for_data(self) -> DataSettings:
        """The settings from which the samples of the run follow."""
        train = self.train
        return DataSettings(self.data, self.validation, train.seq_len, train.global_batch, self.run.seed)

    @property
    def for_building(self) -> BuildSettings:
        """The settings from which a rank builds its model."""
        train = self.train
        return BuildSettings(
            self.model, self.finetune, self.parallel, train.float8, train.loss != AUTO, self.run.seed
        )
