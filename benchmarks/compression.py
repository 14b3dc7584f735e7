#!/usr/bin/env python3
"""What compressed gradients and encoded gathers save and cost: bytes per step, error, loss after some training.

    python benchmarks/compression.py [--ranks 2] [--steps 100] [--strategy zero3] [CONFIG.toml]

For each kind of compression it trains the demo model again, from the same seed on the same text. It prints the bytes
that a rank passes to collectives in a step, relative to the first row (uncompressed). It prints the relative error of
the first step's gradient (norm of the difference over norm), and the validation loss at the end. CPU ranks over gloo,
one thread each.
"""

from __future__ import annotations

import argparse
import atexit
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.comm_hooks import Cast, Compressed, Int8Blocks, PowerSGD
from shardwright.train.config import load_config
from shardwright.train.data.corpus import load_corpus
from shardwright.train.stop import StopRequest
from shardwright.train.trainer import Trainer
from shardwright.train.world import World, make_mesh

EXAMPLE = Path(__file__).parents[1] / "examples" / "llama_debug.toml"
#: By name: what carries gradients, and what encodes weights for gathers.
WAYS: dict[str, tuple[Callable[[], Any], Any]] = {
    "as they are": (lambda: None, None),
    "gradients bfloat16": (lambda: Compressed(Cast(torch.bfloat16)), None),
    "gradients int8": (lambda: Compressed(Int8Blocks(256)), None),
    "gradients int8, errors fed back": (lambda: Compressed(Int8Blocks(256), error_feedback=True), None),
    "gradients PowerSGD(4)": (lambda: PowerSGD(4), None),
    "gradients PowerSGD(16)": (lambda: PowerSGD(16), None),
    "weights int8": (lambda: None, Int8Blocks(256)),
    "both int8": (lambda: Compressed(Int8Blocks(256), error_feedback=True), Int8Blocks(256)),
}


class Sent(TorchDispatchMode):
    """Bytes of the inputs of collectives that pass torch's dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        given = {"c10d::alltoall_base_": 1, "c10d::_allgather_base_": 1, "c10d::allreduce_": 0}.get(name)
        if given is not None:
            tensors = args[given]
            self.nbytes += sum(t.nbytes for t in (tensors if isinstance(tensors, list) else [tensors]))
        return func(*args, **(kwargs or {}))


def run(rank: int, args: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{folder}/store", args.ranks), rank=rank, world_size=args.ranks
    )
    atexit.register(dist.destroy_process_group)
    settings = [("train.steps", str(args.steps)), ("parallel.strategy", args.strategy)]
    config = load_config(args.config, settings)
    corpus = load_corpus(config.data)
    first: torch.Tensor | None = None
    sent_first = 0
    for name, (hook, codec) in WAYS.items():
        world = World(rank, args.ranks, torch.device("cpu"), make_mesh(config.parallel, "cpu", args.ranks))
        trainer = Trainer(config, world, corpus)
        model: Any = trainer.model
        model.set_gradient_comm_hook(hook())
        model.set_all_gather_codec(codec)
        model(torch.zeros(1, 1, dtype=torch.int64))  # what happens once
        with Sent() as sent, StopRequest() as stop:
            gradients: list[torch.Tensor] = []
            handle = trainer.optimizer.register_step_pre_hook(partial(keep_gradients, gradients))
            trainer.train_step(stop)
            handle.remove()
        with StopRequest() as stop:
            for _ in range(args.steps - 1):
                trainer.train_step(stop)
        gradient = gradients[0]
        if first is None:
            first, sent_first = gradient, sent.nbytes
        off = torch.stack([(gradient - first).square().sum(), first.square().sum()])
        dist.all_reduce(off)
        loss = trainer.validate()
        if rank == 0:
            ratio, error = sent.nbytes / sent_first, float((off[0] / off[1]).sqrt())
            print(
                f"{name:<34} bytes {ratio:5.2f}   gradient off by {error:8.1e}   loss {loss:.4f}", flush=True
            )
    dist.barrier()


def keep_gradients(kept: list[torch.Tensor], optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """In a hook of a step the optimizer's groups hold local tensors."""
    local = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    kept.append(torch.cat([p.grad.flatten().clone() for p in local]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path, nargs="?", default=EXAMPLE)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--strategy", default="zero3", choices=("zero3", "zero2", "zero1", "ddp"))
    args = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (args, folder), nprocs=args.ranks)


if __name__ == "__main__":
    main()
