"""The modules that a program imports: none that it does not use yet. Each program runs in a process of its own.

Seconds are measured by ``benchmarks/start.py``; here are the imports that cost them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parent.parent / "src"

ONE_RANK = """
import sys, tempfile
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
dist.init_process_group("gloo", rank=0, world_size=1, init_method="file://" + tempfile.mktemp())
mesh = init_device_mesh("cpu", (1,))
model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
def compiler():
    return "torch._dynamo" in sys.modules
"""

SHARD = """
import shardwright as sw
{before}
for unit in (model[0], model):
    sw.fully_shard(unit, mesh=mesh, layout="{layout}")
"""

#: What torch imports by itself when a DTensor is made, which is what FSDP2's parameters are.
DTENSOR = """
from torch.distributed.tensor import DTensor, Shard
DTensor.from_local(torch.zeros(2), mesh, [Shard(0)])
print(compiler())
"""

HIDDEN = """
from torch._dynamo import trace_rules
import shardwright.engine.unit.uses, shardwright.engine.comm.meeting, shardwright.engine.front.lending
hidden = [trace_rules.check_file(module.__file__).skipped for module in (
    sys.modules["shardwright.engine.unit.uses"],
    sys.modules["shardwright.engine.comm.meeting"],
    sys.modules["shardwright.engine.compat.autograd"],
    sys.modules["shardwright.engine.front.lending"],
)]
print(hidden)

x = torch.randn(3, 4)
expected = model(x)
compiled = torch.compile(model, backend="eager")(x)
print(bool((compiled == expected).all()))
compiled.sum().backward()
"""


def lines(*code: str) -> list[str]:
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    done = subprocess.run(
        [sys.executable, "-c", "".join(code)], capture_output=True, text=True, timeout=180, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.extensive("a process for each call")
def test_sharding_imports_the_compiler_no_sooner_than_torch() -> None:
    """In ragged layouts, which make no DTensors, forward and backward do not either."""
    step = "\nmodel(torch.randn(3, 4)).sum().backward()\nprint(compiler())"
    assert (
        lines(ONE_RANK, SHARD.format(before="", layout="ragged"), "print(compiler())", step) == ["False"] * 2
    )
    by_torch = lines(ONE_RANK, DTENSOR)
    assert lines(ONE_RANK, SHARD.format(before="", layout="per_parameter"), "print(compiler())") == by_torch


@pytest.mark.extensive("a process for each case")
@pytest.mark.parametrize("layout", ["ragged", "per_parameter"])
@pytest.mark.parametrize("before", ["", "import torch._dynamo"])
def test_the_compiler_skips_the_engine_whenever_it_is_imported(layout: str, before: str) -> None:
    *_, hidden, equal = lines(ONE_RANK, SHARD.format(before=before, layout=layout), HIDDEN)
    assert hidden == "[True, True, True, False]"  # it must see into the last
    assert equal == "True"


def test_tokens_are_read_without_the_engine() -> None:
    names = ("shardwright.engine.front.api", "torch.distributed.fsdp", "torch.distributed.checkpoint")
    code = f"import sys, shardwright.train.data.dataset; print([name for name in {names!r} if name in sys.modules])"
    assert lines(code) == ["[]"]


@pytest.mark.extensive("a process for each program")
def test_imports_leave_out_what_only_some_programs_use() -> None:
    names = (
        "torch._dynamo",
        "torch.distributed.checkpoint",
        "numpy.testing",
        "matplotlib",
        "pydantic",
        "psutil",
    )
    code = f"import sys, shardwright as sw; sw.fully_shard; print([name for name in {names!r} if name in sys.modules])"
    assert lines(code) == ["[]"]
    assert lines("import sys, shardwright; print('torch' in sys.modules)") == ["False"]
