"""A trainer's handle of its writer process: started, given jobs, heard, and found dead.

The process runs ``writer_program.py``. Nothing here communicates with other ranks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path

from shardwright.checkpoint.asynchronous.messages import Command, JsonLines, Report, send

PROGRAM = Path(__file__).absolute().with_name("writer_program.py")
_LOOKS = 0.5  #: seconds between looks whether the process lives, where the pipe does not say it
_END = 5.0  #: seconds that the end of the process may take


class WriterProcess:
    """One process that writes what is in the shared memory of descriptor ``memory``.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, memory: int) -> None:
        self.trainer = os.getpid()
        commands, self._commands = os.pipe()
        results, its_results = os.pipe()
        self._results: JsonLines[Report] = JsonLines(results)
        theirs = [commands, its_results]
        pidfd = -1
        with contextlib.suppress(OSError):  # an older system; the writer then looks twice a second
            pidfd = os.pidfd_open(self.trainer)
            theirs.append(pidfd)
        is_main_thread = threading.current_thread() is threading.main_thread()
        numbers = [self.trainer, int(is_main_thread), commands, its_results, memory, pidfd]
        try:
            # A session of its own: a terminal's signals, and those to the trainer's process group, are for the trainer.
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(PROGRAM), *map(str, numbers)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[*theirs, memory],
                start_new_session=True,
                env=os.environ | {"PYTHONPATH": _search_path(), "OMP_NUM_THREADS": "1"},
            )
        except BaseException:
            os.close(results)
            os.close(self._commands)
            raise
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        self._end = weakref.finalize(self, _end, self._process, self.trainer, (results, self._commands))
        self._end.atexit = False  # the process sees itself that its trainer ends

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def lives(self) -> bool:
        return self._end.alive and self._process.poll() is None

    def send(self, message: Command) -> None:
        """Give the process a command. If it is dead, nothing happens: :meth:`receive` notices."""
        with contextlib.suppress(OSError):
            send(self._commands, message)

    def receive(self, wait: bool) -> Report | None:
        """Its next message. None if there is none yet and ``wait`` is false, or if the process is dead.

        A wait ends when the process does: it looks for that twice a second.
        """
        while (message := self._results.next(_LOOKS if wait else 0.0)) is None:
            if not wait:
                return None
            if self._results.ended or not self.lives:
                return self._results.next(0.0)
        return message

    def death(self) -> str | None:
        """Return the reason for which the process has died, in words; None while it lives."""
        if self._results.ended:  # which it is a moment before the process has ended
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END)
        status = self._process.poll()
        if status is None:
            return None
        if status < 0:
            with contextlib.suppress(ValueError):
                return f"the writer process {self.pid} was ended by {signal.Signals(-status).name}"
        return f"the writer process {self.pid} has ended with status {status}"

    def end(self) -> None:
        """End it at once."""
        self._end()


def _search_path() -> str:
    """Folders in which this process finds modules, so that the writer finds the same ones."""
    own = str(Path(__file__).absolute().parents[3])
    return os.pathsep.join(dict.fromkeys([own, *(os.path.abspath(each) for each in sys.path if each)]))


def _end(process: subprocess.Popen[bytes], trainer: int, descriptors: tuple[int, ...]) -> None:
    if os.getpid() != trainer:  # a child by fork has a copy of the handle, and its own descriptors
        return
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):  # a disk that does not answer keeps it in the system
        process.wait(_END)
    for descriptor in descriptors:
        os.close(descriptor)
