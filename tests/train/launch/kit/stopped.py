"""Ranks that stop themselves at the start of a job. Import it with :func:`tests.train.launch.kit.forked.launch`.

`environment(1, "run_rank")` stops rank 1, in the first attempt, before it calls this function of
`shardwright.train.rank.process`, or this method of its kinds of ranks.
"""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable
from typing import Any

from shardwright.train.rank import process

VARIABLE = "STOPPED_AT_START"
PLACES = ("run_rank", "start_together", "join_world", "open", "watch")
"""In the order of a start. The last one opens the heartbeat."""


def environment(number: int, place: str) -> dict[str, str]:
    return {VARIABLE: f"{number} {place}"}


def _stopping(place: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def stop_first(*arguments: Any, **options: Any) -> Any:
        is_here = os.environ.get(VARIABLE) == f"{os.environ.get('RANK')} {place}"
        attempt = (
            os.environ.get("SHARDWRIGHT_ATTEMPT", "1"),
            os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
        )
        if is_here and attempt == ("1", "0"):
            os.kill(os.getpid(), signal.SIGSTOP)
        return function(*arguments, **options)

    return stop_first


for owner in (process, process.LaunchedRank, process.IndependentRank):
    for each in PLACES:
        if hasattr(owner, each):
            setattr(owner, each, _stopping(each, getattr(owner, each)))
