"""Facts that a process has before it meets the others: its rank, the number of ranks, its device, how long it waits.

The launcher imports this file and `checks.py` before it starts the ranks. Neither imports an engine, which takes
seconds.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from shardwright.train.config import RunConfig
from shardwright.train.errors import UserError

COLLECTIVE_TIMEOUT = timedelta(minutes=10)
"""Time that a rank waits for the others before it gives them up. SHARDWRIGHT_TIMEOUT (seconds) replaces it."""


def under_launcher() -> bool:
    """Return whether this process is one rank of a job that torchrun, SLURM or our own launcher has started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def collective_timeout() -> timedelta:
    """Return the time to wait for other ranks. Raises UserError if SHARDWRIGHT_TIMEOUT is no valid time."""
    text = os.environ.get("SHARDWRIGHT_TIMEOUT")
    if not text:
        return COLLECTIVE_TIMEOUT
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 1e-3 <= seconds <= 1e9:  # The backends can count no others.
        raise UserError(f"SHARDWRIGHT_TIMEOUT: expected seconds from 0.001 to 1e9, found {text!r}")
    return timedelta(seconds=seconds)


def choose_device(run: RunConfig) -> str:
    """Return cpu or cuda. Raise UserError if the configuration has cuda and there is none."""
    if run.device == "cuda" and not torch.cuda.is_available():
        raise UserError("run.device: expected a CUDA device, found none; set run.device to cpu or auto")
    return "cuda" if run.device != "cpu" and torch.cuda.is_available() else "cpu"


def rank_and_size() -> tuple[int, int]:
    # One variable without the other proves nothing: some systems leave RANK behind.
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])) if under_launcher() else (0, 1)
