#!/usr/bin/env python3
"""How long materialising takes, against the same initialisers run on plain tensors, one after the other.

    python benchmarks/materialize_time.py [--blocks 6] [--rounds 7] [--ranks 64]
    python benchmarks/materialize_time.py --model 8B --ranks 8 --rounds 3

The model is sharded as one rank of many (the fake backend), so what is measured is what each rank does: building,
sharding and materialising. With ``--model`` that is a Llama of that preset, whole. Each round measures both, in turn.
Seconds are those of the process's CPU time, so that other processes of the machine hardly count; of all rounds the
table has medians, and of the rounds' ratios the median and the range. Beside them the bytes that this rank's memory
grew by at most, as the operating system counts them.
"""

from __future__ import annotations

import argparse
import gc
import platform
import resource
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwright as sw
from shardwright.train.config.shapes.presets import PRESETS
from shardwright.train.models.native.llama import Llama

WIDTH = 1024
Fill = Callable[[torch.Tensor], object]

INITIALISERS: dict[str, Fill] = {
    "normal_": lambda w: nn.init.normal_(w, std=0.02),
    "kaiming_uniform_, then normal_": lambda w: nn.init.normal_(nn.init.kaiming_uniform_(w), std=0.02),
    "trunc_normal_": lambda w: nn.init.trunc_normal_(w, std=0.02, a=-0.06, b=0.06),
    "orthogonal_": nn.init.orthogonal_,
}


class Stack(nn.Module):
    def __init__(self, blocks: int, fill: Fill) -> None:
        super().__init__()
        shapes = [(4 * WIDTH, WIDTH) if number % 2 else (WIDTH, WIDTH) for number in range(2 * blocks)]
        self.weights = nn.ParameterList(nn.Parameter(torch.empty(shape)) for shape in shapes)
        with torch.no_grad():
            for weight in self.weights:
                fill(weight)


def initialised_alone(shapes: list[torch.Size], fill: Fill) -> None:
    for shape in shapes:
        fill(torch.empty(shape))


def materialised(build: Callable[[], nn.Module], layout: str) -> None:
    with sw.deferred_init():
        model = build()
    for block in getattr(model, "layers", ()):
        sw.fully_shard(block, layout=layout)
    sw.fully_shard(model, layout=layout)
    sw.materialize(model)


def seconds(action: Callable[[], None]) -> float:
    gc.collect()
    begin = time.process_time()
    action()
    return time.process_time() - begin


def compare(label: str, build: Callable[[], nn.Module], layout: str, fill: Fill, rounds: int) -> None:
    with torch.device("meta"):
        shapes = [p.shape for p in build().parameters() if p.ndim > 1]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    alone, ours = [], []
    for number in range(rounds):
        pair = [
            (ours, partial(materialised, build, layout)),
            (alone, partial(initialised_alone, shapes, fill)),
        ]
        for times, action in pair if number % 2 else reversed(pair):
            times.append(seconds(action))
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / 1e9
    ratios = [b / a for a, b in zip(alone, ours, strict=True)]
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
    print(
        f"{label:32} {layout:14} {statistics.median(alone):9.3f} {statistics.median(ours):15.3f} "
        f"{statistics.median(ratios):6.2f} {spread:>14} {grown:9.2f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--model", choices=list(PRESETS), help="a whole Llama instead of single initialisers")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=options.ranks // 2, world_size=options.ranks, store=FakeStore())
    print(
        f"torch {torch.__version__}, {platform.machine()}, one thread, rank {options.ranks // 2} of {options.ranks}, "
        f"{options.rounds} rounds, CPU time"
    )
    print(
        f"{'initialiser':32} {'layout':14} {'alone, s':>9} {'materialize, s':>15} {'ratio':>6} {'range':>14} "
        f"{'grown, GB':>9}"
    )
    if options.model is not None:
        build = partial(Llama, PRESETS[options.model])
        fill = INITIALISERS["trunc_normal_"]
        materialised(partial(Stack, 1, fill), "ragged")  # imports and first calls
        compare(f"Llama {options.model}", build, "ragged", fill, options.rounds)
        return
    for name, fill in INITIALISERS.items():
        for layout in ("per_parameter", "ragged"):
            build = partial(Stack, options.blocks, fill)
            materialised(build, layout)  # imports, first calls, and what the allocator then keeps
            compare(name, build, layout, fill, options.rounds)


if __name__ == "__main__":
    main()
