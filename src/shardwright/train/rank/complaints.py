"""A rank turns the error that ended it into a complaint, whose kind says whether all ranks met the error."""

from __future__ import annotations

import traceback

from shardwright.engine import is_lost_contact
from shardwright.train.errors import JobError, UserError, steps_done
from shardwright.train.launch.forecast import is_out_of_memory
from shardwright.train.launch.job_end import Complaint, Kind

KINDS: dict[int, Kind] = {UserError.MISTAKE: "user", UserError.PASSING: "passing"}
"""Kinds by the status of an error that all ranks meet; "fault" for others."""


def complaint_of(error: BaseException, rank: int) -> Complaint:
    kind: Kind = "error"
    message = f"{type(error).__name__}: {error}"
    if isinstance(error, JobError):
        kind, message = KINDS.get(error.status, "fault"), str(error)
    elif isinstance(error, KeyboardInterrupt):
        kind = message = "interrupted"
    elif is_lost_contact(error):
        kind = "lost contact"
    trace = traceback.format_exc()
    return Complaint(rank, 0, kind, message, trace, steps_done(error), is_out_of_memory(error))
