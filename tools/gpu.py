#!/usr/bin/env python3
"""Training, graphs, planned memory and NCCL on a GPU, in three minutes at most.

``make gpu``, or ``PYTHONPATH=src python tools/gpu.py``. Its stages:

1. Versions, the driver, the function that planned memory needs on torch 2.11, and locks of pages.
2. One training beside plain torch in float32.
3. At once: bfloat16, waits of the host, a CUDA graph, the arena, both, and each of these with NCCL on one rank.
4. At once: the tests marked ``gpu`` in groups, and the trainer where its packages are installed.

Each part is a process of its own with a limit, and none ends the others. A table comes last. ``gpu.txt`` and
``gpu.json`` in ``build/gpu``, or where --out says, have the table, and of each failure the first error, all tracebacks
with C++ frames, the stacks of a process that hung or aborted, its output, and the device's memory. They are written
after each part. The program needs torch and no installation. ``make bench-gpu`` measures time and memory.

``--device cpu`` tries the same without a GPU, in a minute. It adds a hang, an abort, a chain of errors and a failed
capture, and checks that each is reported as what it is; ``--inject`` does so on a GPU, too.

Exit status: 0 if all is well, 1 if a part failed or a failure on purpose was reported wrongly, 2 without a GPU.
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
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [path for path in (str(ROOT / "src"), str(ROOT)) if path not in sys.path]

from benchmarks.gpu_rows.failures import ending, shortened  # noqa: E402
from benchmarks.gpu_rows.faults import EXPECTED  # noqa: E402
from benchmarks.gpu_rows.processes import (  # noqa: E402
    end,
    end_if_asked,
    end_processes_on_sigterm,
    output_of,
    start,
)

SECONDS = {"cuda": 170.0, "cpu": 600.0}
"""The deadline of the whole run. A GPU may be lent by the minute; a CPU that is busy with other work is only slow."""
STARTING = 60.0
"""Seconds that a process may take to import torch, before its limit begins."""
LEAST = 5.0
"""Seconds without which no part begins."""
GPU = "tests/engine/test_gpu.py"
GROUPS: dict[str, tuple[str, ...]] = {
    "equal": (GPU, "-k", "equals_the_plain_model"),
    "memory": (GPU, "-k", "memory_at_rest or allocated_by_the_engine"),
    "streams": (GPU, "-k", "streams_are_in_order"),
    "offload": (GPU, "-k", "offload"),
    "graph dynamic": (GPU, "-k", "graph_replay and dynamic"),
    "graph max_pool": (GPU, "-k", "graph_replay and max_pool"),
    "graph arena": (GPU, "-k", "graph_replay and arena"),
    "two processes": ("tests/engine/test_sharing_a_device.py",),
    "deferred": ("tests/init/test_devices.py",),
}
"""The tests marked gpu."""
TRAINER_TESTS = (
    "tests/train/data/test_loader.py",
    "tests/train/models/native/test_documents.py",
    "tests/train/models/test_documents_transformers.py",
    "tests/train/step/account/test_where_time_goes.py",
)
"""Those that need the trainer's packages."""
PYTEST = ("-q", "-rs", "-m", "gpu", "-o", "minversion=6", "-p", "no:cacheprovider", "--tb=long")


@dataclass
class Part:
    """One process.

    Attributes:
        name: its name in the table.
        command: what runs; ``{result}`` stands for the file of its result.
        limit: seconds after it has begun.
        expected: parts of the line that reports it, for a failure on purpose.
        verdict, found, seconds, details: the outcome: "ok", or what went wrong.
    """

    name: str
    command: list[str]
    limit: float = 45.0
    expected: tuple[str, ...] = ()
    verdict: str = ""
    found: str = ""
    seconds: float = 0.0
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def is_well(self) -> bool:
        return self.verdict == "ok" or self.verdict.startswith(("not tried", "reported rightly"))


def part(name: str, device: str, limit: float = 45.0, expected: tuple[str, ...] = ()) -> Part:
    command = [sys.executable, "-m", "tools.gpu_parts", name, "--device", device, "--result", "{result}"]
    return Part(name, command, limit, expected)


def group(name: str, arguments: Sequence[str], limit: float = 80.0) -> Part:
    return Part(f"tests: {name}", [sys.executable, "-m", "pytest", *PYTEST, *arguments], limit)


def left_out(name: str, reason: str) -> Part:
    return Part(name, [], verdict=f"not tried: {reason}")


def faults(device: str) -> list[Part]:
    capture = (*EXPECTED["capture"], "cannot be captured in a CUDA graph")
    expected = EXPECTED | {"capture": capture}
    limits = {"hang": 3.0}
    return [part(f"fault-{name}", device, limits.get(name, 45.0), expected[name]) for name in expected]


