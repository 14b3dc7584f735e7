#!/usr/bin/env python3
"""Padding, segments and planning time of every layout on layers of well-known models.

    python benchmarks/layout_planning.py [--world-sizes 8,64,1024,4096] [--rounds 20]

Prints the machine, the versions, and a row for each layer and number of ranks; for each layout the padding in percent,
the number of segments and the median time of one plan in milliseconds. The times depend on the machine and on what
else it does; that they do not grow with the ranks does not.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for the shapes, which the tests have too

from shardwright.engine.layout import Layout, Ragged, plan
from tests.engine.layout.shapes import LAYERS, Shapes

KINDS: list[str | Ragged] = ["per_parameter", Ragged("row"), Ragged(32), Ragged("element")]


def timed(shapes: Shapes, ranks: int, kind: str | Ragged, rounds: int) -> tuple[Layout, float]:
    """The layout, and the median milliseconds it takes to plan it."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        layout = plan(shapes, ranks, kind)
        times.append(1e3 * (time.perf_counter() - start))
    return layout, statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--world-sizes", default="8,64,1024,4096")
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    print(
        f"{platform.machine()} {platform.system()}, Python {platform.python_version()}, torch {torch.__version__}"
    )
    print(f"{'layer':<20}{'ranks':>6}" + "".join(f"{kind!s:>26}" for kind in KINDS))
    slowest = 0.0
    for name, shapes in LAYERS.items():
        for ranks in map(int, args.world_sizes.split(",")):
            cells = []
            for kind in KINDS:
                layout, ms = timed(shapes, ranks, kind, args.rounds)
                slowest = max(slowest, ms)
                cells.append(f"{100 * layout.padding:>12,.2f}% {len(layout.segments):>3} {ms:>6.3f}ms")
            print(f"{name:<20}{ranks:>6,}" + "".join(f"{cell:>26}" for cell in cells))
    print(f"slowest median: {slowest:.3f} ms")


if __name__ == "__main__":
    main()
