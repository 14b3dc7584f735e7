"""A documented place of names that are in `config.sections.finetune`."""

from shardwright.train.config.sections.finetune import FinetuneConfig

__all__ = ["FinetuneConfig"]
