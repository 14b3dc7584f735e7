#!/usr/bin/env python3
"""Training steps on a GPU in nine minutes at most: plain torch, torch's FSDP2 and shardwright, in the same run.

    PYTHONPATH=src python benchmarks/gpu.py                         # all rows on all GPUs of this machine
    PYTHONPATH=src python benchmarks/gpu.py --only "1B,150M exact"  # these rows, in this order; --list shows the names
    PYTHONPATH=src python benchmarks/gpu.py --only 3B               # no row has this name: all with "3B" in theirs
    PYTHONPATH=src python benchmarks/gpu.py --device cpu            # with a tiny model, to see whether it runs

It needs torch and no installation. A row is one Llama and one way to run it: 150M, 1B or 3B parameters, 2,048 to 8,192
tokens, activation checkpointing or none, eager or compiled, planned memory, CUDA graphs. All engines compute with the
same roundings (``gpu_rows/training.py``). Every row runs in processes of its own with a limit of its own, and each
variant with a CUDA graph in its own process. A row or variant that fails, aborts or hangs does not end the others.
The results have its traceback or its stacks, its output, and the device's memory. After ``--seconds`` the remaining
rows are left out, and the results name them.

* ms: median step, timed by the device's events while the host runs ahead. host ms: until a step is queued.
* active, reserved: the most bytes of tensors, and of the process's memory on the device, in the timed steps.
* loss off: the largest difference of a loss of the first steps from the first engine's, as a part of that one's fall.
* exact rows: all kinds of memory, with and without graphs, and with a host that waits for the device around each block,
  give the same bits in every loss. A missing wait between streams would show as other bits.
* communicating: on one device the engine gathers and reduces nothing. These variants do, with collectives of one rank.
* The profile shows where the time is that shardwright takes beyond its target, in the row where that is most.

Text and JSON go to build/gpu, or where --out says, after each row; the last line says where. Exit status 1 if a row
fails or losses disagree, 2 without a GPU. A target that is not met does not change the status.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [path for path in (str(ROOT / "src"), str(ROOT)) if path not in sys.path]

import torch  # noqa: E402

from benchmarks.gpu_rows import tables, verdicts  # noqa: E402
from benchmarks.gpu_rows.crew import run_row  # noqa: E402
from benchmarks.gpu_rows.faults import FAULTS  # noqa: E402
from benchmarks.gpu_rows.processes import end_processes_on_sigterm  # noqa: E402
from benchmarks.gpu_rows.rows import ROWS, Row, Variant  # noqa: E402
from shardwright.train.report.device_peaks import peak_flops  # noqa: E402

SECONDS = 540.0
FOR_PROFILE = 1 / 12
"""The part of the deadline that rows leave to the profile."""
LEAST = 1 / 36
"""The part of the deadline below which nothing is started: a process needs that long to import torch and to build."""


def reason_to_skip(row: Row, variant: Variant, device: str, ranks: int) -> str:
    """Why this machine cannot run the variant; nothing if it can. Each process looks at its free memory."""
    if variant.communicating and ranks > 1:
        return "on several devices every variant communicates"
    if variant.graph and device == "cpu":
        return "a CUDA graph needs a CUDA device"
    if row.compile and device == "cuda":
        compilers = [os.environ.get("CC", ""), "gcc", "cc", "clang"]
        if importlib.util.find_spec("triton") is None:
            return "torch.compile needs Triton, which is not installed"
        if not any(name and shutil.which(name) for name in compilers):
            return "torch.compile needs a C compiler, and there is none on PATH"
        if not Path(sysconfig.get_path("include"), "Python.h").exists():
            return "torch.compile needs Python.h, and this Python has no headers"
    return ""


def chosen(rows: Sequence[Row], only: str) -> tuple[list[Row], list[str]]:
    """The rows that ``--only`` names, in its order, and the names that no row has, not even as a part."""
    if not only.strip():
        return list(rows), []
    found: dict[str, Row] = {}
    unknown = []
    for name in (part.strip() for part in only.split(",")):
        same = [row for row in rows if row.name.lower() == name.lower()]
        matching = same or [row for row in rows if name and name.lower() in row.name.lower()]
        found |= {row.name: row for row in matching if row.name not in found}
        unknown += [] if matching or not name else [name]
    return list(found.values()), unknown


def measure(row: Row, args: argparse.Namespace, seconds: float, profile: bool = False) -> dict[str, Any]:
    """Run one row; variants that cannot run are in the result with the reason."""
    skipped = {v: reason_to_skip(row, v, args.device, args.ranks) for v in row.variants}
    possible = replace(row, variants=tuple(v for v in row.variants if not skipped[v]))
    order = {
        "device": args.device,
        "ranks": args.ranks,
        "profile": profile,
        "backend": "inductor" if args.device == "cuda" else "aot_eager",
        "limit_bytes": args.limit_gb and args.limit_gb * 1e9,
        "faults": dict(fault.split("=", 1) for fault in args.inject),
    }
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    if row.exact:
        environment.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic only with this
    measured: dict[str, Any] = {"lines": [], "error": "", "seconds": 0.0}
    if possible.variants:
        measured = run_row(possible, Path(__file__), order, environment, seconds)
        if measured["late"] and seconds < row.seconds:
            measured["error"] = ""  # it was within its own limit: the whole run has no more time
    measured["lines"] += [{"variant": v.name, "skipped": reason} for v, reason in skipped.items() if reason]
    return verdicts.summary(row, measured, args.peak)


def profile_of_gap(
    rows: Sequence[Row], results: dict[str, Any], args: argparse.Namespace, seconds: float
) -> Any:
    """Kernels and host operators of the row in which shardwright is furthest above its target."""
    gap = verdicts.largest_gap(rows, results["rows"])
    if gap is None:
        return None
    row, variant, base, value = gap
    about = {"row": row.name, "variant": variant.name, "base": base.name, "gap": value}
    if seconds < LEAST * args.seconds:
        return about | {"error": "left out: no time"}
    short = replace(row, variants=(base, variant), turns=1, steps=2)
    result = measure(short, args, min(seconds, row.seconds), profile=True)
    return about | {key: result[key] for key in ("variants", "error") if key in result}


def machine(device: str) -> dict[str, Any]:
    found = {"torch": torch.__version__, "python": platform.python_version(), "more": "no GPU"}
    if device == "cpu":
        return found | {"device": "cpu", "memory": platform.machine()}
    memory = torch.cuda.get_device_properties(0).total_memory
    found |= {"device": torch.cuda.get_device_name(0), "memory": f"{memory / 1e9:.1f} GB"}
    settings = [f"CUDA {torch.version.cuda}"]
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        settings += [f"{name}={os.environ[name]}"] if name in os.environ else []
    query = ["nvidia-smi", "--query-gpu=driver_version,power.limit,clocks.max.sm", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20)
        settings += [f"driver, power, clock: {done.stdout.splitlines()[0]}"] if done.stdout else []
    except (OSError, subprocess.SubprocessError):
        pass  # the figures do not depend on it
    return found | {"more": ", ".join(settings)}


def file_stem(results: dict[str, Any]) -> str:
    """The name of both files. Runs of some rows have these in it, so that none overwrites another's."""
    words = results["machine"]["device"].lower().replace("nvidia", "")
    count = f"{results['ranks']}x-" if results["ranks"] > 1 else ""
    version = ".".join(results["machine"]["torch"].split(".")[:2])
    stem = f"gpu-{count}{_in_a_name(words)}-torch-{version}"
    return "-".join([stem, *filter(None, [_in_a_name(results.get("only", "").lower())])])


