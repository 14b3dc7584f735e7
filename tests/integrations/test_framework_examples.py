"""The programs of examples/frameworks say which engine sharded the model, and train as with torch's FSDP2."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "frameworks"
#: By program: the package that it needs, and the line with shardwright and with torch.
PROGRAMS = {
    "distributed_config.py": ("transformers", "sharded by shardwright", "sharded by torch's FSDP2"),
    "trl_sft.py": ("trl", "sharded by shardwright", "sharded by torch's FSDP2"),
    # On the CPU Accelerate takes torch's DDP, whatever the plugin says.
    "accelerate_loop.py": ("accelerate", "sharded by torch's DDP", "sharded by torch's DDP"),
}


def printed(program: str, engine: str) -> list[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(FOLDER / program)],
        env={**os.environ, "ENGINE": engine, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return [line for line in done.stdout.splitlines() if line.startswith(("sharded", "step", "saved"))]


@pytest.mark.extensive("frameworks in processes of their own")
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_engine_is_named_and_losses_are_those_of_fsdp2(program: str) -> None:
    package, ours, theirs = PROGRAMS[program]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}")
    mine, expected = printed(program, "shardwright"), printed(program, "torch")
    assert mine[0].startswith(ours), mine[0]
    assert expected[0].startswith(theirs), expected[0]
    assert len(mine) == len(expected) > 4
    for one, other in zip(mine[1:], expected[1:], strict=True):
        assert one.split()[:-1] == other.split()[:-1]
        assert one == other or abs(float(one.split()[-1]) - float(other.split()[-1])) < 1e-4
    losses = [float(line.split()[-1]) for line in mine if line.startswith("step")]
    assert losses[-1] < losses[0]
