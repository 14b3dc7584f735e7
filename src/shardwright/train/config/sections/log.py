"""The sections `[log]` and `[profile]`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from shardwright.train.config.catalog.registry_names import OneOf, summaries
from shardwright.train.config.catalog.sinks import sinks as named_sinks
from shardwright.train.config.sections.base import Section


class LogConfig(Section):
    """The log and the metrics."""

    every: int = Field(default=1, ge=1, description="Steps between lines of the log.")
    sinks: Annotated[tuple[Annotated[str, OneOf(named_sinks)], ...], Field(strict=False)] = Field(
        default=("tensorboard",),
        description=f"Where metrics go beside metrics.jsonl and the terminal. {summaries(named_sinks)}",
    )
    unit_norms: int = Field(
        default=10,
        ge=0,
        description=(
            "Steps between records of gradient norms by unit, in unit_norms.jsonl of the run's folder; the first step "
            "is recorded, too. 0: none. Only the engine shardwright records them, without an optimizer in backward."
        ),
    )
    project: str = Field(
        default="",
        description=(
            "Project of wandb and trackio, experiment of mlflow. Empty: WANDB_PROJECT, TRACKIO_PROJECT or "
            "MLFLOW_EXPERIMENT_NAME, else shardwright."
        ),
    )

    def records_unit_norms(self, step: int) -> bool:
        return self.unit_norms > 0 and (step == 1 or step % self.unit_norms == 0)

    @model_validator(mode="after")
    def _sinks_differ(self) -> LogConfig:
        names: list[str] = []
        for name in self.sinks:
            same = next((other for other in names if named_sinks.get(other) is named_sinks.get(name)), None)
            if same is not None:
                twice = f"{name!r} twice" if same == name else f"{same!r} and {name!r}, which are one sink"
                raise ValueError(
                    f"sinks: found {twice}. Each record would be written twice. Name each sink once"
                )
            names.append(name)
        return self


class ProfileConfig(Section):
    """Steps that torch's profiler traces, with the names of units. See docs/profiling.md."""

    steps: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(strict=False)] = Field(
        default=(),
        description=(
            "The first and the last step of the trace, such as [10, 12] for steps 10, 11 and 12. The files are in "
            "profile/ of the run's folder; open them at ui.perfetto.dev. Empty: no trace."
        ),
    )
    ranks: (
        Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(strict=False, min_length=1)] | Literal["all"]
    ) = Field(
        default=(0,),
        description='Ranks that write a trace, such as [0, 7]; or "all". Each has a file of its own.',
    )

    @model_validator(mode="after")
    def _steps_are_in_order(self) -> ProfileConfig:
        if self.steps and (len(self.steps) != 2 or self.steps[0] > self.steps[1]):
            raise ValueError(
                f"steps: expected [FIRST, LAST] with 1 <= FIRST <= LAST, found {list(self.steps)}. For one step "
                "write it twice"
            )
        return self
