"""Many programs, those that fail made small: ``python -m tests.engine.hostile --count 1000 --seed 0``."""

from __future__ import annotations

import argparse
import time
from collections import Counter

from tests.engine.hostile.grammar import Program, draw, show, smaller
from tests.engine.hostile.running import CRASH, HANG, UNEVEN, WRONG, run_program
from tests.support import CaseFailed, WorkerPools

BAD = (WRONG, CRASH, HANG, UNEVEN)
_numbers = iter(range(10**9))


def verdict_of(pools: WorkerPools, program: Program) -> tuple[str, str]:
    """The worst verdict of the ranks."""
    try:
        verdicts = pools.run(
            run_program, program.ranks, timeout=90.0, program=program, nonce=str(next(_numbers))
        )
    except CaseFailed as failure:
        text = str(failure)
        return (HANG if "no reply in time" in text and "Traceback" not in text else CRASH), text
    for bad in BAD:
        for kind, _ in verdicts:
            if kind == bad:
                if bad == HANG:
                    pools.close()  # ranks may be apart
                return kind, "\n".join(
                    f"rank {r}: {text}" for r, (k, text) in enumerate(verdicts) if k == kind
                )
    return verdicts[0]


def shrunk(pools: WorkerPools, program: Program, kind: str, seconds: float) -> Program:
    """A smaller program with a bad verdict, found by leaving out one thing after another."""
    end = time.monotonic() + seconds
    going = True
    while going and time.monotonic() < end:
        going = False
        for less in smaller(program):
            if time.monotonic() > end:
                break
            if verdict_of(pools, less)[0] == kind:
                program, going = less, True
                break
    return program


def main() -> int:
    parser = argparse.ArgumentParser(description="Run random hostile programs and print those that fail.")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after about this long")
    parser.add_argument("--shrink", type=float, default=0.0, help="seconds to make a failing program small")
    parser.add_argument("--ranks", type=int, default=0, help="only programs on this many ranks")
    parser.add_argument("--refusals", action="store_true", help="print refusals, too")
    arguments = parser.parse_args()
    pools, counts, started = WorkerPools(), Counter[str](), time.monotonic()
    reasons: Counter[str] = Counter()
    for seed in range(arguments.seed, arguments.seed + arguments.count):
        program = draw(seed)
        if arguments.ranks and program.ranks != arguments.ranks:
            continue
        if time.monotonic() - started > arguments.seconds:
            break
        kind, why = verdict_of(pools, program)
        counts[kind] += 1
        if kind not in BAD:
            if why:
                reasons[f"{kind}: {why[:150]}"] += 1
            continue
        print(f"seed {seed}: {kind}\n{show(program)}\n{why}\n", flush=True)
        if arguments.shrink:
            small = shrunk(pools, program, kind, arguments.shrink)
            print(f"small: {show(small)}\n{verdict_of(pools, small)[1][:3000]}\n{'=' * 100}", flush=True)
    pools.close()
    if arguments.refusals:
        for text, count in reasons.most_common():
            print(f"{count} x {text}")
    seconds = time.monotonic() - started
    print(", ".join(f"{count} {kind}" for kind, count in counts.most_common()), f"in {seconds:.0f} s")
    return 1 if any(counts[bad] for bad in BAD) else 0
