#!/usr/bin/env python3
"""How long programs take to begin: imports, help, ``fully_shard``, the trainer's first step; beside a peer each.

    python benchmarks/start.py [--rounds 5] [--only SUBSTRING]

Every figure is of a fresh process, on one rank over gloo, ours and the peer's in turns. Prints the machine, the
versions, medians in seconds and their ratio, which is what to compare. Peers: torch's FSDP2; torchrun for help;
Lightning Fabric without sharding for the trainer, whose row is left out where lightning is missing.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
FSDP2 = "torch.distributed.fsdp"

IMPORT = """
import time, torch
begun = time.perf_counter()
from {library} import fully_shard, FSDPModule, MixedPrecisionPolicy, CPUOffloadPolicy
print(time.perf_counter() - begun)
"""

# The second model shows what is left when everything was imported.
SHARD = """
import atexit, tempfile, time, torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from {library} import fully_shard
dist.init_process_group("gloo", rank=0, world_size=1, init_method="file://" + tempfile.mktemp())
atexit.register(dist.destroy_process_group)
mesh = init_device_mesh("cpu", (1,))
for count in range(1 + {second}):
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(80)])
    begun = time.perf_counter()
    for unit in [*model, model]:
        fully_shard(unit, mesh=mesh{options})
    took = time.perf_counter() - begun
print(took)
"""

FABRIC = """
import torch
from lightning.fabric import Fabric
from shardwright.train.models.native.llama import Llama
from shardwright.train.config.shapes.presets import PRESETS
fabric = Fabric(accelerator="cpu", devices=1)
fabric.launch()
fabric.seed_everything(0)
model = Llama(PRESETS["debug"])
model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
for half in range(2):
    tokens = torch.randint(0, 256, (4, 257))
    loss = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    fabric.backward(loss / 2)
optimizer.step()
print("step 1/1", loss.item(), flush=True)
"""


def child(*command: str) -> subprocess.Popen[str]:
    source = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
    environment = os.environ | {"PYTHONPATH": source, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}
    return subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )


def printed(code: str) -> Callable[[], float]:
    """Seconds that a program measures itself and prints last."""

    def measure() -> float:
        output, _ = child("-c", code).communicate()
        return float(output.splitlines()[-1])

    return measure


def whole(*command: str) -> Callable[[], float]:
    """Seconds from the start of a program to its end."""

    def measure() -> float:
        begun = time.perf_counter()
        process = child(*command)
        output, _ = process.communicate()
        if process.returncode:
            raise RuntimeError(f"{command} ended with status {process.returncode}:\n{output}")
        return time.perf_counter() - begun

    return measure


def until(text: str, *command: str) -> Callable[[], float]:
    """Seconds from the start of a program to its first line that begins so."""

    def measure() -> float:
        begun = time.perf_counter()
        process = child(*command)
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith(text):
                took = time.perf_counter() - begun
                process.communicate()
                return took
        raise RuntimeError(f"{command} printed no line that begins with {text!r}:\n{''.join(lines)}")

    return measure


def rows(folder: Path) -> dict[str, tuple[Callable[[], float], Callable[[], float]]]:
    """Name -> (ours, the peer's)."""
    torchrun = whole("-m", "torch.distributed.run", "--help")
    steps = 0

    def first_step() -> float:
        nonlocal steps
        steps += 1
        job = str(ROOT / "examples" / "llama_debug.toml")
        options = ["--train.steps", "1", "--run.sample_tokens", "0", "--run.dir", str(folder / f"run{steps}")]
        return until("step 1/", "-m", "shardwright", "train", job, "--nproc", "1", *options)()

    def shard(library: str, options: str = "", second: int = 0) -> Callable[[], float]:
        return printed(SHARD.format(library=library, options=options, second=second))

    ragged = ", layout='ragged'"
    found = {
        "import, after torch": tuple(printed(IMPORT.format(library=name)) for name in ("shardwright", FSDP2)),
        "import, all of the process": tuple(
            whole("-c", IMPORT.format(library=name)) for name in ("shardwright", FSDP2)
        ),
        "--help, beside torchrun's": (whole("-m", "shardwright", "--help"), torchrun),
        "train --help, beside torchrun's": (whole("-m", "shardwright", "train", "--help"), torchrun),
        "fully_shard, 80 units": (shard("shardwright"), shard(FSDP2)),
        "fully_shard, 80 units, ragged": (shard("shardwright", ragged), shard(FSDP2)),
        "fully_shard, a second model": (shard("shardwright", second=1), shard(FSDP2, second=1)),
        "fully_shard, a second model, ragged": (shard("shardwright", ragged, 1), shard(FSDP2, second=1)),
    }
    if importlib.util.find_spec("lightning") is not None:
        found["the first step of training, beside plain Fabric"] = (
            first_step,
            until("step 1/", "-c", FABRIC),
        )
    return found  # type: ignore[return-value]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="rows whose name has this")
    args = parser.parse_args()
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"torch {torch.__version__}; medians of {args.rounds} processes, seconds"
    )
    print(f"{'':48s}{'ours':>8s}{'peer':>8s}{'ratio':>8s}")
    with tempfile.TemporaryDirectory() as folder:
        for name, measures in rows(Path(folder)).items():
            if args.only not in name:
                continue
            times: tuple[list[float], list[float]] = ([], [])
            for round_ in range(args.rounds + 1):
                for measure, taken in zip(measures, times, strict=True):
                    seconds = measure()
                    if round_:  # the first round reads files that were not in memory yet
                        taken.append(seconds)
            ours, peer = map(statistics.median, times)
            print(f"{name:48s}{ours:8.3f}{peer:8.3f}{ours / peer:8.2f}", flush=True)


if __name__ == "__main__":
    main()
