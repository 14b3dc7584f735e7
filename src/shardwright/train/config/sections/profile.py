"""The section `[profile]`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from shardwright.train.config.sections.base import Section


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
