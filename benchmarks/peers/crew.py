"""The processes of one contender, one for each rank. They wait between questions and use no processor meanwhile.

Every contender has processes of its own, because engines change torch for the process they run in, and because one that
ends its processes or hangs must not end the comparison.
"""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing import connection
from pathlib import Path
from typing import Any

from benchmarks.peers.worker import Job, work

PATIENCE = 180.0
"""Seconds for an answer: the first one imports the engine's package and builds the model."""
GRACE = 5.0
"""Seconds that a rank gets to end by itself, or to say why it failed when another one has failed."""


class ContenderFailed(Exception):
    """The contender does not run here; the text is the reason."""


class Crew:
    def __init__(self, job: Job, folder: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        self.job = job
        self.processes, self.pipes = [], []
        name = f"{time.monotonic_ns()}"
        for rank in range(1 if job.backend == "fake" else job.ranks):
            ours, theirs = context.Pipe()
            log = str(folder / f"{name}.{rank}.log")
            arguments = (job, rank, str(folder / name), theirs, log)
            process = context.Process(target=work, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)

    def ask(self, question: str, *arguments: Any) -> list[Any]:
        """Every rank's answer. Ends the processes and raises ContenderFailed if there is none."""
        answers: dict[int, Any] = {}
        try:
            for pipe in self.pipes:
                pipe.send((question, arguments))
            deadline = time.monotonic() + PATIENCE
            while len(answers) < len(self.pipes):
                waiting = [pipe for rank, pipe in enumerate(self.pipes) if rank not in answers]
                ready = connection.wait(waiting, max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise ContenderFailed(f"no answer within {PATIENCE:.0f} s")
                for rank, pipe in enumerate(self.pipes):
                    if pipe in ready:
                        good, value = pipe.recv()
                        if not good:
                            raise ContenderFailed(value)
                        answers[rank] = value
        except (EOFError, OSError):  # a process ended without a word
            self.end()
            codes = ", ".join(str(process.exitcode) for process in self.processes)
            raise ContenderFailed(f"its processes ended with {codes}") from None
        except ContenderFailed:
            self.end()
            raise
        return [answers[rank] for rank in range(len(self.pipes))]

    def end(self) -> None:
        for pipe in self.pipes:
            try:
                pipe.send(None)
            except OSError:  # it has ended
                pass
        deadline = time.monotonic() + GRACE
        for process in self.processes:
            process.join(max(0.1, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
