"""Our launcher judges how its ranks ended, from all that it knows of them: one message, one exit status.

Nothing here starts or watches processes, or writes a record.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from shardwright.engine import ranks_in_words
from shardwright.train.errors import UserError
from shardwright.train.launch.forecast import note_out_of_memory
from shardwright.train.launch.job_end import Complaint, stopped_by
from shardwright.train.launch.resume import to_continue
from shardwright.train.launch.signals import SIGNALS
from shardwright.train.run.exits import DONE, FAILED, STOPPED, TRY_AGAIN, USER_ERROR, Outcome, is_saved
from shardwright.train.run.folder import RunFolder
from shardwright.watching import Diagnosis, Hang

LOG_TAIL = 12
"""Lines of a failed rank's log that are shown."""


@dataclass(frozen=True)
class EndOfRanks:
    """The end of the processes that the launcher started."""

    statuses: Mapping[int, int]
    """Exit statuses by rank, negative for signals."""
    killed: frozenset[int] = frozenset()
    """Ranks that the launcher killed, for one of the reasons below or because they did not end with the others."""
    hurried: str = ""
    """The reason why the launcher killed ranks after a signal, in words."""
    late: bool = False
    """The launcher killed ranks because `fault.save_seconds` had passed."""
    hang: Hang | None = None
    """The launcher killed ranks because they did not go on."""
    steps: Mapping[int, int] = field(default_factory=dict)
    """Steps that each rank had done, by its heartbeat. A rank without a heartbeat is missing."""


@dataclass(frozen=True)
class Evidence:
    """All that the launcher knows of how its ranks ended."""

    folder: RunFolder
    logs: Path
    ranks: EndOfRanks
    complaints: list[Complaint]
    first_signal: int | None
    """The signal that the launcher got first, or None."""
    session: Mapping[str, Any] = field(default_factory=dict)
    """The session of this start of the ranks in run.json; empty if they did not come so far."""

    @cached_property
    def is_saved(self) -> bool:
        """True if the newest checkpoint contains the last step. Computed once, so that all messages of a job agree."""
        return is_saved(self.folder)

    def done(self, rank: int) -> int | None:
        """Return how many steps a rank completed, or None if nobody knows.

        The rank's own report counts; if it sent none, the last number on its heartbeat page does.
        """
        said = next((each.done for each in self.complaints if each.rank == rank), None)
        return self.ranks.steps.get(rank) if said is None else said

    def is_out_of_memory(self, rank: int) -> bool:
        return any(each.out_of_memory for each in self.complaints if each.rank == rank)


def complaints_in(store: dist.Store, ranks: int) -> list[Complaint]:
    """Return the complaints of the ranks, first one first."""
    keys = [f"complaint/{rank}" for rank in range(ranks)]
    complaints = [Complaint(**json.loads(store.get(key))) for key in keys if store.check([key])]
    return sorted(complaints, key=lambda complaint: complaint.order)


def judge(evidence: Evidence) -> Outcome:
    """Return the status, and the reason in one line."""
    if all(status == DONE for status in evidence.ranks.statuses.values()) or _is_finished(evidence):
        return Outcome(DONE, "done")
    number = evidence.first_signal
    if _have_stopped(evidence):
        status = max(evidence.ranks.statuses.values())
        asked = "a signal" if number is None else signal.Signals(number).name
        reason = f"stopped by {asked}; the state is saved"
        if not ranks_have_said_it(evidence):
            # A second signal came to the ranks, but not to the launcher.
            reason = f"stopped by {asked} without saving: a second signal"
        session = evidence.session
        if number is None and session.get("status") == "interrupted":  # by a signal that only a rank got
            reason = str(session["ended_by"])
        return Outcome(status, reason)
    if evidence.ranks.hang is not None:
        return end_of_hang(evidence.ranks.hang.verdict)
    user = next((complaint for complaint in evidence.complaints if complaint.kind == "user"), None)
    if user is not None:
        return Outcome(USER_ERROR, user.message, user.rank)
    if number is not None and _ended_by_signal(evidence):
        return _stopped_early(evidence, number)
    on_all = next((each for each in evidence.complaints if each.kind in ("passing", "fault")), None)
    if on_all is not None:
        return on_all.end
    culprit_rank, how, status, lost = culprit(evidence)
    reason = f"rank {culprit_rank} of {len(evidence.ranks.statuses)} {how}"
    return Outcome(status, reason, culprit_rank, lost, evidence.done(culprit_rank))


