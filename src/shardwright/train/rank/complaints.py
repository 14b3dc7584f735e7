"""A rank turns the error that ended it into a complaint, whose kind says whether all ranks met the error."""

from __future__ import annotations

import traceback

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from shardwright.train.errors import JobError, UserError, steps_done
from shardwright.train.launch.job_end import Complaint, Kind

LOST_CONTACT = (
    "Connection closed",
    "Connection reset",
    "Broken pipe",
    "imed out",
    "timeout",
    "[c10d]",
    "gloo/",
)
"""Parts of the messages of collectives that fail inside autograd or an engine. There no frame shows that a collective
failed, and gloo has no exception class of its own."""
KINDS: dict[int, Kind] = {UserError.MISTAKE: "user", UserError.PASSING: "passing"}
"""Kinds by the status of an error that all ranks meet; "nonfinite" for others."""


def complaint_of(error: BaseException, rank: int) -> Complaint:
    kind: Kind = "error"
    message = f"{type(error).__name__}: {error}"
    if isinstance(error, JobError):
        kind, message = KINDS.get(error.status, "nonfinite"), str(error)
    elif isinstance(error, KeyboardInterrupt):
        kind = message = "interrupted"
    elif _is_lost_contact(error):
        kind = "lost contact"
    return Complaint(rank, 0, kind, message, traceback.format_exc(), steps_done(error))


def _is_lost_contact(error: BaseException) -> bool:
    """Return whether this is a collective that failed because of another rank."""
    if isinstance(error, dist.DistError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    return frames[-1].filename == c10d.__file__ or any(sign in str(error) for sign in LOST_CONTACT)
