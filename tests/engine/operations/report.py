"""The command: runs the table, writes a verdict for each sample, and prints counts by layout."""

from __future__ import annotations

import argparse
import fnmatch
import gzip
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
    parser.add_argument("--ops", default="*", help="operations whose full names match one of these patterns, with commas")
    parser.add_argument("--samples", type=int, default=24, help="at most so many samples of each operation")
    parser.add_argument("--ranks", default="2,3", help="numbers of ranks")
    parser.add_argument("--layouts", default="per_parameter,ragged,ddp", help=f"some of {', '.join(LAYOUTS)}")
    parser.add_argument("--record", type=Path, help="write each verdict into this file (.gz)")
    parser.add_argument("--before", type=Path, nargs="*", default=[], help="a record: count samples that were equal there")
    parser.add_argument("--show", default="Wdhcb", help="print samples with these verdicts: " + str(VERDICTS))
    options = parser.parse_args(arguments)
    patterns = options.ops.split(",")
    ops = [op for op in operations() if any(fnmatch.fnmatch(op.full_name, p) for p in patterns)]
    begin = time.monotonic()
    verdicts: list[Verdict] = []
    for ranks in map(int, options.ranks.split(",")):
        for verdict in run_table(ops, options.layouts.split(","), ranks, options.samples):
            verdicts.append(verdict)
            if verdict.letter in options.show:
                case = verdict.case
                text = " ".join(verdict.text.split())[:300]
                print(
                    f"{VERDICTS[verdict.letter]}: {case.op} sample {case.sample}, {case.layout}, {case.kind}, "
                    f"sharded: {case.which}, {case.ranks} ranks: {text}",
                    flush=True,
                )
    if options.record:
        write_record(options.record, verdicts)
    print(table(verdicts))
    print(f"\n{len(ops)} operations, torch {torch.__version__}, Python {platform.python_version()}, "
          f"{time.monotonic() - begin:.0f} s")
    lost = [v for path in options.before for v in lost_since(read_record(path), verdicts)]
    for verdict in lost:
        print(f"equal before, now {VERDICTS[verdict.letter]}: {verdict.case} {' '.join(verdict.text.split())[:200]}")
    bad = [v for v in verdicts if v.letter not in "=r" and v.case.layout != "FSDP2"]
    return int(bool(bad or lost))


def table(verdicts: Iterable[Verdict]) -> str:
    """Counts by layout, form and sharded arguments, over all numbers of ranks."""
    counts: dict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)
    for verdict in verdicts:
        _, layout, kind, which = verdict.case.group
        counts[layout, kind, which][verdict.letter] += 1
    lines = [f"{'layout':14} {'form':9} {'sharded':8}" + "".join(f"{name:>16}" for name in VERDICTS.values()) + "   equal"]
    for key in sorted(counts, key=lambda key: (list(LAYOUTS).index(key[0]), key[1:])):
        row = counts[key]
        share = row["="] / sum(row.values())
        lines.append(
            f"{key[0]:14} {key[1]:9} {key[2]:8}" + "".join(f"{row[letter]:16}" for letter in VERDICTS) + f"{share:8.1%}"
        )
    return "\n".join(lines)


def write_record(path: Path, verdicts: Iterable[Verdict]) -> None:
    """One line for each operation, layout, form, sharded argument and number of ranks: samples and their letters."""
    lines: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for v in verdicts:
        c = v.case
        lines[c.op, c.layout, c.kind, c.which, str(c.ranks)].append(f"{c.sample}{v.letter}")
    with gzip.open(path, "wt") as file:
        for key in sorted(lines):
            file.write("\t".join([*key, " ".join(lines[key])]) + "\n")


def read_record(path: Path) -> dict[Case, str]:
    found = {}
    with gzip.open(path, "rt") as file:
        for line in file:
            op, layout, kind, which, ranks, letters = line.rstrip("\n").split("\t")
            for each in letters.split():
                found[Case(op, int(each[:-1]), layout, kind, which, int(ranks))] = each[-1]
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
