"""Work of the first rank whose mistakes of the user arrive on every rank as they are.

`shardwright.collective` does not know the trainer's errors, so it would raise a RuntimeError in their place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from shardwright.collective import RankGroup
from shardwright.train.errors import JobError

T = TypeVar("T")


def run_on_first(action: Callable[[], T]) -> T:
    """The result of `action` on the first rank, which alone runs it. Called by every rank.

    Raises, on every rank:
        JobError: the one that `action` raised. Other errors arrive as from `RankGroup.run_on_first`.
    """

    def attempt() -> T | JobError:
        try:
            return action()
        except JobError as error:
            return error

    outcome = RankGroup().run_on_first(attempt)
    if isinstance(outcome, JobError):
        raise outcome
    return outcome
