#!/usr/bin/env python3
"""A real training step on gloo ranks: this engine and torch's FSDP2, alternating in the same processes.

    python benchmarks/step_time.py [--ranks 2] [--layers 6] [--dim 512] [--bf16] [--rounds 5]

A step is forward, backward, gradient clipping and AdamW, on both sides with the library's own functions, over a
Llama whose blocks are units. One intra-op thread per rank. Prints the machine, the versions, the median step of each
engine and the ratio, which is what to compare: single times depend on the machine and on what else it does.
"""

from __future__ import annotations

import argparse
import atexit
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp2
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh

import shardwright as sw
from shardwright.train.models.native.llama import Llama, LlamaConfig


def build(library: object, args: argparse.Namespace) -> Callable[[], None]:
    """A training step of one engine as a function."""
    shape = LlamaConfig(
        dim=args.dim,
        n_layers=args.layers,
        n_heads=8,
        n_kv_heads=8,
        ffn_dim=4 * args.dim,
        vocab_size=256,
        max_seq_len=args.seq,
    )
    torch.manual_seed(0)
    model = Llama(shape)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = (
        library.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        if args.bf16
        else library.MixedPrecisionPolicy()
    )
    for block in model.layers:
        library.fully_shard(block, mesh=mesh, mp_policy=policy)
    library.fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    clip = torch.nn.utils.clip_grad_norm_
    if library is sw:
        optimizer, clip = sw.fully_shard_optimizer(optimizer), sw.clip_grad_norm_
    tokens = torch.randint(
        0, 256, (args.batch, args.seq), generator=torch.Generator().manual_seed(dist.get_rank())
    )

    def step() -> None:
        logits = model(tokens).float()
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
        clip(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def work(rank: int, args: argparse.Namespace, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=args.ranks, init_method=f"file://{store}")
    atexit.register(dist.destroy_process_group)
    steps = {"shardwright": build(sw, args), "torch FSDP2": build(fsdp2, args)}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for round_ in range(args.rounds + 1):
        for name, step in steps.items():
            for _ in range(args.steps):
                dist.barrier()
                begun = time.perf_counter()
                step()
                if round_:  # the first round warms up
                    times[name].append(time.perf_counter() - begun)
    if rank == 0:
        medians = {name: statistics.median(t) * 1e3 for name, t in times.items()}
        print(
            f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"
        )
        print(
            f"{args.ranks} gloo ranks, {args.layers} layers, dim {args.dim}, batch {args.batch} x {args.seq}, "
            f"{'bf16 compute, fp32 reduce' if args.bf16 else 'fp32'}, {args.rounds} rounds of {args.steps} steps each"
        )
        for name, median in medians.items():
            low, _, high = statistics.quantiles(times[name], n=4)
            print(f"  {name:12s} median {median:8.1f} ms   quartiles {low * 1e3:.1f} .. {high * 1e3:.1f}")
        print(f"  ratio {medians['shardwright'] / medians['torch FSDP2']:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in {
        "ranks": 2,
        "layers": 6,
        "dim": 512,
        "batch": 1,
        "seq": 64,
        "steps": 4,
        "rounds": 5,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--bf16", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (args, str(Path(folder) / "store")), nprocs=args.ranks)


if __name__ == "__main__":
    main()
