#!/usr/bin/env python3
"""Savings and costs of compressed gradients and encoded gathers: bytes per step, error, loss after some training.

    python benchmarks/compression.py [--ranks 2] [--steps 100] [--strategy zero3] [--only TEXT] [CONFIG.toml]

For each kind of compression it trains the demo model again, from the same seed on the same text. It prints the bytes
that a rank passes to collectives in a step, relative to the first row (uncompressed). It prints the relative error of
the first step's gradient (norm of the difference over norm), and the validation loss at the end. ``--only`` runs the
first row and rows whose names contain a text. CPU ranks over gloo, one thread each.
"""

from __future__ import annotations

import argparse
import atexit
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.comm_hooks import MXFP8, BlockwiseFP8, Cast, Compressed, Int8Blocks, PowerSGD
from shardwright.train.config import load_config
from shardwright.train.data.dataset import load_dataset
from shardwright.train.launch.signals import StopRequest
from shardwright.train.parallel.world import World
from shardwright.train.step.evaluation import validate
from shardwright.train.step.trainer import Trainer

EXAMPLE = Path(__file__).parents[1] / "examples" / "llama_debug.toml"


class Way(NamedTuple):
    """A hook for gradients, a codec of weights for gathers, and the trainer's ``parallel.layout``."""

    hook: Callable[[], Any] = lambda: None
    codec: Any = None
    layout: str = "per_parameter"


WAYS = {
    "as they are": Way(),
    "gradients bfloat16": Way(lambda: Compressed(Cast(torch.bfloat16))),
    "gradients int8": Way(lambda: Compressed(Int8Blocks(256))),
    "gradients int8, errors fed back": Way(lambda: Compressed(Int8Blocks(256), error_feedback=True)),
    "gradients PowerSGD(4)": Way(lambda: PowerSGD(4)),
    "gradients PowerSGD(16)": Way(lambda: PowerSGD(16)),
    "weights int8": Way(codec=Int8Blocks(256)),
    "weights MXFP8": Way(codec=MXFP8()),
    "weights as they are, 128 rows": Way(layout="128"),
    "weights blockwise FP8, 128 rows": Way(codec=BlockwiseFP8(128), layout="128"),
    "both int8": Way(lambda: Compressed(Int8Blocks(256), error_feedback=True), Int8Blocks(256)),
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
    first: torch.Tensor | None = None
    sent_first = 0
    for name, way in WAYS.items():
        if first is not None and args.only not in name:
            continue
        settings = [("train.steps", str(args.steps)), ("parallel.strategy", args.strategy)]
        config = load_config(args.config, [*settings, ("parallel.layout", way.layout)])
        world = World.of(config.parallel, rank, args.ranks, torch.device("cpu"))
        trainer = Trainer(config, world, load_dataset(config.for_data))
        model: Any = trainer.model
        model.set_gradient_comm_hook(way.hook())
        model.set_all_gather_codec(way.codec)
        gradients: list[torch.Tensor] = []
        handle = trainer.optimizer.register_step_pre_hook(partial(keep_gradients, model, gradients))
        with StopRequest() as stop:
            trainer.train_step(stop)
            handle.remove()
            with Sent() as sent:
                trainer.train_step(stop)
            for _ in range(args.steps - 2):
                trainer.train_step(stop)
        gradient = torch.cat(gradients)
        if first is None:
            first, sent_first = gradient, sent.nbytes
        loss = validate(trainer).loss
        if rank == 0:
            ratio, error = sent.nbytes / sent_first, float((gradient - first).norm() / first.norm())
            print(
                f"{name:<34} bytes {ratio:5.2f}   gradient off by {error:8.1e}   loss {loss:.4f}", flush=True
            )
    dist.barrier()


def keep_gradients(model: torch.nn.Module, kept: list[torch.Tensor], *_: Any) -> None:
    """Keep the whole gradients, which do not depend on the layout. Every rank must call it."""
    kept += [p.grad.full_tensor().flatten() for p in model.parameters() if p.grad is not None]  # type: ignore[attr-defined]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path, nargs="?", default=EXAMPLE)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--only", default="", metavar="TEXT")
    parser.add_argument("--strategy", default="zero3", choices=("zero3", "zero2", "zero1", "ddp"))
    args = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (args, folder), nprocs=args.ranks)


if __name__ == "__main__":
    main()
