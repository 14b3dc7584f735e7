"""The section `[optimizer]`."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from shardwright.train.config.catalog.optimizers import NamedOptimizer, optimizers
from shardwright.train.config.catalog.registry_names import OneOf, summaries
from shardwright.train.config.sections.base import Section

Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Section):
    """The optimizer and the course of its learning rate."""

    name: Annotated[str, OneOf(optimizers)] = Field(default="adamw", description=summaries(optimizers))
    lr: float = Field(default=3e-3, gt=0, description="Peak learning rate.")
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] = Field(
        default=(0.9, 0.95),
        description="Decay of the running means of the gradient and of the squared gradient.",
    )
    eps: float = Field(default=1e-8, gt=0, description="Added to the denominator of the update.")
    weight_decay: float = Field(
        default=0.1, ge=0, description="Weight decay of matrices; vectors are not decayed."
    )
    momentum: Beta = Field(
        default=0.95, description="For muon: decay of the running mean of its matrices' gradients."
    )
    ns_steps: int = Field(
        default=5, ge=1, lt=100, description="For muon: Newton-Schulz iterations per step and matrix."
    )
    in_backward: bool = Field(
        default=False,
        description=(
            "Step each unit in backward as soon as its gradients are reduced, and free these gradients. Needs the "
            "engine shardwright and train.max_norm = 0, since the norm of all gradients is not known in backward."
        ),
    )
    options: dict[str, bool | int | float | str] = Field(
        default_factory=dict,
        description=(
            "Further options of a registered optimizer, which `shardwright extensions optimizers` lists. The built-in "
            "optimizers have none."
        ),
    )
    warmup_steps: int = Field(
        default=20,
        ge=0,
        description="Steps over which the learning rate rises to lr. A shorter run ends before the peak.",
    )
    schedule: Literal["cosine", "linear", "constant"] = Field(
        default="cosine",
        description="Course of the learning rate from the end of the warm-up to the last step.",
    )
    min_lr_ratio: float = Field(
        default=0.1, ge=0, le=1, description="Learning rate of the last step, as a fraction of lr."
    )

    @property
    def entry(self) -> NamedOptimizer:
        """The optimizer in the registry."""
        return optimizers.get(self.name)

    @model_validator(mode="after")
    def _options_belong_to_the_optimizer(self) -> OptimizerConfig:
        if problem := self.entry.options_problem(self.options):
            raise ValueError(problem)
        return self

    def rate(self, step: int, steps: int) -> float:
        """Return the learning rate of step number `step` (from 0) of `steps`: it rises over the warm-up to `lr`, then
        falls to `min_lr_ratio` times `lr` at the last step."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return self.lr
        done = (step - self.warmup_steps) / max(1, steps - 1 - self.warmup_steps)
        part = 0.5 * (1 + math.cos(math.pi * done)) if self.schedule == "cosine" else 1 - done
        return self.lr * (self.min_lr_ratio + (1 - self.min_lr_ratio) * part)
