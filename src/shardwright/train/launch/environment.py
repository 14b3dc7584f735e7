"""The variables by which a launcher and its ranks know of each other: torchrun's and ours.

The facts that a rank reads from them are in `parallel/rank_facts.py`. Nothing here starts a process.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import shardwright
from shardwright.train.errors import UserError
from shardwright.train.parallel.rank_facts import collective_timeout, under_launcher

SPEAKING = "first rank speaks"
"""Key in the launcher's store: from then on the first rank says what is being done at the start."""
RUN_ID = "TORCHELASTIC_RUN_ID"
"""A variable that torchrun sets for the ranks."""
FOLDER_VARIABLE = "SHARDWRIGHT_RUN_FOLDER"
LAUNCHER_VARIABLE = "SHARDWRIGHT_LAUNCHER"
ATTEMPT_VARIABLE = "SHARDWRIGHT_ATTEMPT"
"""1 for the first start of the ranks by our launcher, one more after each restart."""


def under_torchrun() -> bool:
    """Return whether torchrun has started this process."""
    return RUN_ID in os.environ


def attempt_of_launcher() -> int:
    """Return the number of this start of the ranks by our launcher. 1 without it."""
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


def path_to_ourselves() -> dict[str, str]:
    """Return a PYTHONPATH with the folder of this package, if this process found it in its working folder, in which
    processes that it starts do not look."""
    folder = str(Path(shardwright.__file__).resolve().parents[1])
    elsewhere = [path for path in sys.path if path and os.path.abspath(path) != os.getcwd()]
    if folder in {os.path.realpath(path) for path in elsewhere} or folder != os.path.realpath(os.getcwd()):
        return {}
    return {"PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), folder]))}
