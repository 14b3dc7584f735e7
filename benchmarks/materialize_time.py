#!/usr/bin/env python3
"""How long materialising takes, against the same initialisers run on plain tensors, one after the other.

    python benchmarks/materialize_time.py [--blocks 6] [--rounds 3] [--ranks 64]

The model is sharded as one rank of many (the fake backend), so what is measured is what each rank does. Each round
measures both, in turn; the table has medians and their ratio.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwright as sw

WIDTH = 1024

INITIALISERS: dict[str, Callable[[torch.Tensor], object]] = {
    "normal_": lambda w: nn.init.normal_(w, std=0.02),
    "kaiming_uniform_, then normal_": lambda w: nn.init.normal_(nn.init.kaiming_uniform_(w), std=0.02),
    "trunc_normal_": lambda w: nn.init.trunc_normal_(w, std=0.02, a=-0.06, b=0.06),
    "orthogonal_": nn.init.orthogonal_,
}


class Stack(nn.Module):
    def __init__(self, blocks: int, fill: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        shapes = [(4 * WIDTH, WIDTH) if number % 2 else (WIDTH, WIDTH) for number in range(2 * blocks)]
        self.weights = nn.ParameterList(nn.Parameter(torch.empty(shape)) for shape in shapes)
        with torch.no_grad():
            for weight in self.weights:
                fill(weight)


def generator_alone(shapes: list[torch.Size], fill: Callable[[torch.Tensor], object]) -> float:
    begin = time.perf_counter()
    for shape in shapes:
        fill(torch.empty(shape))
    return time.perf_counter() - begin


def materialised(
    blocks: int, fill: Callable[[torch.Tensor], object], layout: str
) -> tuple[float, list[torch.Size]]:
    begin = time.perf_counter()
    with sw.deferred_init():
        model = Stack(blocks, fill)
    sw.fully_shard(model, layout=layout)
    sw.materialize(model)
    return time.perf_counter() - begin, [p.shape for p in model.parameters()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=64)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=options.ranks // 2, world_size=options.ranks, store=FakeStore())
    print(
        f"torch {torch.__version__}, {platform.machine()}, one thread, rank {options.ranks // 2} of {options.ranks}"
    )
    print(f"{'initialiser':32} {'layout':14} {'alone, s':>9} {'materialize, s':>15} {'ratio':>6}")
    for name, fill in INITIALISERS.items():
        for layout in ("per_parameter", "ragged"):
            _, shapes = materialised(1, fill, layout)  # imports and first calls
            alone, ours = [], []
            for _ in range(options.rounds):
                seconds, shapes = materialised(options.blocks, fill, layout)
                ours.append(seconds)
                alone.append(generator_alone(shapes, fill))
            a, b = statistics.median(alone), statistics.median(ours)
            print(f"{name:32} {layout:14} {a:9.3f} {b:15.3f} {b / a:6.2f}")


if __name__ == "__main__":
    main()
