"""Ranks as forked processes that judge samples one after another.

Ranks meet after every sample. If one does not come, or dies, the parent ends all of them, notes a hang or a crash, and
starts new ranks behind that sample.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from shardwright.engine.compat import use_one_gloo_thread
from shardwright.engine.tensors.numbers import reading
from tests.engine.operations.judging import VERDICTS, judge
from tests.engine.operations.table import Form, samples

#: A rank waits so long for another one: the operations take milliseconds.
LIMIT_S = 20.0
#: After so many hangs or crashes of one operation in one form the others of that form are not run.
ENOUGH = 2
_FORK = multiprocessing.get_context("fork")
_SEVERITY = list(VERDICTS)


@dataclass(frozen=True)
class Case:
    """One sample in one form, in one layout, on so many ranks."""

    op: str
    sample: int
    layout: str
    kind: str
    which: str
    ranks: int

    @property
    def group(self) -> tuple[str, str, str, str]:
        return self.op, self.layout, self.kind, "one" if self.which.isdigit() else self.which


@dataclass(frozen=True)
class Plan:
    """The samples that run: at most ``limit`` of each operation, or those with ``numbers`` by its full name."""

    limit: int
    numbers: dict[str, list[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    case: Case
    letter: str
    text: str = ""


def run_table(ops: Sequence[Any], layouts: Sequence[str], ranks: int, plan: Plan) -> Iterator[Verdict]:
    """Judge samples of each operation on so many ranks, in each of the layouts."""
    done: set[Case] = set()
    bad: Counter[tuple[str, str, str, str]] = Counter()
    first = 0
    while first is not None:
        first = yield from _run_once(ops, layouts, ranks, plan, first, done, bad)


def _run_once(
    ops: Sequence[Any],
    layouts: Sequence[str],
    ranks: int,
    plan: Plan,
    first: int,
    done: set[Case],
    bad: Counter[tuple[str, str, str, str]],
) -> Any:
    """Run until all operations are done, or ranks have to be ended. Returns the operation with which to go on."""
    skipped = {group for group, count in bad.items() if count >= ENOUGH}
    with tempfile.TemporaryDirectory() as folder:
        barrier = _FORK.Barrier(ranks)
        ends = [_FORK.Pipe(duplex=False) for _ in range(ranks)]
        started = []
        for rank, (_, sender) in enumerate(ends):
            arguments = (rank, ranks, folder, sender, barrier, ops, layouts, plan, first, done, skipped)
            process = _FORK.Process(target=_rank, args=arguments, daemon=True)
            process.start()
            sender.close()
            started.append(process)
        readers = [reader for reader, _ in ends]
        try:
            return (yield from _collect(readers, ops, done, bad))
        finally:
            for process in started:
                if process.is_alive() and process.pid is not None:
                    os.kill(process.pid, signal.SIGKILL)
                process.join()
            for reader in readers:
                reader.close()


def _collect(readers: list[Connection], ops: Sequence[Any], done: set[Case], bad: Counter[Any]) -> Any:
    """Take the ranks' messages, and yield a verdict for each case that all ranks have judged."""
    ranks = len(readers)
    position = 0
    current: list[Case | None] = [None] * ranks
    given: dict[Case, list[tuple[str, str]]] = {}
    late: float | None = None
    open_readers = list(readers)
    while open_readers:
        ready = wait(open_readers, timeout=0.5)
        failed = ""
        for reader in ready:
            try:
                message = reader.recv()
            except EOFError:
                open_readers.remove(reader)  # type: ignore[arg-type]
                failed = "c"
                continue
            number = readers.index(reader)  # type: ignore[arg-type]
            match message:
                case "operation", index:
                    position = index
                case "begin", case:
                    current[number] = case
                case "verdict", case, letter, text:
                    given.setdefault(case, []).append((letter, text))
                    if len(given[case]) == ranks:
                        done.add(case)
                        yield _merged(case, given.pop(case))
                case ("finished",):
                    open_readers.remove(reader)  # type: ignore[arg-type]
                case "left", _:
                    failed = "h"
        if not ready:
            late = late or time.monotonic()
            failed = failed or ("h" if time.monotonic() - late > 2 * LIMIT_S else "")
        else:
            late = None
        if failed:
            case = next((c for c in current if c is not None and c not in done), None)
            if case is None:
                raise RuntimeError("ranks ended before their first sample")
            bad[case.group] += 1
            done.add(case)
            texts = [text for _, text in given.get(case, []) if text]
            yield Verdict(case, failed, texts[0] if texts else "")
            return position
    return None


def _merged(case: Case, given: list[tuple[str, str]]) -> Verdict:
    letters = {letter for letter, _ in given}
    worst = max(letters, key=_SEVERITY.index)
    if len(letters) > 1 and worst != "W":
        worst = "d"
    return Verdict(case, worst, next((text for letter, text in given if text), ""))


def _rank(rank: int, ranks: int, folder: str, sender: Connection, barrier: Any, *rest: Any) -> None:
    try:
        warnings.simplefilter("ignore")
        threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 2)
        torch.set_num_threads(1)
        use_one_gloo_thread()
        reading.LIMIT = timedelta(seconds=LIMIT_S / 2)
        store = dist.FileStore(f"{folder}/store", ranks)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
        )
        _serve(ranks, sender, barrier, *rest)
        sender.send(("finished",))
    except threading.BrokenBarrierError:
        sender.send(("left", ""))
    except BaseException:
        traceback.print_exc()
    os._exit(0)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _serve(
    ranks: int,
    sender: Connection,
    barrier: Any,
    ops: Sequence[Any],
    layouts: Sequence[str],
    plan: Plan,
    first: int,
    done: set[Case],
    skipped: set[tuple[str, str, str, str]],
) -> None:
    mesh = init_device_mesh("cpu", (ranks,))
    gc.collect()
    gc.freeze()
    gc.disable()  # a collection may end units, and with them groups, at other times on other ranks
    for index in range(first, len(ops)):
        op = ops[index]
        sender.send(("operation", index))
        for sample in samples(op, plan.limit, plan.numbers.get(op.full_name)):
            kept: dict[str, Any] = {}
            for form in sample.forms():
                for layout in layouts:
                    case = _case(op, sample.number, layout, form, ranks)
                    if case in done:
                        continue
                    if case.group in skipped:
                        sender.send(("verdict", case, "h", "not run: others of this operation hang"))
                        continue
                    sender.send(("begin", case))
                    letter, text = judge(sample, form, layout, mesh, kept)
                    sender.send(("verdict", case, letter, text))
                    barrier.wait(LIMIT_S)
        barrier.wait(LIMIT_S)
        gc.collect()


def _case(op: Any, sample: int, layout: str, form: Form, ranks: int) -> Case:
    return Case(op.full_name, sample, layout, form.kind, str(form.which), ranks)
