"""A slice of torch's table of operations with sharded parameters: ``make ops`` runs all of it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.engine.operations.report import HERE


@pytest.mark.extensive("a slice of torch's table")
def test_operations_are_equal_or_refused() -> None:
    """In a process of its own, from which ranks are forked before it has threads."""
    command = [sys.executable, "-m", "tests.engine.operations", "--slice", str(HERE / "slice.txt")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