def _is_finished(evidence: Evidence) -> bool:
    """Return whether all was done and written before ranks were killed, lost contact or hung. An error counts."""
    lost = {each.rank for each in evidence.complaints if each.kind in ("lost contact", "interrupted")}
    return (
        evidence.session.get("status") == "finished"
        and len(lost) == len(evidence.complaints)
        and all(
            status <= DONE or status in STOPPED or rank in lost
            for rank, status in evidence.ranks.statuses.items()
        )
    )


def end_of_hang(verdict: Diagnosis) -> Outcome:
    culprit = verdict.culprits[0] if len(verdict.culprits) == 1 else None
    return Outcome(TRY_AGAIN, f"the job hung: {verdict.reason}", culprit, verdict.lost, verdict.done)


def ranks_have_said_it(evidence: Evidence) -> bool:
    """Return whether the ranks have saved and left, and the first one has printed so."""
    return _have_stopped(evidence) and evidence.is_saved


def _have_stopped(evidence: Evidence) -> bool:
    return not evidence.ranks.hurried and all(
        status in (DONE, *STOPPED) for status in evidence.ranks.statuses.values()
    )


def _ended_by_signal(evidence: Evidence) -> bool:
    return (
        bool(evidence.ranks.hurried)
        or not evidence.folder.exists()
        or _all_interrupted(evidence)
        or all(rank in evidence.ranks.killed for rank in evidence.ranks.statuses)
    )


def _stopped_early(evidence: Evidence, number: int) -> Outcome:
    """Return the end of a job that a signal ended before the ranks have said that they saved."""
    if evidence.folder.exists() and evidence.is_saved:
        return stopped_by(number)
    return stopped_by(number, unsaved=evidence.ranks.hurried, late=evidence.ranks.late)


def announce(evidence: Evidence, end: Outcome, debug: bool, note: str = "") -> int:
    """Print what the ranks have not printed, and return the exit status. Errors that the user can correct are raised.

    `note` says about restarts.
    """
    if end.status == USER_ERROR:
        if debug:
            print(next(each.trace for each in evidence.complaints if each.kind == "user"), file=sys.stderr)
        raise UserError(end.reason)
    if end.status == DONE:
        _warn_of_end(evidence)
        return end.status
    if ranks_have_said_it(evidence):
        return end.status
    continuing = to_continue(evidence.folder, len(evidence.ranks.statuses))
    if evidence.ranks.hang is not None:
        lines = [f"error: {evidence.ranks.hang.text}", f"the job has ended{note}", *continuing]
    elif end.rank is not None:
        lines = [
            f"error: {end.reason}; the job has ended{note}",
            *(note_out_of_memory(evidence.folder) if evidence.is_out_of_memory(end.rank) else ()),
            *_end_of_log(evidence, end.rank),
            *continuing,
        ]
    elif end.status == FAILED:
        lines = [f"error: {end.reason}" + (f". The job has ended{note}" if note else "")]
    elif evidence.first_signal is None:
        lines = [f"error: {end.reason}; the job has ended{note}", *continuing]
    else:
        lines = [end.reason, *continuing]
    print("\n".join(lines), file=sys.stderr, flush=True)
    return end.status


