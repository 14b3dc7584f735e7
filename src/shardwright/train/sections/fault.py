"""The section `[fault]`."""

from __future__ import annotations

from pydantic import Field

from shardwright.train.sections.base import Section


class FaultConfig(Section):
    """Restarts after a failure, signals, and hangs."""

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
