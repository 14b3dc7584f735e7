"""The command: runs the table, writes a verdict for each sample, and prints counts by layout."""

from __future__ import annotations

import argparse
import fnmatch
import platform
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

import torch

from tests.engine.operations.crew import Plan, Verdict, run_table
from tests.engine.operations.judging import VERDICTS
from tests.engine.operations.sharding import LAYOUTS
from tests.engine.operations.table import operations

#: Operation, sample, layout, form, sharded arguments, ranks.
Key = tuple[str, int, str, str, str, int]
HERE = Path(__file__).parent


def main(arguments: list[str] | None = None) -> int:
    """Run the table. Returns 1 if a sample is wrong, has a bare error, or is no longer equal."""
    parser = argparse.ArgumentParser(prog="python -m tests.engine.operations", description=__doc__)
    parser.add_argument(
        "--ops", default="*", help="full names of operations, or patterns of them, with commas"
    )
    parser.add_argument("--samples", type=int, default=8, help="at most so many samples of each operation")
    parser.add_argument("--slice", type=Path, help="a file: only these operations and samples")
    parser.add_argument("--ranks", default="2,3", help="numbers of ranks")
    parser.add_argument("--layouts", default="per_parameter,ragged,ddp", help=f"some of {', '.join(LAYOUTS)}")
    parser.add_argument("--record", type=Path, help="write each verdict into this file")
    parser.add_argument(
        "--before", type=Path, help="a file of samples that must be equal; default: of this torch"
    )
    parser.add_argument("--show", default="Wdhcbp", help=f"print samples with these verdicts of {VERDICTS}")
    options = parser.parse_args(arguments)
    numbers = _slice(options.slice) if options.slice else {}
    patterns = options.ops.split(",")
    ops = [op for op in operations() if any(fnmatch.fnmatch(op.full_name, p) for p in patterns)]
    ops = [op for op in ops if not numbers or op.full_name in numbers]
    before = options.before or HERE / f"equal-torch-{'.'.join(torch.__version__.split('.')[:2])}.txt"
    equal = _equal_samples(before) if before.exists() else set()
    begin = time.monotonic()
    verdicts: list[Verdict] = []
    with ExitStack() as files:
        record = files.enter_context(open(options.record, "w", buffering=1)) if options.record else None
        for ranks in map(int, options.ranks.split(",")):
            plan = Plan(options.samples, numbers)
            for verdict in run_table(ops, options.layouts.split(","), ranks, plan):
                verdicts.append(verdict)
                if record:
                    print(_line(verdict), file=record)
                if verdict.letter in options.show or _is_lost(verdict, equal):
                    print(_sentence(verdict, equal), flush=True)
    print(table(verdicts))
    seconds = time.monotonic() - begin
    print(f"\n{len(ops)} operations, torch {torch.__version__}, {platform.machine()}, {seconds:.0f} s")
    lost = [v for v in verdicts if _is_lost(v, equal)]
    bad = [v for v in verdicts if v.letter not in "=r" and v.case.layout != "FSDP2"]
    print(f"{len(bad)} samples neither equal nor refused, {len(lost)} no longer equal")
    return int(bool(bad or lost))


def table(verdicts: Iterable[Verdict]) -> str:
    """Counts by layout, form and sharded arguments, over all numbers of ranks."""
    counts: dict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)
    for verdict in verdicts:
        _, layout, kind, which = verdict.case.group
        counts[layout, kind, which][verdict.letter] += 1
    lines = [
        f"{'layout':14} {'form':9} {'sharded':8}"
        + "".join(f"{name:>16}" for name in VERDICTS.values())
        + "   equal"
    ]
    for key in sorted(counts, key=lambda key: (list(LAYOUTS).index(key[0]), key[1:])):
        row = counts[key]
        share = row["="] / sum(row.values())
        lines.append(
            f"{key[0]:14} {key[1]:9} {key[2]:8}"
            + "".join(f"{row[letter]:16}" for letter in VERDICTS)
            + f"{share:8.1%}"
        )
    return "\n".join(lines)


def _line(verdict: Verdict) -> str:
    case = verdict.case
    fields = (case.op, case.sample, case.layout, case.kind, case.which, case.ranks, verdict.letter)
    return "\t".join(map(str, fields)) + "\t" + " ".join(verdict.text.split())[:300]


def _sentence(verdict: Verdict, equal: set[Key]) -> str:
    case, text = verdict.case, " ".join(verdict.text.split())[:300]
    was = "equal before, now " if _is_lost(verdict, equal) else ""
    return (
        f"{was}{VERDICTS[verdict.letter]}: {case.op} sample {case.sample}, {case.layout}, {case.kind}, sharded: "
        f"{case.which}, {case.ranks} ranks: {text}"
    )


def _slice(path: Path) -> dict[str, list[int]]:
    """The numbers of samples by operation."""
    lines = [line.split("\t") for line in path.read_text().splitlines() if not line.startswith("#")]
    return {op: [int(number) for number in numbers.split()] for op, numbers in lines}


def _equal_samples(path: Path) -> set[Key]:
    """Samples that were equal in this engine or, per parameter, in torch's FSDP2 when the file was made."""
    lines = [line.split("\t") for line in path.read_text().splitlines() if not line.startswith("#")]
    return {
        (op, int(number), layout, kind, which, int(ranks))
        for op, layout, kind, which, ranks, numbers in lines
        for number in numbers.split()
    }


def _is_lost(verdict: Verdict, equal: set[Key]) -> bool:
    case = verdict.case
    key = (case.op, case.sample, case.layout, case.kind, case.which, case.ranks)
    return verdict.letter != "=" and key in equal