def stages(device: str, inject: bool, only: Sequence[str]) -> list[list[Part]]:
    """The parts in their order; those of a stage run at once."""
    cuda = device == "cuda"
    first = [part("versions", device), part("exchange", device, 90.0), part("page-locks", device)]
    if cuda:
        query = shutil.which("nvidia-smi")
        first.append(Part("driver", [query], 20.0) if query else left_out("driver", "no nvidia-smi"))
    if inject:
        first = faults(device) + first
    names = ["bf16", "waits", "graph", "arena", "graph-arena"]
    names += ["nccl", "nccl-waits", "nccl-arena", "nccl-graph", "nccl-graph-arena"]
    last = []
    if importlib.util.find_spec("pytest") is None:
        last.append(left_out("tests", "this Python has no pytest"))
    elif cuda:
        last += [group(name, arguments) for name, arguments in GROUPS.items()]
    else:  # all are skipped: one process shows that they can be collected
        last.append(group("collected", [*dict.fromkeys(arguments[0] for arguments in GROUPS.values())]))
    packages = ("matplotlib", "psutil", "pydantic", "rich")
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        last.append(left_out("trainer", f"it needs {', '.join(missing)}; tools/offline.sh collects them"))
    elif not cuda and "trainer" not in only:
        last.append(left_out("trainer", "it takes half a minute on a CPU; --only trainer tries it"))
    else:
        last.append(part("trainer", device, 90.0))
        last += [group("trainer", TRAINER_TESTS)] if cuda and last[0].command else []
    return [first, [part("plain", device)], [part(name, device) for name in names], last]


