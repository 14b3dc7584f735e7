"""The program of a writer process: ``python writer_program.py TRAINER IS_MAIN_THREAD COMMANDS RESULTS MEMORY PIDFD``.

A trainer starts this file by its path, so nothing is imported before the process is bound to the trainer's life and
deaf to the signals of the job. Importing torch takes seconds on a busy machine, and the trainer may die meanwhile.
Nothing here may import anything but the standard library, outside the end of :func:`main`.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import threading

_IGNORED = (
    "SIGINT",
    "SIGTERM",
    "SIGHUP",
    "SIGUSR1",
    "SIGUSR2",
)  #: that schedulers send to all processes of a job
_PR_SET_PDEATHSIG = 1


def live_with(trainer: int, descriptor: int, is_main_thread: bool) -> None:
    """End this process as soon as the trainer ends.

    The system's own signal is for the end of the thread that has started this process, so it is used only for a main
    thread. ``descriptor`` (a pidfd, or -1) wakes the thread here; without it, it looks twice a second.
    """
    if is_main_thread:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def watch() -> None:
        # A trainer that ended before the call above has another process as its child's parent already.
        while os.getppid() == trainer:
            poller = select.poll()
            if descriptor >= 0:
                poller.register(descriptor, select.POLLIN)
            if poller.poll(500):
                break
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main(arguments: list[str]) -> None:
    """``arguments``: the trainer's process, whether its main thread called, and descriptors, in the order above.

    COMMANDS, RESULTS and MEMORY are those of :class:`shardwright.checkpoint.asynchronous.background.BackgroundWriter`.
    """
    trainer, is_main_thread, commands, results, memory, pidfd = map(int, arguments)
    for name in _IGNORED:
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    live_with(trainer, pidfd, bool(is_main_thread))

    from shardwright.checkpoint.asynchronous.background import BackgroundWriter
    from shardwright.checkpoint.asynchronous.messages import JsonLines

    BackgroundWriter(JsonLines(commands), results, memory).run()


if __name__ == "__main__":
    main(sys.argv[1:])
