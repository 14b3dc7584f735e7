#!/usr/bin/env python3
"""How long ``sw.stream_weights`` takes to hand a model's weights over, beside the ways without it.

    python benchmarks/stream_weights.py [--ranks 2] [--dim 512] [--layers 8] [--rounds 5] [--bucket "64 MiB"]

A Llama in float32 is sharded over CPU ranks (gloo, one thread each). After every step its weights must reach a reader
in bfloat16. Each round measures every way once, in another order:

- here: stream_weights to all ranks; beside full_tensor() of each parameter, converted;
- another process: stream_weights through shared memory, and to a process group, each loaded into a plain model by the
  reader; beside save_pretrained into a folder (on /dev/shm where there is one) and load_pretrained by the reader.

Seconds are those of the slowest rank, the reader included. The table has medians, and of the rounds' ratios the median
and the range.
"""

from __future__ import annotations

import argparse
import atexit
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh

import shardwright as sw
from shardwright.train.config.shapes.presets import LlamaConfig
from shardwright.train.models import hugging_face
from shardwright.train.models.native.llama import Llama

DTYPE = torch.bfloat16


def shape_of(args: argparse.Namespace) -> LlamaConfig:
    return LlamaConfig(
        dim=args.dim,
        n_layers=args.layers,
        n_heads=8,
        n_kv_heads=4,
        ffn_dim=4 * args.dim,
        vocab_size=16_384,
        max_seq_len=256,
    )


def run(rank: int, args: argparse.Namespace, folder: str, layout: str) -> None:
    """The last rank is the reader, the others train."""
    torch.set_num_threads(1)
    world, trains = args.ranks + 1, rank < args.ranks
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{folder}/{layout}", world), rank=rank, world_size=world
    )
    atexit.register(dist.destroy_process_group)
    mesh = DeviceMesh("cpu", list(range(args.ranks)))
    group = dist.new_group([0, args.ranks])
    shape = shape_of(args)
    key_map = hugging_face.key_map(shape)
    torch.manual_seed(0)
    model: Any = Llama(shape) if trains else Llama(shape).to(DTYPE)
    if trains:
        for block in model.blocks():
            sw.fully_shard(block, mesh=mesh, layout=layout)
        sw.fully_shard(model, mesh=mesh, layout=layout)
    options: dict[str, Any] = {"key_map": key_map, "dtype": DTYPE, "bucket_bytes": args.bucket}
    saved = Path(folder, "saved")

    def stream_here() -> None:
        if trains:
            for _ in sw.stream_weights(model, **options):
                pass

    def full_tensors() -> None:
        if trains:
            for p in model.parameters():
                p.full_tensor().to(DTYPE)

    def load(source: Any) -> None:
        for bucket in sw.receive_weights(source):
            sw.load_pretrained(model, bucket, key_map=key_map, allow_missing=True)

    def stream_to_group() -> None:
        if trains:
            for _ in sw.stream_weights(model, group=group, **options):
                pass
        else:
            load(group)

    def stream_to_memory() -> None:
        name = f"benchmark-{os.path.basename(folder)}"
        if trains:
            for _ in sw.stream_weights(model, share=name, **options):
                pass
        else:
            load(name)

    def save_and_load() -> None:
        if trains:
            sw.save_pretrained(model, saved, key_map=key_map, dtype=DTYPE)
        dist.barrier()
        if not trains:
            sw.load_pretrained(model, saved, key_map=key_map, allow_missing=["*freqs*"])
        dist.barrier()
        if rank == 0:
            shutil.rmtree(saved)

    ways: dict[str, Callable[[], None]] = {
        "full_tensor() of each parameter": full_tensors,
        "stream_weights, all ranks": stream_here,
        "save_pretrained + load_pretrained": save_and_load,
        "stream_weights, process group + load": stream_to_group,
        "stream_weights, shared memory + load": stream_to_memory,
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(args.rounds + 1):
        names = list(ways)
        for name in names if number % 2 else reversed(names):
            dist.barrier()
            begin = time.perf_counter()
            ways[name]()
            slowest = torch.tensor(time.perf_counter() - begin)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            if number:  # the first round warms up
                seconds[name].append(slowest.item())
    if rank == 0:
        print_table(layout, seconds)
    dist.barrier()


def print_table(layout: str, seconds: dict[str, list[float]]) -> None:
    names = list(seconds)
    for name in names:
        base = names[0] if name in names[:2] else names[2]
        ratios = [a / b for a, b in zip(seconds[name], seconds[base], strict=True)]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        median, ratio = statistics.median(seconds[name]), statistics.median(ratios)
        print(f"{layout:14} {name:38} {median:8.3f} {ratio:7.2f} {spread:>14}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bucket", default="64 MiB")
    args = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    nbytes = sum(p.numel() for p in Llama(shape_of(args)).parameters()) * DTYPE.itemsize
    print(
        f"torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores, {args.ranks} ranks and a reader, "
        f"{nbytes / 2**20:.0f} MiB in bfloat16, buckets of {args.bucket}, {args.rounds} rounds"
    )
    print(f"{'layout':14} {'way':38} {'median s':>8} {'ratio':>7} {'range':>14}")
    memory = "/dev/shm" if sys.platform.startswith("linux") else None
    for layout in ("per_parameter", "ragged"):
        with tempfile.TemporaryDirectory(dir=memory) as folder:
            mp.spawn(run, (args, folder, layout), nprocs=args.ranks + 1)


if __name__ == "__main__":
    main()
