"""Folders as Lightning's own strategies leave them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp


def write_folder(folder: Path, stored: dict[str, Any], others: dict[str, Any]) -> None:
    """Models and optimizers by torch's writer, and ``meta.pt``; all ranks call it."""
    dcp.save(stored, storage_writer=dcp.FileSystemWriter(folder))
    dist.barrier()
    if dist.get_rank() == 0:
        torch.save(others, folder / "meta.pt")
    dist.barrier()
