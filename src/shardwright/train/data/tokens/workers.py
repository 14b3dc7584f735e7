"""Processes that encode spans: results come in the order of the spans, whatever process made them.

A process is started as a fresh interpreter, not forked: this one may have threads, CUDA and process groups. It runs
nothing of the user's script, and it ends when its pipe closes, so that none outlives this process.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from shardwright.train.data.sources.documents import FilePart
from shardwright.train.data.tokens.encoding import EncodingJob, PartCounts, encode_span
from shardwright.train.errors import UserError

AHEAD = 4  #: spans per process that may be done before those in front of them

_PROGRAM = (
    "import sys; sys.path[:] = {path!r}; from shardwright.train.data.tokens.workers import serve; serve()"
)


def encoded(
    job: EncodingJob, spans: Iterable[FilePart], folder: Path, processes: int
) -> Generator[tuple[FilePart, int, PartCounts], None, None]:
    """Each span in order with its number and what it gave; its part files are in the folder.

    Raises:
        UserError: of the first span, in order, whose data is damaged; or a process has died.
    """
    if processes > 1:
        yield from _in_processes(job, spans, folder, processes)
        return
    for number, span in enumerate(spans):
        yield span, number, encode_span(job, span, folder, number)


def _in_processes(
    job: EncodingJob, spans: Iterable[FilePart], folder: Path, processes: int
) -> Generator[tuple[FilePart, int, PartCounts], None, None]:
    workers = [_Worker(job, folder) for _ in range(processes)]
    idle: SimpleQueue[_Worker] = SimpleQueue()
    for worker in workers:
        idle.put(worker)

    def encode(number: int, span: FilePart) -> PartCounts:
        worker = idle.get()
        try:
            return worker.encode(number, span)
        finally:
            idle.put(worker)

    running: deque[tuple[FilePart, int, Future[PartCounts]]] = deque()
    problem: UserError | None = None
    todo = enumerate(spans)
    pool = ThreadPoolExecutor(processes)
    try:
        while True:
            try:
                while problem is None and len(running) < AHEAD * processes:
                    number, span = next(todo)
                    running.append((span, number, pool.submit(encode, number, span)))
            except StopIteration:
                pass
            except UserError as error:  # of the header of a file: spans before it come first
                problem = error
            if not running:
                break
            span, number, future = running.popleft()
            yield span, number, future.result()
        if problem is not None:
            raise problem
    finally:
        for worker in workers:
            worker.close()
        pool.shutdown(cancel_futures=True)


class _Worker:
    """One process. It starts with its first span."""

    def __init__(self, job: EncodingJob, folder: Path) -> None:
        self._first = pickle.dumps((job, folder))
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    def encode(self, number: int, span: FilePart) -> PartCounts:
        try:
            pipe, answers = self._pipes()
            pickle.dump((number, span), pipe)
            pipe.flush()
            result: PartCounts | UserError | BaseException = pickle.load(answers)
        except (OSError, EOFError, pickle.UnpicklingError):
            raise UserError(self._end()) from None
        if isinstance(result, BaseException):
            raise result
        return result

    def close(self) -> None:
        self._closed = True
        process = self._process
        if process is not None:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                assert stream is not None
                try:
                    stream.close()
                except OSError:
                    pass  # what it has not read yet is of no use

    def _pipes(self) -> tuple[Any, Any]:
        if self._process is None:
            if self._closed:
                raise EOFError
            # A process must not use the threads of all cores, for each core has a process.
            environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM.format(path=sys.path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
            )
            assert self._process.stdin is not None
            self._process.stdin.write(self._first)
        return self._process.stdin, self._process.stdout

    def _end(self) -> str:
        status = self._process.wait() if self._process is not None else 0
        how = f"signal {-status} ({signal.Signals(-status).name})" if status < 0 else f"status {status}"
        return (
            f"data.workers: expected {os.path.basename(sys.executable)} processes that make tokens, found that one "
            f"ended with {how}; if memory ran out, set fewer data.workers"
        )


def serve() -> None:
    """The loop of a worker process: it reads spans from its standard input and answers with their parts."""
    # An interrupt also reaches the process that started this one, which then ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # so that nothing that a library prints gets among the answers
    try:
        job, folder = pickle.load(requests)
        while True:
            number, span = pickle.load(requests)
            try:
                result: Any = encode_span(job, span, folder, number)
            except Exception as error:
                result = _portable(error)
            pickle.dump(result, answers)
            answers.flush()
    except (EOFError, BrokenPipeError):
        os._exit(0)


def _portable(error: Exception) -> Exception:
    """Return the error, if another process can read it."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