def _warn_of_end(evidence: Evidence) -> None:
    """Warn of ranks that did not end by themselves after all was done."""
    ranks = [rank for rank, status in evidence.ranks.statuses.items() if status != DONE]
    if ranks:
        who = f"{ranks_in_words(ranks)} of {len(evidence.ranks.statuses)}"
        text = f"warning: the run is done; {who} did not end by itself after that"
        print(text if len(ranks) == 1 else text.replace("itself", "themselves"), file=sys.stderr, flush=True)


def _all_interrupted(evidence: Evidence) -> bool:
    """Return whether every rank ended by the signal before it was ready to save, or was ended for taking too long."""
    interrupted = {complaint.rank for complaint in evidence.complaints if complaint.kind == "interrupted"}
    signals = [-number for number in SIGNALS]
    return all(
        rank in interrupted or rank in evidence.ranks.killed or status in signals
        for rank, status in evidence.ranks.statuses.items()
    )


def _end_of_log(evidence: Evidence, rank: int) -> list[str]:
    log = log_of(evidence.logs, rank)
    tail = _tail(log)
    return [f"the end of its log {log}:", *("  " + line for line in tail)] if tail else []


class Culprit(NamedTuple):
    """The rank to name, its end in words, and what follows: the job's status, and whether that rank is lost."""

    rank: int
    how: str
    status: int
    lost: bool


CRASHES = (
    signal.SIGSEGV,
    signal.SIGBUS,
    signal.SIGILL,
    signal.SIGFPE,
    signal.SIGABRT,
    signal.SIGSYS,
    signal.SIGTRAP,
)
"""Signals by which a program ends itself. It most likely does so again, so they count as errors."""


def culprit(evidence: Evidence) -> Culprit:
    """One rank that died, else the first with an error of its own, else one that left, else one that stopped answering.

    A rank that left without an error was the first one: the others have not done all, or they would have left, too.
    """
    complained = {complaint.rank for complaint in evidence.complaints}
    left = [
        rank for rank, status in evidence.ranks.statuses.items() if status == DONE and rank not in complained
    ]
    died = [
        (rank, -status)
        for rank, status in evidence.ranks.statuses.items()
        if status < 0 and rank not in evidence.ranks.killed and not (left and status == -signal.SIGABRT)
    ]
    # A rank that aborts may do so because another one is gone: NCCL's watchdog ends it.
    for rank, number in sorted(died, key=lambda each: each[1] == signal.SIGABRT):
        hint = (
            " (the system's out-of-memory killer sends this signal, too)" if number == signal.SIGKILL else ""
        )
        crashed = number in CRASHES
        how = f"was killed by {signal.Signals(number).name}{hint}"
        return Culprit(rank, how, FAILED if crashed else TRY_AGAIN, not crashed)
    for complaint in evidence.complaints:
        if complaint.kind == "error":
            return Culprit(complaint.rank, f"failed with {complaint.in_short}", FAILED, False)
    for rank, status in evidence.ranks.statuses.items():
        if rank not in complained and rank not in evidence.ranks.killed and status > 0:
            return Culprit(rank, f"exited with status {status}", FAILED, False)
    if left:
        return Culprit(left[0], "ended in the middle of the run with status 0", FAILED, False)
    for rank in sorted(evidence.ranks.killed - complained):
        return Culprit(rank, "did not answer the other ranks and was killed", TRY_AGAIN, True)
    first = evidence.complaints[0]
    how = f"lost contact with the other ranks: {first.in_short}"
    return Culprit(first.rank, how, TRY_AGAIN, False)


def say_in_logs(hang: Hang, logs: Path, ranks: int) -> None:
    """Let the log of every rank have it: ranks that wait cannot write."""
    for rank in range(ranks):
        with suppress(OSError), log_of(logs, rank).open("a", encoding="utf-8") as log:
            log.write(f"{hang.text}\n")


def _tail(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").rstrip().splitlines()[-LOG_TAIL:]
    except OSError:
        return []


def log_of(logs: Path, rank: int) -> Path:
    return logs / f"rank-{rank}.log"
