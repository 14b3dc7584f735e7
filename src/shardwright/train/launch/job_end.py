"""The end of a job. `JobEnd` alone writes exit.json, whoever started the ranks. It closes the session in run.json,
unless the loop has done so with its results.

An end, and who can know of it. "The ranks" are those of torchrun, SLURM or Ray, which no launcher of ours has started:

- done, or stopped by a signal with the state saved: the first rank, which has written run.json; our launcher, once all
  ranks have left.
- a second signal, or `fault.save_seconds` have passed: the thread of the first rank that reads signals; our launcher,
  which kills the ranks.
- a mistake of the user: the command before there are ranks, else each rank. A refused resume has no session.
- an error of a rank: that rank. It passes a `Complaint` to our launcher. Without our launcher, the first rank that sets
  a key in their store records its own.
- wrong numbers (not finite, changed bits), a store that does not answer: all ranks, as an error of each.
- lost contact: each rank but the one that was lost. It leaves a second to that rank to record its own error.
- a rank was killed: our launcher sees it; the ranks lose contact. If all are killed, nobody: the next start in the
  folder repairs run.json.
- a hang: our launcher; of the ranks the one that leads the watch.
- our launcher was killed: its ranks, of which the first one records.
- a restart follows: our launcher closes the session, and writes exit.json after the last attempt. torchrun does not say
  that it starts again, so each attempt writes it, and the next one removes it.
- torchrun has started ranks that would end as before: the first one, before the attempt begins.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace
from typing import Literal

from shardwright.train.launch.environment import under_torchrun
from shardwright.train.launch.signals import status_of_signal
from shardwright.train.launch.torchrun import record_end
from shardwright.train.run.exits import DONE, FAILED, INTERRUPTED, TRY_AGAIN, USER_ERROR, Outcome, write_exit
from shardwright.train.run.folder import RunFolder
from shardwright.train.run.record import close_session

Kind = Literal["user", "passing", "fault", "lost contact", "interrupted", "error"]
LONGEST = 400
"""Characters of an error in a line that says more than the error."""
STATUSES = {"user": USER_ERROR, "passing": TRY_AGAIN, "lost contact": TRY_AGAIN, "interrupted": INTERRUPTED}
"""Exit statuses by the kind of a complaint; 1 for others."""
SHARED = ("user", "passing", "fault", "interrupted")
"""Kinds that all ranks meet."""


@dataclass(frozen=True)
class Complaint:
    """A rank's statement about its end. The order counts who complained first."""

    rank: int
    order: int
    kind: Kind
    message: str
    trace: str
    done: int | None = None
    """Steps that the rank had done, if it was in the loop over steps."""
    out_of_memory: bool = False
    """The rank's device had no memory left."""

    @property
    def is_shared(self) -> bool:
        return self.kind in SHARED

    @property
    def in_line(self) -> str:
        return " ".join(self.message.split())

    @property
    def in_short(self) -> str:
        text = self.in_line
        return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."

    @property
    def end(self) -> Outcome:
        """The end of a job of which nothing else is known."""
        rank = None if self.is_shared else self.rank
        return Outcome(STATUSES.get(self.kind, FAILED), self.in_line, rank, done=self.done)


def stopped_by(number: int, unsaved: str | None = None, late: bool = False) -> Outcome:
    """Return the end by a signal. `unsaved`: why the state is not saved; `late`: because the time to save has
    passed."""
    outcome = "; the state is saved" if unsaved is None else f" without saving{unsaved and ': '}{unsaved}"
    status = TRY_AGAIN if late else status_of_signal(number)
    return Outcome(status, f"stopped by {signal.Signals(number).name}{outcome}")


@dataclass(frozen=True)
class JobEnd:
    """Records how one attempt of a job ends.

    Attributes:
        folder: of the run.
        attempt: 1 for the first start of the ranks.
        speaks: False if another process says how the job ends: our launcher for its ranks, the next attempt if a
            restart follows. Then `write` closes the session alone.
        sessions_before: sessions in run.json before the attempt, if the caller has counted them. Then this end replaces
            a rank's.
    """

    folder: RunFolder
    attempt: int
    speaks: bool = True
    sessions_before: int | None = None

    def write(self, end: Outcome, note: str = "") -> None:
        """Write how the attempt ended. `note` is the rest of the reason in exit.json. Raises nothing if a disk is full:
        the error that ended the job is what the user needs."""
        if end.status != DONE:
            close_session(self.folder, end, self.sessions_before)
        if self.speaks:
            if under_torchrun():
                record_end(self.folder, end)
            self.write_exit_file(replace(end, reason=end.reason + note))

    def write_exit_file(self, end: Outcome) -> None:
        """Write exit.json alone: for an attempt that has not begun, so the session in run.json is an earlier one."""
        write_exit(self.folder, end, self.attempt)
