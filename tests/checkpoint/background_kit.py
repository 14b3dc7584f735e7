"""What tests of asynchronous saves share with the programs that they start."""

from __future__ import annotations

from typing import Any

import torch

import shardwright as sw


def values(number: float) -> dict[str, Any]:
    """A state of which each of two ranks writes one tensor."""
    return {
        "a": torch.full((50, 40), float(number)),
        "b": torch.full((40, 50), -float(number)),
        "number": number,
    }


def pid_of_writer(checkpoints: sw.AsyncCheckpoint) -> int:
    assert checkpoints._writer is not None
    return checkpoints._writer.pid
