"""The processes of one row, one for each rank, and the figures that they wrote.

The variants without a graph share processes. Each variant with a graph has its own: on some versions of torch a failed
capture leaves a process in which nothing works. If a variant hangs, aborts or breaks the device, the variants after it
run in new processes. Nothing here trusts the processes: they may hang, be killed, or leave half a line.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.gpu_rows.failures import ending, stack_place
from benchmarks.gpu_rows.processes import end, end_if_asked, output_of, start
from benchmarks.gpu_rows.rows import Row, Variant

GRACE = 10.0
"""Seconds that the other ranks get to end by themselves when one has failed, and all of them after the deadline."""
ONE_TURN, WITH_COMPILER = 0.6, 0.85
"""The part of the processes' time that one variant may take before it counts as hung. A compiler that begins cold takes
a minute for the first variant."""
LEAST = 25.0
"""Seconds that processes get at least, if the row has them: they import torch and build a model first."""


@dataclass
class Ended:
    """How the processes of some variants ended.

    Attributes:
        lines: the lines of all ranks.
        error: why they did not end well; empty if they did. ``output``: all that they printed then.
        late: whether they were ended because their time was over.
        cut: whether that was the time of the whole run, in which the row had less than its own limit.
    """

    lines: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""
    output: str = ""
    late: bool = False
    cut: bool = False


def run_row(
    row: Row, program: Path, order: dict[str, Any], environment: dict[str, str], seconds: float
) -> dict[str, Any]:
    """Run all variants of a row. ``seconds``: its limit, or what is left of the whole run's time if that is less.

    Returns:
        ``lines`` of all ranks; ``error`` of processes that failed before or between variants, with their ``output``;
        ``late``, whether that was because the time was over; ``seconds``.
    """
    begun = time.monotonic()
    waiting = [tuple(v for v in row.variants if not v.graph), *[(v,) for v in row.variants if v.graph]]
    waiting = [variants for variants in waiting if variants]
    whole = Ended()
    while waiting:
        left = seconds - (time.monotonic() - begun)
        variants = waiting.pop(0)
        share = left * len(variants) / (len(variants) + sum(map(len, waiting)))
        limit = min(left, max(share, LEAST))
        if whole.lines and limit < LEAST / 2:
            whole.lines += [{"variant": variant.name, "late": True} for variant in variants]
            continue
        at_deadline = limit == left and seconds < row.seconds
        ended = _run(replace(row, variants=variants), program, order, environment, limit, at_deadline)
        whole.lines += ended.lines
        rest = _not_begun(variants, ended.lines)
        if ended.error and not _blame(whole, ended) and len(rest) == len(variants):
            continue  # they failed before the first variant, and would again
        if ended.error and rest:
            waiting.insert(0, rest)
    return {
        "lines": whole.lines,
        "error": whole.error,
        "output": whole.output,
        "late": whole.late,
        "seconds": round(time.monotonic() - begun, 1),
    }


def _not_begun(variants: tuple[Variant, ...], lines: list[dict[str, Any]]) -> tuple[Variant, ...]:
    names = {line.get("variant") for line in lines}
    return tuple(variant for variant in variants if variant.name not in names)


def _blame(whole: Ended, ended: Ended) -> bool:
    """Add the failure to the variant that ran. False: none ran, so the row has failed."""
    running = ""
    for line in ended.lines:
        name = line.get("variant", "")
        running = name if "begun" in line else "" if name == running else running
    if running:
        key = "cut" if ended.cut else "error"
        whole.lines.append({"variant": running, key: ended.error, "output": ended.output})
    if not running and not any("error" in line and "variant" in line for line in ended.lines):
        whole.error = whole.error or ended.error
        whole.output += ended.output
        whole.late = whole.late or ended.late
        return False
    return True


def _run(
    row: Row,
    program: Path,
    order: dict[str, Any],
    environment: dict[str, str],
    seconds: float,
    at_deadline: bool,
) -> Ended:
    """Run some variants of a row in one process for each rank. ``at_deadline``: the whole run has no more seconds."""
    begun = time.monotonic()
    ranks: int = order["ranks"]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        order = order | {"row": row.as_json(), "deadline": time.time() + max(0.0, seconds - GRACE)}
        (folder / "order.json").write_text(json.dumps(order))
        logs = [folder / f"rank{rank}.log" for rank in range(ranks)]
        processes: list[subprocess.Popen[bytes]] = []
        states: list[int | None] = []
        try:
            for rank, log in enumerate(logs):
                command = [sys.executable, str(program), "--work", str(folder), str(rank)]
                processes.append(start(command, log, environment, folder))
            turn = (WITH_COMPILER if row.compile else ONE_TURN) * (row.seconds if at_deadline else seconds)
            states = _wait(processes, begun + seconds, folder / "rank0.jsonl", turn)
            at_deadline = at_deadline and time.monotonic() > begun + seconds
        finally:
            end(processes)
        lines = [line for rank in range(ranks) for line in _lines(folder / f"rank{rank}.jsonl")]
        if all(state == 0 for state in states):
            return Ended(lines)
        outputs = [output_of(log) for log in logs]
    failed = {rank: state for rank, state in enumerate(states) if state}
    error = _in_words(states, time.monotonic() - begun, outputs, at_deadline)
    output = "\n".join(f"rank {rank}:\n{text}" for rank, text in enumerate(outputs) if text.strip())
    return Ended(lines, error, output, late=not failed, cut=at_deadline and not failed)


def _wait(
    processes: list[subprocess.Popen[bytes]], deadline: float, progress: Path, turn_seconds: float
) -> list[int | None]:
    """Wait for the end of all, until the deadline, or until a turn takes too long.

    Returns the status of each; None: it still runs.
    """
    while True:
        end_if_asked()
        states = [process.poll() for process in processes]
        if None not in states or time.monotonic() > deadline:
            return states
        if any(states):
            deadline = min(deadline, time.monotonic() + GRACE)
        last = (_lines(progress) or [{}])[-1]
        if time.time() - last.get("begun", time.time()) > turn_seconds:
            return states
        time.sleep(0.1)


def _in_words(states: list[int | None], seconds: float, outputs: list[str], at_deadline: bool) -> str:
    """The ranks that failed, or else the places where they hang."""
    several = len(states) > 1
    ends = {
        rank: ending(state, seconds, outputs[rank], at_deadline)
        for rank, state in enumerate(states)
        if state != 0
    }
    causes = {rank: text for rank, text in ends.items() if states[rank] is not None} or ends
    words = [f"rank {rank} {text}" if several else text for rank, text in causes.items()]
    for rank, state in enumerate(states):
        if state is None and rank not in causes and (place := stack_place(outputs[rank])):
            words.append(f"rank {rank} was in {place}")
    return "; ".join(words)


def _lines(path: Path) -> list[dict[str, Any]]:
    lines = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        try:
            lines.append(json.loads(line))
        except ValueError:  # the process was ended while it wrote
            continue
    return lines
