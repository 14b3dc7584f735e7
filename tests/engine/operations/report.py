"""The command: runs the table, writes a verdict for each sample, and prints counts by layout."""

from __future__ import annotations

import argparse
import fnmatch
import platform
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

import torch

from tests.engine.operations.crew import Case, Verdict, run_table
from tests.engine.operations.judging import VERDICTS
from tests.engine.operations.sharding import LAYOUTS
from tests.engine.operations.table import operations


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.engine.operations", description=__doc__)
    parser.add_argument(
        "--ops", default="*", help="operations whose full names match one of these patterns, with commas"
    )
    parser.add_argument("--samples", type=int, default=24, help="at most so many samples of each operation")
    parser.add_argument("--ranks", default="2,3", help="numbers of ranks")
    parser.add_argument("--layouts", default="per_parameter,ragged,ddp", help=f"some of {', '.join(LAYOUTS)}")
    parser.add_argument("--record", type=Path, help="write each verdict into this file")
    parser.add_argument(
        "--before", type=Path, nargs="*", default=[], help="a record: count samples that were equal there"
    )
    parser.add_argument("--show", default="Wdhcb", help="print samples with these verdicts: " + str(VERDICTS))
    options = parser.parse_args(arguments)
    patterns = options.ops.split(",")
    ops = [op for op in operations() if any(fnmatch.fnmatch(op.full_name, p) for p in patterns)]
    begin = time.monotonic()
    verdicts: list[Verdict] = []
    record = open(options.record, "w", buffering=1) if options.record else None  # noqa: SIM115
    for ranks in map(int, options.ranks.split(",")):
        for verdict in run_table(ops, options.layouts.split(","), ranks, options.samples):
            verdicts.append(verdict)
            if record:
                print(line_of(verdict), file=record)
            if verdict.letter in options.show:
                case = verdict.case
                text = " ".join(verdict.text.split())[:300]
                print(
                    f"{VERDICTS[verdict.letter]}: {case.op} sample {case.sample}, {case.layout}, {case.kind}, "
                    f"sharded: {case.which}, {case.ranks} ranks: {text}",
                    flush=True,
                )
    if record:
        record.close()
    print(table(verdicts))
    print(
        f"\n{len(ops)} operations, torch {torch.__version__}, Python {platform.python_version()}, "
        f"{time.monotonic() - begin:.0f} s"
    )
    lost = [v for path in options.before for v in lost_since(read_record(path), verdicts)]
    for verdict in lost:
        print(
            f"equal before, now {VERDICTS[verdict.letter]}: {verdict.case} {' '.join(verdict.text.split())[:200]}"
        )
    bad = [v for v in verdicts if v.letter not in "=r" and v.case.layout != "FSDP2"]
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


def line_of(verdict: Verdict) -> str:
    case = verdict.case
    fields = (case.op, case.sample, case.layout, case.kind, case.which, case.ranks, verdict.letter)
    return "\t".join(map(str, fields)) + "\t" + " ".join(verdict.text.split())[:300]


def read_record(path: Path) -> dict[Case, str]:
    """The letters of a record by case. A record that was cut off counts as far as it goes."""
    found = {}
    for line in path.read_text().splitlines():
        op, sample, layout, kind, which, ranks, letter, _ = line.split("\t", 7)
        found[Case(op, int(sample), layout, kind, which, int(ranks))] = letter
    return found


def lost_since(before: dict[Case, str], now: Iterable[Verdict]) -> list[Verdict]:
    """Verdicts that are not equal now, of samples that were equal in the same layout or, per parameter, under FSDP2."""
    lost = []
    for verdict in now:
        case = verdict.case
        names = {case.layout} | ({"FSDP2"} if case.layout == "per_parameter" else set())
        keys = [Case(case.op, case.sample, name, case.kind, case.which, case.ranks) for name in names]
        if verdict.letter != "=" and any(before.get(key) == "=" for key in keys):
            lost.append(verdict)
    return lost


if __name__ == "__main__":
    sys.exit(main())
