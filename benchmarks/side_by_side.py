#!/usr/bin/env python3
"""FSDP1, FSDP2 and shardwright on one recipe: do the losses agree, and what does each communicate and hold?

    python benchmarks/side_by_side.py [--steps 20] [CONFIG.toml]

The demo Llama in bfloat16 with float32 reduction: over 2 ranks with each kind of activation checkpointing, and over 4
ranks with tensor and sequence parallelism (2 x 2). Every run starts from the same seed on the same text. Columns: the
largest relative difference of a step's loss from FSDP2's; collectives of one step, by kind, and bytes handed to them;
the most bytes alive in that step beyond what is there between steps, counted over all storages. CPU ranks over gloo,
one thread each. Everything is counted, nothing timed.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardwright.train.config import load_config
from shardwright.train.data.dataset import load_dataset
from shardwright.train.launch.signals import StopRequest
from shardwright.train.parallel.world import World
from shardwright.train.step.trainer import Trainer

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from tests.support.storages import Storages  # noqa: E402 - a tool of the tests, found from the root

EXAMPLE = ROOT / "examples" / "llama_debug.toml"
#: Collectives by the operator that passes torch's dispatcher.
KINDS = {
    "all-gather": ("allgather", "all_gather"),
    "reduce-scatter": ("reduce_scatter", "alltoall_base"),
    "all-reduce": ("allreduce", "all_reduce"),
}
ENGINES = {2: ("fsdp2", "fsdp1", "shardwright"), 4: ("fsdp2", "shardwright")}
MODES = {2: ("none", "full", "ops"), 4: ("none", "full")}


class Collectives(TorchDispatchMode):
    """How many collectives of each kind are called inside, and the bytes of their inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, _, name = func._schema.name.partition("::")
        name = name.lstrip("_")
        if space in ("c10d", "_c10d_functional"):
            kind = next((k for k, names in KINDS.items() if name.startswith(names)), None)
            if kind is not None:
                self.count[kind] += 1
                inputs = [t for t in tree_leaves(args) if isinstance(t, torch.Tensor)]
                self.nbytes += (
                    min(t.nbytes for t in inputs)
                    if kind != "reduce-scatter"
                    else max(t.nbytes for t in inputs)
                )
        return func(*args, **(kwargs or {}))


def run(rank: int, ranks: int, args: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{folder}/{ranks}", ranks), rank=rank, world_size=ranks
    )
    atexit.register(dist.destroy_process_group)
    for mode in MODES[ranks]:
        reference: list[float] = []
        for engine in ENGINES[ranks]:
            settings = {
                "train.steps": args.steps,
                "train.global_batch": 16,
                "parallel.engine": engine,
                "parallel.param_dtype": "bfloat16",
                "activations.checkpoint": mode,
                "parallel.tensor": ranks // 2,
            }
            config = load_config(args.config, [(key, str(value)) for key, value in settings.items()])
            world = World.of(config.parallel, rank, ranks, torch.device("cpu"))
            trainer = Trainer(config, world, load_dataset(config.for_data))
            losses = []
            with StopRequest() as stop:
                for _ in range(args.steps - 1):
                    losses.append(trainer.train_step(stop).loss)
                gc.collect()
                with Storages(lambda frame: "step") as storages:
                    for tensor in (*trainer.model.parameters(), *trainer.model.buffers()):
                        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
                        storages.know(local.untyped_storage())
                    storages.settle()
                    storages.begin()
                    with Collectives() as seen:
                        losses.append(trainer.train_step(stop).loss)
            reference = reference or losses
            off = max(abs(a - b) / b for a, b in zip(losses, reference, strict=True))
            if rank == 0:
                counts = "  ".join(f"{seen.count[kind]:3} {kind}" for kind in KINDS)
                print(
                    f"{ranks} ranks{', tensor 2' if ranks == 4 else ''}  {mode:5} {engine:12} off {off:.1e}  {counts}  "
                    f"{seen.nbytes / 2**20:6.2f} MiB sent  {storages.peak.nbytes / 2**20:6.2f} MiB at most",
                    flush=True,
                )
            del trainer
    dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path, nargs="?", default=EXAMPLE)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        for ranks in ENGINES:
            mp.spawn(run, (ranks, args, folder), nprocs=ranks)


if __name__ == "__main__":
    main()
