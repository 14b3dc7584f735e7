"""Where a rank fails, and how: the address of a fault, and what happens there.

A rank calls :meth:`Plan.at` at each point that it passes. Nothing here knows the trainer.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import psutil

from tools.faults.history import History

PHASES = ("data", "forward", "backward", "clip", "reduce", "optimizer", "after", "validate", "conclude")
"""Phases of a step, in their order, apart from those of a save; ``conclude`` is after the last step."""
WRITER = "writer_program.py"
"""The name of the program that a writer process runs."""


@dataclass(frozen=True)
class Fault:
    """One fault of one attempt.

    Attributes:
        kind: ``kill`` (SIGKILL), ``stop`` (SIGSTOP), ``gil`` (the rank holds the interpreter's lock), ``error``.
        victim: ``rank``, ``host`` (all ranks at once), ``writer``, or ``launcher``.
        rank: the rank that meets it.
        step: the number of the step, from 1; 0 while the run is loaded.
        phase: one of PHASES, ``load``, ``loaded``, ``call`` (a system call of a save), ``saved`` or ``write`` (a system
            call of a writer process).
        number: of the block in forward and backward, or of the system call.
    """

    kind: str
    victim: str
    rank: int
    step: int
    phase: str
    number: int = 0

    def facts(self) -> dict[str, Any]:
        """With other keys than a line of the history has."""
        return {f"fault_{key}": value for key, value in asdict(self).items()}


class Plan:
    """The fault of this rank in this attempt, if it has one."""

    def __init__(self, fault: Fault | None, history: History) -> None:
        self.history = history
        self._fault = fault if fault is not None and fault.rank == history.rank else None

    def at(self, phase: str, step: int, number: int = 0) -> None:
        """Fail here, if that is the plan."""
        fault = self._fault
        if fault is None or (fault.phase, fault.step, fault.number) != (phase, step, number):
            return
        if fault.victim == "writer":
            writers = writers_of(os.getpid())
            if not writers:
                return
            self._fault = None
            self.history.add("fault", **fault.facts())
            writers[0].kill()
            return
        self._fault = None
        self.history.add("fault", **fault.facts())
        fail(fault)


def fail(fault: Fault) -> None:
    """The fault acts on this process. Returns only in a process that was stopped and goes on."""
    if fault.kind == "error":
        raise OSError(errno.EIO, f"planted in {fault.phase}")
    if fault.kind == "gil":
        ctypes.PyDLL(None).sleep(1_000_000)
    if fault.kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
        return
    if fault.victim == "host":
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def is_writer(command: list[str] | None) -> bool:
    """Whether a process with this command line writes checkpoints; None is one that cannot be read."""
    return any(os.path.basename(each) == WRITER for each in command or ())


def writers_of(rank: int) -> list[psutil.Process]:
    """The writer processes of a rank's process."""
    found = []
    for child in psutil.Process(rank).children():
        try:
            if is_writer(child.cmdline()):
                found.append(child)
        except psutil.Error:
            continue
    return found


CALLS = ("open", "pwrite", "write", "fsync", "mkdir", "rename", "unlink", "rmdir")


def count_calls(before: Callable[[int], None], counts: Callable[[], bool]) -> None:
    """From now on ``before`` gets the number of each system call that changes a file, from 1, while ``counts()``.

    The functions of ``os`` are replaced, and the exchange of two names, which Python does not have.
    """
    from shardwright.checkpoint.storage import local_store

    done = 0

    def counted(function: Callable[..., Any], changes: Callable[..., bool]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal done
            if counts() and changes(*arguments):
                done += 1
                before(done)
            return function(*arguments, **options)

        return call

    def creates(path: Any, flags: int, *rest: Any) -> bool:
        return bool(flags & os.O_CREAT)

    for name in CALLS:
        setattr(os, name, counted(getattr(os, name), creates if name == "open" else lambda *rest: True))
    local_store._exchange = counted(local_store._exchange, lambda *rest: True)
