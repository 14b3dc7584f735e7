"""The code of docs/migration: the lines of examples/ports that a port changes."""

from __future__ import annotations

import difflib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PORTS = ROOT / "examples" / "ports"
#: By port: its page.
PAGES = {
    "accelerate": "accelerate", "accelerate_ddp": "accelerate", "ddp": "ddp", "deepspeed": "deepspeed",
    "distributed_config": "hf_trainer",
    "fabric": "fabric", "fsdp1": "fsdp1", "fsdp2": "fsdp2", "hf_trainer": "hf_trainer", "torchtitan": "torchtitan",
    "trl": "trl",
}  # fmt: skip


def changes(port: str) -> str:
    """A port as a difference: its changed lines, each with a line before and after it, without docstrings."""
    before, after = (code(PORTS / f"{port}_{when}.py") for when in ("before", "after"))
    lines = list(difflib.unified_diff(before, after, n=1, lineterm=""))[3:]
    return "\n".join(" ..." if line.startswith("@@") else line.rstrip() for line in lines).rstrip()


def code(program: Path) -> list[str]:
    """The lines after the docstring."""
    return program.read_text().partition('"""\n\n')[2].splitlines()
