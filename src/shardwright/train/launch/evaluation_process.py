"""The process that evaluates tasks of a checkpoint beside a run: `shardwright evaluate`, started and ended here.

Both ends of the agreement between the two processes are in this file. Nothing here exports, evaluates or reports.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

from shardwright.train.config.sections.validation import ValidationConfig
from shardwright.train.errors import UserError
from shardwright.train.launch.environment import (
    ATTEMPT_VARIABLE,
    FOLDER_VARIABLE,
    LAUNCHER_VARIABLE,
    path_to_ourselves,
)
from shardwright.train.run.folder import RunFolder
from shardwright.train.run.writing import writing

RUN_VARIABLE = "SHARDWRIGHT_EVALUATES_FOR"
"""The process of the run for which `shardwright evaluate` computes. It ends with it."""
SECONDS_TO_END = 5.0
"""From the request to end to the kill: the process removes its temporary folder."""
SECONDS_TO_CHECK = 120.0
"""Limit of a look at the names of tasks, for which the other ranks wait. It takes a quarter of a minute."""
NICE = 10
"""Added to the niceness: training comes first."""
OF_A_RANK = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR",
    "MASTER_PORT", FOLDER_VARIABLE, LAUNCHER_VARIABLE, ATTEMPT_VARIABLE,
)  # fmt: skip
OF_RANKS = ("TORCHELASTIC_", "ROLE_", "OMPI_COMM_WORLD_", "PMI_", "MV2_COMM_WORLD_")
"""Begins of variables by which lm-eval and accelerate would take the process for a rank, and wait for the others."""


class EvaluationProcess:
    """`shardwright evaluate` of one step of a run, in a session of its own: a terminal's Ctrl-C does not reach it.

    Attributes:
        step: of the checkpoint.
        log: the file with all that the process prints.

    Raises:
        UserError: the log cannot be written.
    """

    def __init__(self, folder: RunFolder, step: int, settings: ValidationConfig) -> None:
        self.step, self.log = step, folder.evaluation_log(step)
        command = [
            "evaluate",
            str(folder.path.absolute()),
            "--step",
            str(step),
            "--tasks",
            ",".join(settings.tasks),
        ]
        command += ["--device", settings.tasks_device, "--batch-size", str(settings.tasks_batch_size)]
        command += ["--limit", str(settings.tasks_limit)] if settings.tasks_limit else []
        command += ["--apply-chat-template"] if settings.tasks_apply_chat_template else []
        with writing(self.log):
            self.log.parent.mkdir(parents=True, exist_ok=True)
            stream = self.log.open("ab")
        self._begin = stream.tell()  # behind the errors of earlier evaluations of the step
        with stream:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "shardwright", *command],
                stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, start_new_session=True,
                env=_environment(settings.tasks_device),
            )  # fmt: skip

    def poll(self) -> int | None:
        """Return the exit status; None while the process runs."""
        return self._process.poll()

    def ask_to_end(self) -> None:
        """Let the process end, and those that it has started. It ends at the latest some seconds after this one."""
        _signal(self._process, signal.SIGTERM)

    def stop(self) -> None:
        """End the process and those that it has started."""
        _end(self._process)

    def error(self) -> str:
        """Return the error that the process has printed; its exit status if it has printed none."""
        text = self.log.read_bytes()[self._begin :] if self.log.is_file() else b""
        return (
            _error_in(text.decode(errors="replace"))
            or f"shardwright evaluate ended with status {self._process.returncode}"
        )


def _end(process: subprocess.Popen[Any]) -> None:
    """End a process and those that it has started. It has some seconds to remove its temporary folder."""
    _signal(process, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(SECONDS_TO_END)
    _signal(process, signal.SIGKILL)
    process.wait()


def _signal(process: subprocess.Popen[Any], number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):  # of a group that has gone
        os.killpg(process.pid, number)


def check_names(folder: RunFolder, tasks: Sequence[str]) -> str:
    """Ask lm-eval whether it knows these names of tasks. This takes seconds.

    Returns:
        A warning if lm-eval does not answer in time; else empty.

    Raises:
        UserError: it does not know one, or cannot be asked.
    """
    command = [sys.executable, "-P", "-m", "shardwright", "evaluate", str(folder.path), "--check"]
    process = subprocess.Popen(
        [*command, "--tasks", ",".join(tasks)], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True, env=_environment("cpu"),
    )  # fmt: skip
    with process:
        try:
            _, text = process.communicate(timeout=SECONDS_TO_CHECK)
        except subprocess.TimeoutExpired:
            _end(process)
            named = ", ".join(tasks)
            return f"warning: lm-eval did not say within {SECONDS_TO_CHECK:.0f} s whether it knows the tasks {named}"
        except BaseException:
            _end(process)
            raise
    if process.returncode:
        reason = _error_in(text).removeprefix("--tasks: ") or text[-1000:]
        raise UserError(f"validation.tasks: {reason}")
    return ""


def _error_in(text: str) -> str:
    """Return the last line of a text that says an error of ours, without its begin."""
    errors = [line for line in text.splitlines() if line.startswith("error: ")]
    return errors[-1].removeprefix("error: ") if errors else ""


def _environment(device: str) -> dict[str, str]:
    """Return this process's environment for a process that is no rank. Without a GPU unless its device is one."""
    own = {
        name: value
        for name, value in os.environ.items()
        if name not in OF_A_RANK and not name.startswith(OF_RANKS)
    }
    if device == "cpu":
        own["CUDA_VISIBLE_DEVICES"] = ""  # a context of CUDA would take memory of the run's GPU
    return {**own, **path_to_ourselves(), RUN_VARIABLE: str(os.getpid())}


def is_beside_run() -> bool:
    """Return whether this process evaluates for a run that goes on, whose own process sends the results."""
    return os.environ.get(RUN_VARIABLE, "").isdecimal()


@contextmanager
def ending_with_run() -> Iterator[None]:
    """Inside the context SIGTERM ends this process in order: temporary folders go, processes that it started end.

    If it evaluates for a run, it has a lower priority, and ends with the run's process.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _leave)
    run = os.environ.get(RUN_VARIABLE, "")
    if run.isdecimal():
        os.nice(NICE)
        threading.Thread(target=_watch, args=(int(run),), daemon=True, name="run").start()
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def _watch(run: int) -> None:
    """The thread: end this process's group when the process of the run has gone."""
    while os.getppid() == run:
        time.sleep(0.5)
    if os.getpgrp() != os.getpid():
        os._exit(1)  # it has no group of its own
    os.killpg(0, signal.SIGTERM)
    time.sleep(SECONDS_TO_END)
    os.killpg(0, signal.SIGKILL)
