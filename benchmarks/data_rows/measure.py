"""How a task is measured: a fresh process gets an order, runs one function, and prints its figures as its last line.

Time and processor time are those of the task, without imports before it. Processor time has all threads and all child
processes. Memory is what the processes of the task hold at most, all together: private pages, without the page cache.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
INTERVAL = 0.02
"""Seconds between two looks at the memory."""


@dataclass(frozen=True)
class Order:
    """A task of one engine: `engine` is the module and `task` the function."""

    engine: str
    task: str
    documents: str
    """.jsonl of the corpus."""
    tokenizer: str
    """A folder with tokenizer.json."""
    cache: str
    """A folder of the engine's own."""
    processes: int = 1
    """Processes that make tokens and samples."""
    workers: int = 0
    """Threads or processes that make batches."""
    packing: str = "split"
    seq_len: int = 1024
    batch: int = 8
    """Samples of a batch."""
    resume: bool = False
    """Begin in the middle of the epoch."""
    begun: float = 0.0
    """`time.monotonic()` at which the process was started."""

    def since_start(self) -> float:
        return time.monotonic() - self.begun


class Watch:
    """Time and processor time from here on."""

    def __init__(self) -> None:
        self._wall, self._processor = time.perf_counter(), _processor()

    def figures(self) -> dict[str, float]:
        return {"seconds": time.perf_counter() - self._wall, "processor": _processor() - self._processor}


class Failed(RuntimeError):
    """A task ended without figures. Its text is the last line of the task's error."""


def run(order: Order, *, memory: bool) -> dict[str, Any]:
    """The figures of a task. With `memory` also ``memory``, bytes; this slows the task. Raises Failed."""
    path = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
    environment = os.environ | {
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",  # a process is a core
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": order.cache + ".hf",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "PYTHONDONTWRITEBYTECODE": "",
    }
    begun = time.monotonic()
    order = Order(**{**asdict(order), "begun": begun})
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.data_rows", json.dumps(asdict(order))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    peak = _Peak(process.pid) if memory else None
    output, errors = process.communicate()
    if process.returncode:
        lines = [line for line in errors.splitlines() if line.strip()]
        raise Failed(lines[-1] if lines else f"status {process.returncode}")
    figures: dict[str, Any] = json.loads(output.splitlines()[-1])
    return figures if peak is None else {**figures, "memory": peak.end()}


def work(text: str) -> None:
    """The work of a process on its order."""
    order = Order(**json.loads(text))
    figures = getattr(importlib.import_module(f"benchmarks.data_rows.{order.engine}"), order.task)(order)
    print(json.dumps(figures), flush=True)


class _Peak:
    """The largest sum of private memory of a process and its descendants. Needs /proc."""

    def __init__(self, pid: int) -> None:
        self._pid, self._largest, self._ended = pid, 0, threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def end(self) -> int:
        self._ended.set()
        self._thread.join()
        return self._largest

    def _look(self) -> None:
        while not self._ended.wait(INTERVAL):
            self._largest = max(self._largest, sum(map(_private, _family(self._pid))))


def _processor() -> float:
    times = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in times)


def _family(pid: int) -> list[int]:
    family = [pid]
    for each in family:  # grows on the way
        for tasks in Path(f"/proc/{each}/task").glob("*/children"):
            try:
                family += map(int, tasks.read_text().split())
            except OSError:  # the process has ended
                pass
    return family


def _private(pid: int) -> int:
    """Bytes of anonymous and shared memory. A page that several processes share counts once over all of them."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    names = ("Pss_Anon:", "Pss_Shmem:")
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(names))