class Run:
    """The parts, run stage by stage until the deadline, and the files that say what came of them."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.begun = time.monotonic()
        only = [name.strip() for name in args.only.split(",") if name.strip()]
        self.stages = stages(args.device, args.inject, only)
        known = [each.name for parts in self.stages for each in parts]
        self.unknown = [name for name in only if name not in known]
        if only:
            self.stages = [[each for each in parts if each.name in only] for parts in self.stages]
        self.parts = [each for parts in self.stages for each in parts]
        self.known = known
        self.width = max([len(name) for name in known])
        # A GPU takes all parts of a stage; on a CPU they would only wait for each other.
        self.at_once = 16 if args.device == "cuda" else max(2, os.cpu_count() or 2)

    @property
    def left(self) -> float:
        return self.args.seconds - (time.monotonic() - self.begun)

    def run(self) -> None:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
            for parts in self.stages:
                self._run_stage(parts, Path(name))

    def _run_stage(self, parts: list[Part], folder: Path) -> None:
        waiting = [each for each in parts if each.command]
        running: dict[str, tuple[Part, subprocess.Popen[bytes], float]] = {}
        try:
            while waiting or running:
                end_if_asked()
                # A part that hangs needs no core.
                busy = sum(each.name != "fault-hang" for each, _, _ in running.values())
                while waiting and busy < self.at_once:
                    each = waiting.pop(0)
                    if self.left < LEAST:
                        each.verdict = "left out: no time"
                        continue
                    running[each.name] = (each, self._start(each, folder), time.monotonic())
                    busy += each.name != "fault-hang"
                done = []
                for each, process, begun in running.values():
                    status = process.poll()
                    if status is not None or self._is_late(each, begun, folder):
                        done.append((each, process, status, time.monotonic() - begun))
                end(
                    [process for _, process, _, _ in done]
                )  # together: each may take seconds to write its stacks
                for each, _, status, seconds in done:
                    del running[each.name]
                    self._finish(each, status, seconds, folder)
                time.sleep(0.05)
        finally:
            end([process for _, process, _ in running.values()])

    def _start(self, each: Part, folder: Path) -> subprocess.Popen[bytes]:
        environment = os.environ | {
            "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            "OMP_NUM_THREADS": "1",
        }
        command = [str(folder / f"{each.name}.json") if word == "{result}" else word for word in each.command]
        return start(command, folder / f"{each.name}.log", environment, ROOT)

    def _is_late(self, each: Part, begun: float, folder: Path) -> bool:
        if self.left < 0:
            return True
        elapsed = time.monotonic() - begun
        if "{result}" not in each.command:
            return elapsed > each.limit
        result = _read(folder / f"{each.name}.json")
        if not result:
            return elapsed > STARTING
        return "begun" in result and time.time() - result["begun"] > each.limit

    def _finish(self, each: Part, status: int | None, seconds: float, folder: Path) -> None:
        output = output_of(folder / f"{each.name}.log")
        result = _read(folder / f"{each.name}.json")
        each.seconds = round(seconds, 1)
        line = ending(status, seconds, output, at_deadline=self.left < 0)
        if status is not None and status > 0 and "error" in result:
            line = f"failed: {result['error']}"
        each.details = {"output": output, **result}
        each.verdict = line or "ok"
        each.found = _summary_of_tests(output) if "pytest" in each.command else result.get("found", "")
        if "pytest" in each.command and self.args.device == "cpu" and status == 5:
            each.verdict = "ok"  # there is no test without a GPU
        elif (
            "pytest" in each.command
            and self.args.device == "cuda"
            and status == 0
            and " passed" not in each.found
        ):
            each.verdict = f"skipped: {_reasons_of_skips(output) or 'no test ran'}"
        if each.expected:
            rightly = all(word in each.verdict for word in each.expected)
            each.found = each.verdict
            each.verdict = "reported rightly" if rightly else f"reported wrongly: expected {each.expected}"
        print(f"[{time.monotonic() - self.begun:4.0f} s] {self._line(each)}", file=sys.stderr, flush=True)
        self.write()

    # -- what is left to read

    def problems(self) -> list[str]:
        return [each.name for each in self.parts if not each.is_well]

    def text(self) -> str:
        problems = self.problems()
        lines = [
            f"{self.args.device}, Python {platform.python_version()}, {time.monotonic() - self.begun:.0f} s of "
            f"{self.args.seconds:.0f} s",
            "",
            *map(self._line, self.parts),
            "",
            f"verdict: {'failed: ' + ', '.join(problems) if problems else 'all is well'}",
        ]
        return "\n".join(lines) + "\n"

    def _line(self, each: Part) -> str:
        words = shortened(": ".join(filter(None, (each.verdict, each.found))))
        return f"{each.name:{self.width}} {each.seconds:6.1f} s  {words}"

    def details(self) -> str:
        """All known details of each part that did not end well, or that fails on purpose."""
        lines = []
        for each in self.parts:
            if not each.details or (each.is_well and not each.expected):
                continue
            lines += ["", f"==== {each.name}: {each.verdict}", each.found]
            lines += each.details.get("traceback", "").splitlines()
            if each.details.get("memory"):
                lines.append(f"memory: {each.details['memory']}")
            lines += ["output:", *each.details["output"].splitlines()]
        return "\n".join(lines) + "\n"

    def write(self) -> None:
        out: Path = self.args.out
        out.mkdir(parents=True, exist_ok=True)
        (out / "gpu.txt").write_text(self.text() + self.details())
        names = ("name", "verdict", "found", "seconds", "details")
        parts = [{name: getattr(each, name) for name in names} for each in self.parts]
        (out / "gpu.json").write_text(
            json.dumps({"parts": parts, "problems": self.problems()}, indent=1) + "\n"
        )


def _read(path: Path) -> dict[str, Any]:
    try:
        result = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return result if isinstance(result, dict) else {}


def _summary_of_tests(output: str) -> str:
    lines = [line for line in output.splitlines() if " in " in line and line.rstrip().endswith("s")]
    return lines[-1].strip("= ") if lines else ""


def _reasons_of_skips(output: str) -> str:
    """The reasons that pytest's -rs reports, each once."""
    found = re.findall(r"^SKIPPED \[\d+\] [^ ]+:(?: \w+:)? (.+)$", output, re.MULTILINE)
    return "; ".join(dict.fromkeys(found))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu", help="folder of the results")
    parser.add_argument("--seconds", type=float, help="deadline of the whole run (170; on the CPU 600)")
    parser.add_argument("--only", default="", help="names of parts, separated by commas; --list shows them")
    parser.add_argument("--list", action="store_true", help="print the names of the parts and end")
    parser.add_argument(
        "--inject",
        action=argparse.BooleanOptionalAction,
        help="add failures on purpose (default: with --device cpu)",
    )
    args = parser.parse_args(arguments)
    args.inject = args.device == "cpu" if args.inject is None else args.inject
    args.seconds = SECONDS[args.device] if args.seconds is None else args.seconds
    run = Run(args)
    if args.list or run.unknown:
        print("\n".join(run.known))
        if run.unknown:
            print(f"gpu: no part is called {' or '.join(map(repr, run.unknown))}", file=sys.stderr)
        return 2 if run.unknown else 0
    if args.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            reason = "this Python's torch finds no CUDA device. --device cpu runs without one."
            print(f"gpu: {reason}", file=sys.stderr)
            return 2
    run.run()
    run.write()
    print(run.text(), end="")
    print(f"results: {args.out / 'gpu.txt'} and gpu.json", flush=True)
    return 1 if run.problems() else 0


if __name__ == "__main__":
    end_processes_on_sigterm()
    sys.exit(main())
