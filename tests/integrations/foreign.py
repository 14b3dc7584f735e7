"""Folders as other writers leave them: Lightning's strategies, and this strategy before it wrote ``index.json``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from shardwright.checkpoint.format.digests import as_json, digest_of, sealed


def write_folder(folder: Path, stored: dict[str, Any], others: dict[str, Any], checksums: bool) -> None:
    """Models and optimizers by torch's writer, and ``meta.pt``; all ranks call it."""
    dcp.save(stored, storage_writer=dcp.FileSystemWriter(folder))
    dist.barrier()
    if dist.get_rank() == 0:
        torch.save(others, folder / "meta.pt")
        if checksums:
            digests = {file.name: digest_of(file) for file in folder.iterdir()}
            (folder / "checksums.json").write_text(sealed({"files": as_json(digests)}))
    dist.barrier()