def _in_a_name(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text).strip("-")


def write(results: dict[str, Any], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    stem = file_stem(results)
    (out / f"{stem}.json").write_text(json.dumps(results, indent=1) + "\n")
    (out / f"{stem}.txt").write_text(tables.text_of(results))


def measure_all(rows: Sequence[Row], args: argparse.Namespace) -> dict[str, Any]:
    """Measure the rows until the deadline. Results are written after each row."""
    begun = time.monotonic()
    args.peak = peak_flops(torch.cuda.get_device_name(0), "bfloat16") if args.device == "cuda" else None
    results: dict[str, Any] = {
        "machine": machine(args.device),
        "ranks": args.ranks,
        "limit_seconds": args.seconds,
        "only": args.only,
    }
    results |= {"precision": verdicts.PRECISION, "rows": {}, "left_out": [], "targets": [], "profile": None}
    reserve = FOR_PROFILE * args.seconds if args.profile else 0.0

    def record(progress: str) -> None:
        results["seconds"] = round(time.monotonic() - begun, 1)
        results["targets"] = verdicts.targets(rows, results["rows"], args.ranks, args.device == "cuda")
        results["problems"] = verdicts.problems(results["rows"])
        write(results, args.out)
        print(f"[{results['seconds']:5.0f} s] {progress}", file=sys.stderr, flush=True)

    for row in rows:
        left = args.seconds - reserve - (time.monotonic() - begun)
        if left < LEAST * args.seconds:
            results["left_out"].append(row.name)
            continue
        result = measure(row, args, min(left, row.seconds))
        results["rows"][row.name] = result
        record(f"{row.name}: {row.title}")
    if args.profile:
        left = args.seconds - (time.monotonic() - begun)
        results["profile"] = profile_of_gap(rows, results, args, left)
    record("done")
    return results


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--ranks", type=int, help="devices or CPU processes; default: all GPUs, or one process"
    )
    parser.add_argument("--only", default="", help="names of rows, or parts of them, separated by commas")
    parser.add_argument("--list", action="store_true", help="print the rows and end")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="deadline of the whole run")
    parser.add_argument("--limit-gb", type=float, help="use no more of a device's memory than this")
    parser.add_argument("--no-profile", dest="profile", action="store_false")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "build" / "gpu", help="folder of the results (build/gpu)"
    )
    parser.add_argument(
        "--inject",
        action="append",
        default=[],
        metavar="VARIANT=FAULT",
        help=f"let a variant fail on purpose, to see how it is reported: {', '.join(FAULTS)}",
    )
    parser.add_argument("--work", nargs=2, metavar=("FOLDER", "RANK"), help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None, rows: Sequence[Row] = ROWS) -> int:
    args = parsed(arguments)
    if args.work:
        from benchmarks.gpu_rows.worker import work

        work(Path(args.work[0]), int(args.work[1]))
    known = rows
    rows, unknown = chosen(rows, args.only)
    if args.list or unknown:
        print("\n".join(f"{row.name}: {row.title}" for row in (known if unknown else rows)))
    if unknown:
        print(
            f"gpu: no row has {' or '.join(map(repr, unknown))} in its name; these are all", file=sys.stderr
        )
    if args.list or unknown:
        return 2 if unknown else 0
    variants = {variant.name for row in rows for variant in row.variants}
    for fault in args.inject:
        name, _, kind = fault.partition("=")
        if name not in variants or kind not in FAULTS:
            print(
                f"gpu: --inject {fault!r}: expected VARIANT=FAULT with one of {', '.join(sorted(variants))} and one of "
                f"{', '.join(FAULTS)}",
                file=sys.stderr,
            )
            return 2
    cuda = args.device == "cuda"
    if cuda and not torch.cuda.is_available():
        print(
            "gpu: this Python's torch finds no CUDA device. --device cpu runs without one.", file=sys.stderr
        )
        return 2
    args.ranks = args.ranks or (torch.cuda.device_count() if cuda else 1)
    results = measure_all(rows if cuda else [row.tiny() for row in rows], args)
    print(tables.text_of(results), end="")
    print(f"results: {args.out / file_stem(results)}.txt and .json", file=sys.stderr)
    return 1 if results["problems"] else 0


if __name__ == "__main__":
    end_processes_on_sigterm()
    sys.exit(main())
