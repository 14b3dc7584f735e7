"""The section `[validation]`."""

from __future__ import annotations

import os
from typing import Annotated

from pydantic import Field

from shardwright.train.config.sections.base import Section

YAML = (".yaml", ".yml")
"""Ends of the names of files that describe a task."""


class ValidationConfig(Section):
    """The loss on text that is not in the training set, and tasks of lm-evaluation-harness."""

    every: int = Field(default=100, ge=0, description="Steps between validations. 0: never.")
    batches: int = Field(default=8, ge=1, description="Global batches per validation.")
    tasks: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(strict=False)] = Field(
        default=(),
        description=(
            'Tasks of lm-evaluation-harness, such as ["hellaswag"]: names, or YAML files of tasks. A process beside '
            "the run evaluates them on checkpoints while the steps go on. Needs the extra evaluate."
        ),
    )
    tasks_every: int = Field(
        default=0,
        ge=0,
        description=(
            "Steps between evaluations of the tasks. A checkpoint is written at these steps, too. The last step is "
            "always evaluated. 0: only that."
        ),
    )
    tasks_limit: int = Field(
        default=0, ge=0, description="The first samples of each task that count. 0: all."
    )
    tasks_device: str = Field(
        default="cpu",
        min_length=1,
        description=(
            "Device of the evaluation of tasks. A GPU, such as cuda:0, needs memory beside that of the training."
        ),
    )
    tasks_batch_size: int = Field(default=8, ge=1, description="Samples of a task at once.")
    tasks_apply_chat_template: bool = Field(
        default=False,
        description="Put the texts of tasks into the run's chat template, as messages of a user.",
    )

    def resolved(self) -> ValidationConfig:
        """Return the same with absolute paths of tasks, to be found from any folder."""
        tasks = tuple(os.path.abspath(task) if task.endswith(YAML) else task for task in self.tasks)
        return self.model_copy(update={"tasks": tasks})
