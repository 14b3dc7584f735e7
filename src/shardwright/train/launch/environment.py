"""Facts about the job that a process has before it meets the others: launcher, rank, ranks, device, timeout.

The launcher imports this file and `parallel/checks.py` before it starts the ranks. Neither imports an engine, which
takes seconds.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import shardwright
from shardwright.train.config import Config
from shardwright.train.errors import UserError

COLLECTIVE_TIMEOUT = timedelta(minutes=10)
"""Time that a rank waits for the others before it gives them up. SHARDWRIGHT_TIMEOUT (seconds) replaces it."""
SPEAKING = "first rank speaks"
"""Key in the launcher's store: from then on the first rank says what is being done at the start."""
RUN_ID = "TORCHELASTIC_RUN_ID"
"""A variable that torchrun sets for the ranks."""
FOLDER_VARIABLE = "SHARDWRIGHT_RUN_FOLDER"
LAUNCHER_VARIABLE = "SHARDWRIGHT_LAUNCHER"
ATTEMPT_VARIABLE = "SHARDWRIGHT_ATTEMPT"
"""1 for the first start of the ranks by our launcher, one more after each restart."""


def under_launcher() -> bool:
    """Return whether this process is one rank of a job that torchrun, SLURM or our own launcher has started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def under_torchrun() -> bool:
    """Return whether torchrun has started this process."""
    return RUN_ID in os.environ


def attempt_of_launcher() -> int:
    """The number of this start of the ranks by our launcher. 1 without it."""
    return int(os.environ.get(ATTEMPT_VARIABLE, "1"))


def check_environment() -> None:
    """Refuse variables of a launcher, or of ours, that no job can run with. Needs no process group."""
    collective_timeout()
    if not under_launcher():
        return
    size = _whole_number("WORLD_SIZE", 1)
    _whole_number("RANK", 0, size - 1)
    _whole_number("LOCAL_RANK", 0)
    _whole_number("LOCAL_WORLD_SIZE", 1)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            raise UserError(
                f"{name}: expected a value together with RANK and WORLD_SIZE, found none; set it, or unset these two"
            )
    _whole_number("MASTER_PORT", 0, 65535)


def _whole_number(name: str, least: int, most: int | None = None) -> int:
    text = os.environ.get(name, str(least))
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least or (most is not None and value > most):
        limits = f">= {least}" if most is None else f"from {least} to {most}"
        raise UserError(
            f"{name}: expected an integer {limits}, found {text!r}; unset it to train without a launcher"
        )
    return value


def collective_timeout() -> timedelta:
    """The time to wait for other ranks. Raises UserError if SHARDWRIGHT_TIMEOUT is no valid time."""
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


def choose_device(config: Config) -> str:
    """cpu or cuda. Raises UserError if the configuration has cuda and there is none."""
    if config.run.device == "cuda" and not torch.cuda.is_available():
        raise UserError("run.device: expected a CUDA device, found none; set run.device to cpu or auto")
    return "cuda" if config.run.device != "cpu" and torch.cuda.is_available() else "cpu"


def rank_and_size() -> tuple[int, int]:
    # One variable without the other proves nothing: some systems leave RANK behind.
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])) if under_launcher() else (0, 1)


def path_to_ourselves() -> dict[str, str]:
    """A PYTHONPATH with the folder of this package, if this process found it in its working folder, in which processes
    that it starts do not look."""
    folder = str(Path(shardwright.__file__).resolve().parents[1])
    elsewhere = [path for path in sys.path if path and os.path.abspath(path) != os.getcwd()]
    if folder in {os.path.realpath(path) for path in elsewhere} or folder != os.path.realpath(os.getcwd()):
        return {}
    return {"PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), folder]))}
