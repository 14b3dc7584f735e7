"""How Fabric starts the processes itself: the example as its first lines say, and functions in forked processes."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lightning") is None, reason="needs the extra lightning"
)

ROOT = Path(__file__).parents[2]

FORKED = """
import torch
from lightning.fabric import Fabric
from torch import nn
from shardwright.integrations.lightning import ShardwrightStrategy

def train(fabric, factor):
    fabric.seed_everything(0, verbose=False)
    with fabric.init_module(empty_init=True):
        model = nn.Linear(4, 3)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=1.0))
    fabric.backward(model(torch.ones(1, 4)).sum() * factor * (fabric.global_rank + 1))
    optimizer.step()
    return model.module.weight.detach().full_tensor().tolist()

if __name__ == "__main__":
    fabric = Fabric(accelerator="cpu", devices=2, strategy=ShardwrightStrategy(start_method="fork"))
    moved = fabric.launch(train, 2.0)
    torch.manual_seed(0)
    assert torch.equal(torch.tensor(moved), nn.Linear(4, 3).weight - 3.0)
    print("moved", fabric.world_size)
"""


def run(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.extensive("the example in processes of its own")
def test_the_example_learns_and_resumes(tmp_path: Path) -> None:
    """One command: Fabric runs the script a second time for the second rank."""
    checkpoint = tmp_path / "checkpoint"
    arguments = ["examples/fabric_pretrain.py", "--checkpoint", str(checkpoint)]
    first = run(*arguments, "--steps", "40")
    losses = [float(value) for value in re.findall(r"loss ([\d.]+)", first)]
    assert 5 < losses[0] < 7 and losses[-1] < 0.7 * losses[0]
    assert (checkpoint / "__1_0.distcp").exists()  # the second rank's part
    assert "step 41:" in run(*arguments, "--steps", "41", "--resume")


@pytest.mark.extensive("processes of its own")
def test_functions_run_in_forked_processes(tmp_path: Path) -> None:
    script = tmp_path / "forked.py"
    script.write_text(FORKED)
    assert "moved 2" in run(str(script))
