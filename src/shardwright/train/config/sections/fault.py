"""The section `[fault]`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from shardwright.train.config.sections.base import Section


class FaultConfig(Section):
    """Restarts after a failure, signals, hangs, and numbers that have gone wrong."""

    max_restarts: int = Field(
        default=0,
        ge=0,
        description=(
            "How often the job starts again by itself after a rank was killed or failed. Also --max-restarts N. Under "
            "torchrun its own --max-restarts counts."
        ),
    )
    least_ranks: int = Field(
        default=0,
        ge=0,
        description=(
            "If a rank was killed or did not answer, restart with fewer ranks, but at least with this many. 0: always "
            "with the same number."
        ),
    )
    save_seconds: float = Field(
        default=0.0,
        ge=0,
        description=(
            "Seconds from a signal (SIGTERM, SIGINT, SIGHUP, SIGUSR1) in which the checkpoint must be written. After "
            "them the job ends without it. 0: no limit."
        ),
    )
    stall_seconds: float = Field(
        default=300.0,
        ge=0,
        description=(
            "Seconds that a rank may wait for others, or be at one place. After them the job says where each rank is "
            "and ends with status 75, which allows a restart. Loads, saves and steps that compile may take ten times "
            "as long. 0: no watch."
        ),
    )
    check: Literal["before_step", "after_step"] = Field(
        default="before_step",
        description=(
            "When the host reads the numbers of a step. before_step: between clipping and the optimizer's step. "
            "after_step: one step late, so that the device need not wait for the host. The device itself leaves "
            "weights and state unchanged by a step with wrong numbers. Losses are equal."
        ),
    )
    on_non_finite: Literal["stop", "skip", "rewind"] = Field(
        default="stop",
        description=(
            "If the loss, a gradient or a weight is NaN or infinite. stop: save the state before that step and end the "
            "run. skip: leave the samples of that step out. rewind: go back to a checkpoint, and leave out the samples "
            "since then."
        ),
    )
    on_spike: Literal["ignore", "skip", "rewind"] = Field(
        default="ignore",
        description=(
            "If the loss of a step is above the mean of the last spike_window losses by more than spike_sigmas "
            "standard deviations. skip and rewind: as in on_non_finite."
        ),
    )
    spike_sigmas: float = Field(default=6.0, gt=0, description="See on_spike.")
    spike_window: int = Field(
        default=128,
        ge=4,
        description="See on_spike. With fewer than half of these losses nothing is a spike.",
    )
    max_skips: int = Field(
        default=10, ge=1, description="Steps that may be skipped in a row. Then the run ends."
    )
    max_rewinds: int = Field(default=3, ge=1, description="Rewinds of a run. Instead of one more it ends.")
    rewind_steps: int = Field(
        default=0,
        ge=0,
        description=(
            "Rewind to a checkpoint that is older than the wrong step by at least so many steps. More checkpoints than "
            "checkpoint.keep stay for this: all since the newest one that is old enough."
        ),
    )
    verify_every: int = Field(
        default=0,
        ge=0,
        description=(
            "At each step that this number divides, compute the gradients twice and compare all bits, and compare the "
            "copies that several ranks hold: of weights, gradients, optimizer state, buffers. A difference ends the "
            "job with status 75. It costs one more forward and backward in these steps. 0: never."
        ),
    )

    @property
    def losses_kept(self) -> int:
        """The number of past losses that a position of the run keeps, against which a spike is measured."""
        return 0 if self.on_spike == "ignore" else self.spike_window

    def verifies(self, step: int) -> bool:
        """Return whether the gradients of this step are computed twice."""
        return self.verify_every > 0 and step % self.verify_every == 0
