#!/usr/bin/env python3
"""What a unit costs the host in a step: this engine and torch's FSDP2, in turn in one process.

    python benchmarks/host_time.py [--units 24] [--ranks 2] [--bf16] [--rounds 40]

A step is forward, backward, clipping and AdamW over a chain of small units, each library with functions of its own.
Collectives are those of torch's fake process group, which copies on the host and sends nothing; its time is in the
figures of both. Prints for each library, per unit and step, less the plain model's figures: operations that pass
torch's dispatcher in forward and backward, and the processor's time (lower quartile of the rounds) of forward and
backward, and of clipping and AdamW. Then the ratios.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp2
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import shardwright as sw


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Count(TorchDispatchMode):
    operations = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        return function(*args, **(kwargs or {}))


Part = Callable[[], Any]


def parts_of(library: Any, args: argparse.Namespace) -> tuple[Part, Part]:
    """The two parts of a training step with one of the libraries, or of the plain model (None)."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(16) for _ in range(args.units)))
    dtypes = (torch.bfloat16, torch.float32) if args.bf16 else (None, None)
    if library is not None:
        policy = library.MixedPrecisionPolicy(*dtypes)
        for block in model:
            library.fully_shard(block, mp_policy=policy)
        library.fully_shard(model, mp_policy=policy)
    elif args.bf16:
        model = model.bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    clip: Any = nn.utils.clip_grad_norm_
    if library is sw:
        optimizer, clip = sw.fully_shard_optimizer(optimizer), sw.clip_grad_norm_
    x = torch.randn(2, 16, dtype=torch.bfloat16 if library is None and args.bf16 else None)

    def compute() -> None:
        model(x).float().sum().backward()

    def update() -> None:
        clip(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return compute, update


def operations(part: Part) -> int:
    with Count() as count:
        part()
    return count.operations


def timed(part: Part) -> float:
    """The processor's time in microseconds."""
    start = time.process_time_ns()
    part()
    return (time.process_time_ns() - start) / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--units", type=int, default=24)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16, reduce in float32")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=args.ranks)
    libraries = {"shardwright": sw, "FSDP2": fsdp2, "plain": None}
    parts = {name: parts_of(library, args) for name, library in libraries.items()}
    times: dict[tuple[str, int], list[float]] = {(name, i): [] for name in parts for i in (0, 1)}
    for number in range(args.rounds + 10):
        if number == 10:
            gc.collect()
            gc.freeze()
        for name, own in parts.items():
            for i, part in enumerate(own):
                elapsed = timed(part)
                if number >= 10:
                    times[name, i].append(elapsed)
    quartile = {key: statistics.quantiles(each, n=4)[0] / args.units for key, each in times.items()}
    counts = {name: operations(compute) / args.units for name, (compute, _) in parts.items()}
    precision = "bf16" if args.bf16 else "fp32"
    print(
        f"torch {torch.__version__}, {args.units} units, {args.ranks} ranks (fake), {precision}; per unit and step:"
    )
    costs: dict[str, list[float]] = {}
    for name in ("shardwright", "FSDP2"):
        costs[name] = [
            counts[name] - counts["plain"],
            *(quartile[name, i] - quartile["plain", i] for i in (0, 1)),
        ]
        print(
            "{:12} {:5.1f} operations {:7.1f} us {:7.1f} us of clipping and AdamW".format(name, *costs[name])
        )
    ratios = [a / b for a, b in zip(costs["shardwright"], costs["FSDP2"], strict=True)]
    print("{:12} {:5.2f}            {:7.2f}    {:7.2f}".format("ratio", *ratios))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
