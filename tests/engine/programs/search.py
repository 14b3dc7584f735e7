"""A long search for programs that fail: ``python -m tests.engine.programs --count 2000 --ranks 2``."""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter

import hypothesis

from tests.engine.programs.draw import programs
from tests.engine.programs.grammar import Program, has_newer_operations, show_program
from tests.engine.programs.interpreter import run_program
from tests.support import CaseFailed, WorkerPools


def failure_of(pools: WorkerPools, program: Program, world_size: int) -> str | None:
    """Run a program on the ranks of a pool."""
    try:
        return next(
            (wrong for wrong in pools.run(run_program, world_size, timeout=60.0, program=program) if wrong),
            None,
        )
    except CaseFailed as failure:
        return str(failure)


def run_plain(program: Program) -> str | None:
    try:
        return run_program(0, 1, program, sharded=False)
    except Exception:
        return traceback.format_exc()


def headline(failure: str) -> str:
    """The common part of failures that are likely to have one cause."""
    lines = [line for line in failure.splitlines() if line and not line[0].isspace()]
    errors = [line for line in lines if "Error" in line.split(":")[0]]
    if errors:
        return errors[0][:160]
    return next((line for line in lines if not line.startswith("after step")), lines[0])[:100]


class Enough(Exception):
    """The time is over. Returning instead would go on drawing programs, up to the last of the count."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Run random programs and print those that fail.")
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after about this long")
    parser.add_argument("--shrink", action="store_true", help="stop at the first failure and make it small")
    parser.add_argument("--classic", action="store_true", help="zero3 on one axis, row by row, only")
    parser.add_argument(
        "--plain", action="store_true", help="on a plain model, on one rank: checks the programs"
    )
    arguments = parser.parse_args()
    pools = WorkerPools()
    smallest: dict[str, tuple[str, str]] = {}
    counts: Counter[str] = Counter()
    ran = newer = 0
    started = time.monotonic()

    phases = [hypothesis.Phase.generate] + ([hypothesis.Phase.shrink] if arguments.shrink else [])

    @hypothesis.seed(arguments.seed)
    @hypothesis.settings(
        max_examples=arguments.count,
        database=None,
        deadline=None,
        phases=phases,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(programs(parallel=not arguments.classic))
    def search(program: Program) -> None:
        nonlocal ran, newer
        if time.monotonic() - started > arguments.seconds:
            raise Enough
        ran += 1
        newer += has_newer_operations(program)
        failure = run_plain(program) if arguments.plain else failure_of(pools, program, arguments.ranks)
        if failure is None:
            return
        name, text = headline(failure), show_program(program)
        counts[name] += 1
        if counts[name] == 1:
            print(f"program {ran} of seed {arguments.seed}: {name}\n{text}", file=sys.stderr, flush=True)
        if name not in smallest or len(text) < len(smallest[name][0]):
            smallest[name] = (text, failure)
        assert not arguments.shrink, failure

    try:
        search()
    except (AssertionError, Enough):
        pass
    seconds = time.monotonic() - started
    for name, count in counts.most_common():
        program, failure = smallest[name]
        print(f"{'=' * 100}\n{count} x {name}\n{program}\n{failure}\n")
    print(
        f"{ran} programs on {arguments.ranks} ranks in {seconds:.0f} s, {sum(counts.values())} failed; "
        f"{newer} of them with newer operations"
    )
    pools.close()
    return 1 if counts else 0
