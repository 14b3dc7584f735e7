"""The clocks of the hosts of a job, compared through the store of its launcher.

The first rank asks each other rank for its time. Half of the round trip is the time of the answer, and the shortest of
several round trips is used. Without several ranks nothing is compared. Nothing here sets a clock.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from shardwright.cli.doctor.finding import Finding, unmeasured
from shardwright.cli.doctor.words import duration, error_text

SECONDS = 30.0
"""Limit of the wait of ranks for each other, which start at different times."""
ROUNDS = 5
MUCH_SKEW = 0.5
"""Seconds of a difference that makes times of logs and ages of files wrong."""
ADVICE = (
    "times of logs and traces, and ages of files, do not fit together: let chrony or systemd-timesyncd set the clocks "
    "of all hosts (timedatectl set-ntp true)"
)


def is_rank_of_several(environment: Mapping[str, str]) -> bool:
    """Return whether a launcher has started this process as one of several ranks."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if not all(environment.get(name) for name in names):
        return False
    numbers = [environment[name] for name in names if name != "MASTER_ADDR"]
    return all(each.isdecimal() for each in numbers) and int(environment["WORLD_SIZE"]) > 1


def find_clocks() -> Finding:
    """Compare the clocks as the first rank of a job, and judge them."""
    subject = "clocks"
    if not is_rank_of_several(os.environ):
        return Finding(
            subject,
            "this process is alone, so no clocks were compared (start it with torchrun or srun on several hosts)",
        )
    ranks = int(os.environ["WORLD_SIZE"])
    try:
        skews, silent = ask_ranks(rank_store(), ranks)
    except Exception as error:  # the store is gone, or never came
        return unmeasured(
            subject,
            f"the ranks have no store ({error_text(error)[:120]})",
            "see that MASTER_ADDR and MASTER_PORT can be reached from all hosts",
        )
    return judge_clocks(skews, silent)


def answer_first_rank() -> None:
    """Answer the first rank's questions about the time as another rank, until the last one or the limit of time."""
    rank = int(os.environ["RANK"])
    try:
        answer(rank_store(), rank, time.time)
    except Exception:
        pass  # the first rank reports what is missing


def judge_clocks(skews: Mapping[int, tuple[float, float]], silent: list[int]) -> Finding:
    """The verdict on the ranks' clocks: by rank seconds ahead of the first rank's, and how inexact they are."""
    figures: dict[str, Any] = {
        "skew_seconds": {str(rank): skew for rank, (skew, _) in skews.items()},
        "error_seconds": {str(rank): error for rank, (_, error) in skews.items()},
        "silent_ranks": silent,
    }
    missing = f"{_ranks(silent)} did not answer" if silent else ""
    advice = [f"see why {_ranks(silent)} did not start"] if silent else []
    if not skews:
        return Finding("clocks", f"not measured: {missing}", "; ".join(advice), figures)
    rank = max(skews, key=lambda each: abs(skews[each][0]))
    skew, error = skews[rank]
    if abs(skew) - error > MUCH_SKEW:
        advice.insert(0, ADVICE)
    ahead = "ahead of" if skew > 0 else "behind"
    text = (
        f"{len(skews) + 1} ranks compared: rank {rank} is the farthest, {duration(abs(skew))} {ahead} rank 0 "
        f"(within {duration(error)})"
    )
    return Finding("clocks", ", ".join(filter(None, (text, missing))), "; ".join(advice), figures)


def ask_ranks(
    store: Any, ranks: int, seconds: float = SECONDS
) -> tuple[dict[int, tuple[float, float]], list[int]]:
    """By rank its seconds ahead of this clock with their error, and the ranks that did not answer in time."""
    deadline = time.monotonic() + seconds
    skews: dict[int, tuple[float, float]] = {}
    for rank in range(1, ranks):
        rounds: list[tuple[float, float]] = []
        try:
            _wait(store, f"here/{rank}", deadline - time.monotonic())
            for number in range(ROUNDS):
                begin, before = time.perf_counter(), time.time()
                store.set(f"ask/{rank}/{number}", "")
                # A rank that is here answers soon, also if others have used up the time.
                _wait(store, f"answer/{rank}/{number}", max(deadline - time.monotonic(), 1.0))
                there = float(store.get(f"answer/{rank}/{number}"))
                half = (time.perf_counter() - begin) / 2
                rounds.append((half, there - before - half))
        except RuntimeError:
            pass  # no answer in time
        if rounds:
            half, skew = min(rounds)
            skews[rank] = (skew, half)
    return skews, [rank for rank in range(1, ranks) if rank not in skews]


def answer(store: Any, rank: int, clock: Callable[[], float], seconds: float = SECONDS) -> None:
    """Write the time of this rank for each question of the first rank. Raises RuntimeError if none comes in time."""
    store.set(f"here/{rank}", "")
    for number in range(ROUNDS):
        _wait(store, f"ask/{rank}/{number}", seconds)
        store.set(f"answer/{rank}/{number}", repr(clock()))


def _wait(store: Any, key: str, seconds: float) -> None:
    store.wait([key], timedelta(seconds=max(seconds, 0.001)))


@functools.cache
def rank_store() -> Any:
    """The store of the job. torchrun may have one; else the first rank does, until it ends."""
    import torch.distributed as dist

    environment = os.environ
    first = environment["RANK"] == "0" and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = dist.TCPStore(
        environment["MASTER_ADDR"],
        int(environment["MASTER_PORT"]),
        is_master=first,
        wait_for_workers=False,
        timeout=timedelta(seconds=SECONDS),
    )
    return dist.PrefixStore(f"shardwright doctor {attempt()}", store)


def attempt() -> str:
    """The number of restarts of this job, which keeps the keys of two attempts apart."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def _ranks(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
    return f"rank {shown}" if len(numbers) == 1 else f"ranks {shown}"
