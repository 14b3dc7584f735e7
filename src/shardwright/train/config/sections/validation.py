"""The section `[validation]`."""

from __future__ import annotations

from pydantic import Field

from shardwright.train.config.sections.base import Section


class ValidationConfig(Section):
    """The loss on text that is not in the training set."""

    every: int = Field(default=100, ge=0, description="Steps between validations. 0: never.")
    batches: int = Field(default=8, ge=1, description="Global batches per validation.")
