"""Where a run stands, and the folders of its checkpoints. Nothing here reads a checkpoint."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

LAST_BYTES = 1 << 16
"""The end of a file of metrics that certainly has a whole line."""


@dataclass(frozen=True)
class Position:
    """Where a run stands: optimizer steps done, and samples seen, which is all the data order needs."""

    step: int
    samples: int


def step_folder(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step-{step}"


def saved_steps(checkpoints: Path) -> list[int]:
    """Steps that have a folder, newest first; whole or not."""
    names = [path.name for path in checkpoints.iterdir() if path.is_dir()] if checkpoints.is_dir() else []
    return sorted(
        (int(match[1]) for name in names if (match := re.fullmatch(r"step-(\d+)", name))), reverse=True
    )


def recorded_step(metrics_file: Path) -> int:
    """The step of the last line of metrics.jsonl: the steps that a run has done. 0 if it has none."""
    if not os.path.isfile(metrics_file):
        return 0
    try:
        with open(metrics_file, "rb") as stream:
            stream.seek(-min(LAST_BYTES, os.path.getsize(metrics_file)), os.SEEK_END)
            # After the last line end there is nothing, or half a line.
            lines = stream.read().split(b"\n")[:-1]
    except OSError:
        return 0
    for line in reversed(lines):
        try:
            step = json.loads(line)["step"]
        except (ValueError, LookupError, TypeError):
            continue
        if type(step) is int:
            return step
    return 0
