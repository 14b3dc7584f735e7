#!/usr/bin/env python3
"""The data path beside Hugging Face datasets with torch's DataLoader: tokens made, batches read, first batches, memory.

    python benchmarks/data.py [--rounds 5] [--megabytes 16] [--only SUBSTRING]

Both sides get the same documents, the same tokenizer.json and the same number of processes, and every figure is of a
fresh process. A round measures each row once, ours and the peer's one after the other; the next round begins with the
other one. The first round is not timed: it measures memory and reads files that were not in memory yet.

* tokens made: documents of a .jsonl file become tokens in an empty cache. Without imports.
* batches read: an epoch of batches from the cache, with threads (ours) or processes (the peer's) that make them ahead.
  "split": the documents concatenated and cut. "best fit": whole documents packed, with positions in each document.
* first batch: from the start of the process, imports included. "cold": nothing is cached. "warm": the second start.
* resume: the same from the cache, to the batch in the middle of the epoch.

Columns: thousands of tokens per second of processor time, all processes together ("k/s a core"); the medians in seconds
of time that passed; memory, the private pages of all processes at most; ours over the peer's, for processor time, time
and memory: below 1 is better. The peer needs `pip install datasets trl accelerate`. Results go to benchmarks/results.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.data_rows import corpus  # noqa: E402
from benchmarks.data_rows.measure import Failed, Order, run  # noqa: E402

ENGINES = ("ours", "peer")
PEERS = ("torch", "datasets", "tokenizers", "trl", "accelerate", "pyarrow", "numpy")
Figures = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """One line of the table: a task with its settings."""

    name: str
    task: str
    processes: int = 1
    workers: int = 0
    packing: str = "split"
    cold: bool = False
    """The cache is empty."""
    resume: bool = False


def rows(cores: int) -> list[Row]:
    found = [
        Row(f"tokens made, {count} process{'es' if count > 1 else ''}", "tokenise", count, cold=True)
        for count in dict.fromkeys((1, min(2, cores)))
    ]
    for packing in ("split", "best_fit"):
        words = packing.replace("_", " ")
        found += [
            Row(f"batches read, {words}, {workers} workers", "read", cores, workers, packing)
            for workers in (0, 2)
        ]
        found += [
            Row(f"first batch, {words}, cold", "first_batch", cores, 0, packing, cold=True),
            Row(f"first batch, {words}, warm", "first_batch", cores, 0, packing),
            Row(f"resume, {words}", "first_batch", cores, 0, packing, resume=True),
        ]
    return found


class Bench:
    """The rows of one run: what each engine measured in each round, or why it did not."""

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        self.folder = folder
        self.corpus = corpus.make(folder, args.megabytes)
        self.order = Order(
            "", "", str(self.corpus.documents), str(self.corpus.tokenizer), "", 1, 0, "split", args.seq_len
        )
        self.found: dict[tuple[str, str], list[Figures]] = {}
        self.memory: dict[tuple[str, str], int] = {}
        self.reasons: dict[tuple[str, str], str] = {}

    def measure(self, row: Row, engine: str, *, first: bool) -> None:
        key = row.name, engine
        if key in self.reasons:
            return
        cache = self.folder / (f"{engine}-cold" if row.cold else f"{engine}-{row.packing}")
        order = replace(
            self.order, engine=engine, task=row.task, cache=str(cache), processes=row.processes,
            workers=row.workers, packing=row.packing, resume=row.resume,
        )  # fmt: skip
        try:
            if not row.cold and not cache.exists():
                run(replace(order, task="first_batch", workers=0, resume=False), memory=False)
            figures = run(order, memory=first)
        except Failed as error:
            self.reasons[key] = str(error)
            return
        finally:
            if row.cold:
                for left in self.folder.glob(f"{cache.name}*"):
                    shutil.rmtree(left) if left.is_dir() else left.unlink()
        if first:
            self.memory[key] = figures["memory"]
        else:
            self.found.setdefault(key, []).append(figures)

    def result(self, row: Row) -> Figures:
        """Medians of both engines and their ratios."""
        result: Figures = {"row": row.name}
        for engine in ENGINES:
            key = row.name, engine
            if key in self.reasons:
                result[engine] = {"reason": self.reasons[key]}
                continue
            runs = self.found[key]
            time_of = "since_start" if row.task == "first_batch" else "seconds"
            result[engine] = {
                "seconds": statistics.median(each[time_of] for each in runs),
                "memory": self.memory[key],
                "rounds": runs,
            }
            if "tokens" in runs[0]:
                result[engine]["processor"] = statistics.median(each["processor"] for each in runs)
                result[engine]["tokens"] = runs[0]["tokens"]
                result[engine]["per_core"] = statistics.median(
                    each["tokens"] / each["processor"] for each in runs
                )
            elif row.resume:
                result[engine]["from_loader"] = statistics.median(each["seconds"] for each in runs)
        ours, peer = (result[engine] for engine in ENGINES)
        if "reason" not in ours and "reason" not in peer:
            result["ratios"] = {
                "processor": peer["per_core"] / ours["per_core"] if "per_core" in ours else None,
                "seconds": _per_token(ours) / _per_token(peer),
                "memory": ours["memory"] / peer["memory"],
            }
        return result


def _per_token(figures: Figures) -> float:
    """Seconds, per token where tokens are counted: packings of both sides differ a little in padding."""
    return float(figures["seconds"] / figures.get("tokens", 1))


HEADER = (
    f"{'':38s}{'k/s a core':^17s}{'seconds':^17s}{'MiB':^13s}{'ours / peer':^25s}\n"
    f"{'':38s}{'ours':>8s}{'peer':>8s} {'ours':>8s}{'peer':>8s} {'ours':>6s}{'peer':>6s} "
    f"{'processor':>9s}{'time':>7s}{'memory':>8s}"
)


def line(result: Figures) -> str:
    ours, peer = (result[engine] for engine in ENGINES)
    cells = [f"{result['row']:38s}"]
    cells += [_cell(each, "per_core", 1e3, 8, 0) for each in (ours, peer)]
    cells += [" ", *(_cell(each, "seconds", 1, 8, 2) for each in (ours, peer))]
    cells += [" ", *(_cell(each, "memory", 2**20, 6, 0) for each in (ours, peer)), " "]
    if ratios := result.get("ratios"):
        for name, width in (("processor", 9), ("seconds", 7), ("memory", 8)):
            cells.append(_cell(ratios, name, 1, width, 2))
    reasons = [
        f"\n    {engine} did not run: {each['reason']}"
        for engine, each in zip(ENGINES, (ours, peer), strict=True)
        if "reason" in each
    ]
    if "from_loader" in ours and "from_loader" in peer:
        milliseconds = [each["from_loader"] * 1e3 for each in (ours, peer)]
        cells.append(
            f"\n{'  of it, from the loader on (ms)':55s}{milliseconds[0]:8.1f}{milliseconds[1]:8.1f}"
        )
    return "".join(cells + reasons)


def _cell(figures: Figures, name: str, unit: float, width: int, digits: int) -> str:
    value = figures.get(name)
    return " " * width if value is None else f"{value / unit:{width}.{digits}f}"


def machine(bench: Bench, args: argparse.Namespace) -> Figures:
    versions = {}
    for package in PEERS:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "versions": versions,
        "corpus": {
            "documents": bench.corpus.count,
            "megabytes": round(bench.corpus.nbytes / 1e6, 1),
            "vocabulary": corpus.VOCABULARY,
        },
        "seq_len": args.seq_len,
        "batch": bench.order.batch,
        "rounds": args.rounds,
    }


def opening(facts: Figures) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    texts = facts["corpus"]
    return (
        f"{facts['processor']}, {facts['cores']} cores, load {facts['load']}, Python {facts['python']}\n{versions}\n"
        f"{texts['documents']:,} documents, {texts['megabytes']} MB, byte-level BPE of {texts['vocabulary']:,} tokens; "
        f"batches of {facts['batch']} x {facts['seq_len']}; medians of {facts['rounds']} processes"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=float, default=16.0, help="of text")
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--only", default="", help="rows whose name has this")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder of results")
    args = parser.parse_args()
    chosen = [row for row in rows(os.cpu_count() or 1) if args.only in row.name]
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), args)
        facts = machine(bench, args)
        print(opening(facts), flush=True)
        for round_ in range(args.rounds + 1):
            print(f"round {round_} of {args.rounds}", file=sys.stderr, flush=True)
            for row in chosen:
                for engine in ENGINES if round_ % 2 else ENGINES[::-1]:
                    bench.measure(row, engine, first=round_ == 0)
        results = [bench.result(row) for row in chosen]
    table = "\n".join([HEADER, *map(line, results)])
    print(table)
    args.out.mkdir(parents=True, exist_ok=True)
    stem = f"data-torch-{'.'.join(facts['versions']['torch'].split('.')[:2])}-cpu"
    (args.out / f"{stem}.txt").write_text(f"{opening(facts)}\n\n{table}\n")
    (args.out / f"{stem}.json").write_text(json.dumps(facts | {"rows": results}, indent=1) + "\n")
    print(f"written to {args.out / stem}.txt and .json")


if __name__ == "__main__":
    main()
