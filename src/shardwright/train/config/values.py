"""The values that rooms get of a checked configuration: the sections and settings that each needs, and no others.

`Config` makes them. Nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.train.config.sections.data import DataConfig
from shardwright.train.config.sections.finetune import FinetuneConfig
from shardwright.train.config.sections.model import ModelConfig
from shardwright.train.config.sections.parallel import ParallelConfig
from shardwright.train.config.sections.validation import ValidationConfig


@dataclass(frozen=True)
class DataSettings:
    """The settings from which the samples of a run follow, for `train/data`.

    Attributes:
        data: `[data]`.
        validation: `[validation]`.
        seq_len: tokens in a sample.
        global_batch: samples of a step, of all ranks.
        seed: of the order of samples.
    """

    data: DataConfig
    validation: ValidationConfig
    seq_len: int
    global_batch: int
    seed: int


@dataclass(frozen=True)
class BuildSettings:
    """The settings from which a rank builds its model, for `train/parallel` and `train/finetune`.

    Attributes:
        model: `[model]`.
        finetune: `[finetune]`.
        parallel: `[parallel]`.
        float8: the recipe of `train.float8`.
        has_own_loss: the run has a loss of its own, which takes the place of the model's.
        seed: of values that are drawn.
    """

    model: ModelConfig
    finetune: FinetuneConfig
    parallel: ParallelConfig
    float8: str
    has_own_loss: bool
    seed: int

    @property
    def gathers_float8(self) -> bool:
        """Whether weights are gathered in float8, which takes weights of a class that sees to it."""
        return self.float8 == "tensorwise" and self.parallel.facts.gathers_float8

    @property
    def builds_deferred(self) -> bool:
        """Whether ranks never hold the whole model. torch's engines, and weights of torchao's class, need values."""
        return self.parallel.facts.builds_in_shards and not self.gathers_float8

    @property
    def source(self) -> str:
        """The setting that the base of adapters comes from, with its value."""
        if getattr(self.model.shape(), "weights", None) == "pretrained":
            return f"model.path = {self.model.path}"
        return f"run.seed = {self.seed}"
