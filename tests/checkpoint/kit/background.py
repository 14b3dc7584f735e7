"""Code that tests of asynchronous saves share with the programs that they start."""

from __future__ import annotations

from typing import Any

import torch

import shardwright as sw


def values(number: float) -> dict[str, Any]:
    """A state of which each of two ranks writes one tensor: they are too large for the first rank to write both."""
    model = {"a": torch.full((600, 500), float(number)), "b": torch.full((500, 600), -float(number))}
    return {"model": model, "number": number}


def pid_of_writer(checkpoints: sw.AsyncCheckpoint) -> int:
    assert checkpoints._writer is not None
    return checkpoints._writer.pid
