"""The end of a job: its exit status, and exit.json in the run's folder, which has the status and the reason.

Wrappers read exit.json where a launcher hides the status: torchrun makes 1 of every other one. Nothing here decides how
a job has ended.

The words for ends, from the inside to the outside:

- `LoopEnd` (`step/loop`): the steps of a session are over: the last one, a signal, or a hook.
- `RunEnd` (`config/catalog/records`): the end of a session as hooks and sinks get it, with results.
- `Complaint` (`launch/job_end`): the error of one rank, which it passes to the one that judges.
- `Outcome` (here): the status and the reason of an attempt or of the whole job.
- `JobEnd` (`launch/job_end`): writes an `Outcome` into exit.json and run.json, once.
- `AttemptEnd` (`launch/restarts`): an attempt that failed, to be compared with the next one.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

from shardwright.train.errors import UserError
from shardwright.train.run.folder import RunFolder, newest_saved, now
from shardwright.train.run.metrics import recorded_step
from shardwright.train.run.writing import write_json

DONE = 0
FAILED = 1
"""The job itself failed. It would most likely fail again."""
USER_ERROR = UserError.MISTAKE
TRY_AGAIN = UserError.PASSING
"""Something around the job failed: a rank was killed, lost or stalled. EX_TEMPFAIL of sysexits.h."""
INTERRUPTED = 128 + signal.SIGINT
TERMINATED = 128 + signal.SIGTERM
STOPPED = (INTERRUPTED, TERMINATED)
"""Statuses of a job, and of a rank, that saved and left because a signal asked for it."""


@dataclass(frozen=True)
class Outcome:
    """The end of a job, or of one attempt of it.

    Attributes:
        status: of the process.
        reason: one line without a capital letter and a full stop.
        rank: the rank that caused it; None if none did.
        lost: that rank was killed or did not answer, so the others could go on without it.
        done: steps that this rank had done, or all ranks. The first rank may have recorded one more or one less. None:
            not known.
    """

    status: int
    reason: str
    rank: int | None = None
    lost: bool = False
    done: int | None = None


def write_exit(folder: RunFolder, end: Outcome, attempt: int) -> None:
    """Write exit.json, if a run began in the folder. A disk that is full does not hide the error that ended the job."""
    if not folder.exists():
        return
    content = {
        "status": end.status,
        "reason": end.reason,
        "step": max(end.done or 0, recorded_step(folder.metrics_file)),
        "saved": _saved(folder),
        "rank": end.rank,
        "attempt": attempt,
        "time": now(),
    }
    try:
        write_json(folder.exit_file, content)
    except UserError:
        pass


def remove_exit(folder: RunFolder) -> None:
    """Remove the exit.json of an earlier session or attempt. The job that starts now writes its own."""
    try:
        os.unlink(folder.exit_file)
    except OSError:
        pass


def is_saved(folder: RunFolder) -> bool:
    """Return whether the newest checkpoint has all steps that the run has recorded."""
    saved = _saved(folder)
    return saved is not None and saved >= recorded_step(folder.metrics_file)


def _saved(folder: RunFolder) -> int | None:
    try:
        return newest_saved(folder)
    except OSError:  # a store does not answer
        return None
