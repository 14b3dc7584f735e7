"""Runs a script inside a rank of the pool, which saves the seconds that torchrun and an interpreter for each rank take.

That the commands of the README and of docs run as they stand is tested elsewhere, with torchrun.
"""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
import tempfile
from pathlib import Path

import pytest
import torch.distributed as dist

__all__ = ["printed_by"]


def printed_by(script: Path, *arguments: str | Path, scratch: Path) -> str:
    """The output of the script on this rank. The process group is there before, and stays."""
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(sys, "argv", [str(script), *map(str, arguments)])
        patch.setattr(tempfile, "tempdir", str(scratch))
        patch.setattr(dist, "init_process_group", lambda *_, **__: None)
        patch.setattr(dist, "destroy_process_group", lambda: None)
        patch.setenv("WORLD_SIZE", str(dist.get_world_size()))
        patch.setenv("RANK", str(dist.get_rank()))
        runpy.run_path(str(script), run_name="__main__")
    return printed.getvalue()
