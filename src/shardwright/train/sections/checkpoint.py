"""The section `[checkpoint]`."""

from __future__ import annotations

from pydantic import Field

from shardwright.train.sections.base import Section


class CheckpointConfig(Section):
    """Checkpoints during the run. A checkpoint is always written at the end."""

    every: int = Field(default=100, ge=0, description="Steps between checkpoints. 0: only at the end.")
    keep: int = Field(default=2, ge=1, description="Newest checkpoints to keep; older ones are deleted.")
