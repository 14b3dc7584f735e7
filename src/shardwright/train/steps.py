"""Where a run stands, and the folders of its checkpoints. Nothing here reads a checkpoint."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path


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
