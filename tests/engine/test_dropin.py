"""Programs written for torch's FSDP2 run with one word changed, and print the same digits."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support import multirank

FOLDER = Path(__file__).parents[2] / "examples" / "fsdp2_dropin"
PROGRAMS = sorted(path.name for path in FOLDER.glob("*.py") if path.name != "task.py")
assert PROGRAMS


def printed(source: str, name: str) -> str:
    """The output of a program on this rank. The process group is there already, and stays."""
    output = io.StringIO()
    begin, end = dist.init_process_group, dist.destroy_process_group
    sys.path.insert(0, str(FOLDER))
    dist.init_process_group = dist.destroy_process_group = lambda *_: None  # type: ignore[assignment]
    try:
        with contextlib.redirect_stdout(output):
            exec(compile(source, name, "exec"), {"__name__": "__main__"})
    finally:
        dist.init_process_group, dist.destroy_process_group = begin, end
        sys.path.remove(str(FOLDER))
    return output.getvalue()


@pytest.mark.extensive("each program written for FSDP2")
@multirank(2)
@pytest.mark.parametrize("program", PROGRAMS)
def test_losses_are_those_of_fsdp2(rank: int, world_size: int, program: str) -> None:
    source = (FOLDER / program).read_text()
    ours = source.replace("torch.distributed.fsdp", "shardwright")
    assert ours.count("shardwright") == 1 and "shardwright" not in source
    everywhere = re.sub(
        r"torch\.distributed\.(_composable\.)?fsdp", "shardwright", source
    )  # as the README says
    expected, found = printed(source, program), printed(ours, program)
    assert found == expected
    if everywhere != ours:
        assert printed(everywhere, program) == expected
    losses = [float(line.split()[-1]) for line in found.splitlines() if line.startswith("step")]
    assert not losses if rank else losses[-1] < losses[0]
