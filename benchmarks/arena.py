#!/usr/bin/env python3
"""How close the plans of `memory="arena"` come to their lower bound, on thirty real steps.

    python benchmarks/arena.py [--only TEXT]

A step runs the engine on a model of real shapes without values (`tests/engine/memory/real_steps.py`); no GPU is needed.
Prints for each step the number of slabs and of their leases, the bytes of the plan, the bound, the excess of the plan
over the bound in percent, and the processor's time of planning. The bound is the most bytes that are leased at once.
"""

from __future__ import annotations

import argparse
import math
import platform
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for the steps, which the tests have too

from shardwright.engine.memory import pack
from tests.engine.memory.real_steps import STEPS, record
from tests.support.fake import fake_ranks


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="steps whose name contains this text")
    args = parser.parse_args()
    print(
        f"{platform.machine()} {platform.system()}, Python {platform.python_version()}, torch {torch.__version__}"
    )
    print(f"{'step':<66}{'slabs':>6}{'leases':>7}{'MiB':>10}{'bound':>10}{'excess':>8}{'planning':>10}")
    excesses = []
    for step in STEPS:
        if args.only not in str(step):
            continue
        with fake_ranks(math.prod(step.ranks)):
            items = record(step)
        start = time.process_time()
        plan = pack(items)
        seconds = time.process_time() - start
        excesses.append(100 * (plan.nbytes / plan.lower_bound - 1))
        leases = sum(len(item.spans) for item in items)
        print(
            f"{step!s:<66}{len(items):>6}{leases:>7}{plan.nbytes / 2**20:>10,.1f}{plan.lower_bound / 2**20:>10,.1f}"
            f"{excesses[-1]:>7.2f}%{seconds:>8.2f} s",
            flush=True,
        )
    if excesses:
        mean = sum(excesses) / len(excesses)
        print(f"{len(excesses)} steps, largest excess {max(excesses):.2f}%, mean {mean:.2f}%")


if __name__ == "__main__":
    main()
