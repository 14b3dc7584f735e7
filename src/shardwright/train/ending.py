"""How a job of several ranks ended, from all that is known of it: one message, one exit status.

Nothing here starts or watches processes.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch.distributed as dist

from shardwright.train.errors import UserError
from shardwright.train.resuming import resume_command
from shardwright.train.runs import RunFolder, checkpoints_of, mark_failed
from shardwright.train.steps import saved_steps

LOG_TAIL = 12
"""Lines of a failed rank's log that are shown."""
STOPPED = tuple(128 + number for number in (signal.SIGINT, signal.SIGTERM))
"""Statuses of a rank that saved and left because a signal asked it to."""


@dataclass(frozen=True)
class Complaint:
    """What a rank says about its end, passed to the launcher. The order counts who complained first."""

    rank: int
    order: int
    kind: Literal["user", "nonfinite", "lost contact", "interrupted", "error"]
    message: str
    trace: str


@dataclass(frozen=True)
class Ending:
    """All that is known of how the ranks of a job ended, not all of them well."""

    folder: RunFolder
    logs: Path
    statuses: Mapping[int, int]
    killed: set[int]
    """Ranks the launcher killed because they did not end with the others."""
    complaints: list[Complaint]
    first_signal: int | None
    """The signal that the launcher got first, or None."""


def complaints_in(store: dist.Store, ranks: int) -> list[Complaint]:
    """What the ranks said, first one first."""
    keys = [f"complaint/{rank}" for rank in range(ranks)]
    complaints = [Complaint(**json.loads(store.get(key))) for key in keys if store.check([key])]
    return sorted(complaints, key=lambda complaint: complaint.order)


def conclude(ending: Ending, debug: bool) -> int:
    """Print the error and return the exit status. Errors that the user can correct are raised."""
    user = next((complaint for complaint in ending.complaints if complaint.kind == "user"), None)
    if all(status in (0, *STOPPED) for status in ending.statuses.values()):
        return max(ending.statuses.values())
    mark_failed(ending.folder)
    if user is not None:
        if debug:
            print(user.trace, file=sys.stderr)
        raise UserError(user.message)
    if ending.first_signal is not None and (not ending.folder.exists() or _all_interrupted(ending)):
        return stopped_early(ending.first_signal)
    nonfinite = next((complaint for complaint in ending.complaints if complaint.kind == "nonfinite"), None)
    if nonfinite is not None:
        return fail(nonfinite.message)
    if ending.first_signal is not None and all(rank in ending.killed for rank in ending.statuses):
        return stopped_early(ending.first_signal)
    print(f"error: {_diagnosis(ending)}", file=sys.stderr, flush=True)
    return 1


def _all_interrupted(ending: Ending) -> bool:
    """Whether every rank ended by the signal before it was ready to save, or was ended for taking too long."""
    interrupted = {complaint.rank for complaint in ending.complaints if complaint.kind == "interrupted"}
    signals = (-signal.SIGINT, -signal.SIGTERM)
    return all(
        rank in interrupted or rank in ending.killed or status in signals
        for rank, status in ending.statuses.items()
    )


def stopped_early(number: int) -> int:
    print(f"stopped by {signal.Signals(number).name} without saving", file=sys.stderr, flush=True)
    return 128 + number


def _diagnosis(ending: Ending) -> str:
    """The rank that failed first, how, the end of its log, and the command that continues the run."""
    rank, how = culprit(ending)
    lines = [f"rank {rank} of {len(ending.statuses)} {how}; the job has ended"]
    tail = _tail(log_of(ending.logs, rank))
    if tail:
        lines += [f"the end of its log {log_of(ending.logs, rank)}:", *("  " + line for line in tail)]
    saved = _saved(ending.folder)
    if saved:
        lines += [
            f"{saved}; to continue:",
            f"  {resume_command(ending.folder, len(ending.statuses))}",
        ]
    return "\n".join(lines)


def _saved(folder: RunFolder) -> str:
    """What is saved, in words; empty if nothing is. No store is asked: it may be what has failed."""
    try:
        checkpoints = checkpoints_of(folder, folder.config())
    except UserError:
        return ""
    if isinstance(checkpoints, str):
        return f"the checkpoints are in {checkpoints}"
    steps = saved_steps(checkpoints)
    return f"step {steps[0]} is saved" if steps else ""


def culprit(ending: Ending) -> tuple[int, str]:
    """The rank to name: one that died, else the first with an error of its own, else one that stopped answering."""
    for rank, status in ending.statuses.items():
        if status < 0 and rank not in ending.killed:
            name = signal.Signals(-status).name
            hint = (
                " (the system's out-of-memory killer sends this signal, too)"
                if -status == signal.SIGKILL
                else ""
            )
            return rank, f"was killed by {name}{hint}"
    for complaint in ending.complaints:
        if complaint.kind == "error":
            return complaint.rank, f"failed with {complaint.message.splitlines()[0]}"
    complained = {complaint.rank for complaint in ending.complaints}
    for rank, status in ending.statuses.items():
        if rank not in complained and rank not in ending.killed and status > 0:
            return rank, f"exited with status {status}"
    for rank in sorted(ending.killed - complained):
        return rank, "did not answer the other ranks and was killed"
    first = ending.complaints[0]
    return first.rank, f"lost contact with the other ranks: {first.message.splitlines()[0]}"


def _tail(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").rstrip().splitlines()[-LOG_TAIL:]
    except OSError:
        return []


def fail(message: str) -> int:
    print(f"error: {message}", file=sys.stderr, flush=True)
    return 1


def log_of(logs: Path, rank: int) -> Path:
    return logs / f"rank-{rank}.log"
