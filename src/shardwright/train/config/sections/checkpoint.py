"""The section `[checkpoint]`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from shardwright.train.config.sections.base import Section


class CheckpointConfig(Section):
    """Checkpoints during the run. A checkpoint is always written at the end."""

    folder: str = Field(
        default="",
        description=(
            "Where the checkpoints are: another folder, or a URL that fsspec knows, such as s3://bucket/runs. They are "
            "below the name of the run's folder. Empty: in the run's folder."
        ),
    )
    every: int = Field(default=100, ge=0, description="Steps between checkpoints. 0: only at the end.")
    keep: int = Field(
        default=2,
        ge=1,
        description="Newest checkpoints to keep; older ones are deleted. Damaged ones do not count.",
    )
    keep_every: int = Field(
        default=0,
        ge=0,
        description="Checkpoints of steps that this number divides are never deleted. 0: none.",
    )
    keep_best: str = Field(
        default="",
        description=(
            "Keep the checkpoint with the best value of this figure, too: loss, validation_loss, validation_loss/NAME "
            "of a set, a metric of a hook, or validation_METRIC. Empty: none."
        ),
    )
    asynchronous: bool = Field(
        default=False,
        description=(
            "Copy the state to the host's memory and let a process of each rank write it while the steps go on. Needs "
            "memory on the host for that copy. The last checkpoint is written before the run ends."
        ),
    )
    on_save_failure: Literal["stop", "continue"] = Field(
        default="stop",
        description=(
            "If a checkpoint cannot be written: end the run, or print a line and try again at the next checkpoint. "
            "If the last one cannot be written, the run ends with an error."
        ),
    )
