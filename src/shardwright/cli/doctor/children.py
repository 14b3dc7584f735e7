"""Measurements in processes of their own, which can be killed if a driver, a disk or another rank does not answer.

Nothing here knows what is measured.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import IO, Any

from shardwright.cli.doctor.findings import error_text
from shardwright.common.json_text import strict_json
from shardwright.common.package import FOLDER

LAUNCHER_PREFIXES = ("GROUP_", "LOCAL_", "MASTER_", "RANK", "ROLE_", "TORCHELASTIC_", "WORLD_SIZE")
"""Beginnings of the variables that make a process a rank of somebody's job."""


class Unmeasured(Exception):
    """Raised if a measurement failed; its text is the reason."""


class TooLate(Unmeasured):
    """Raised if a measurement did not end in time."""


def measure_in_children(
    measure: Callable[..., dict[str, Any]], calls: Sequence[Sequence[Any]], seconds: float
) -> list[dict[str, Any]]:
    """Call a function with several lists of arguments at once, each in a process of its own, and return the results.

    Args:
        measure: a function of a module, whose result JSON can hold.
        calls: the arguments for each process.
        seconds: the time in which all must end.

    Raises:
        TooLate: not all have ended in time.
        Unmeasured: one of them failed. Whatever is raised, the processes are killed first.
    """
    started: list[tuple[subprocess.Popen[bytes], IO[bytes]]] = []
    deadline = time.monotonic() + seconds
    try:
        for arguments in calls:
            started.append(_start(pickle.dumps((measure, arguments, seconds))))
        while None in (states := [process.poll() for process, _ in started]):
            if any(states):
                break  # one has failed, and the others would wait for it
            if time.monotonic() > deadline:
                raise TooLate(f"it did not end within {seconds:g} s")
            time.sleep(0.02)
        for process, output in started:
            if process.returncode:
                raise Unmeasured(_outcome(process, output).get("reason"))
        return [_outcome(process, output)["result"] for process, output in started]
    except OSError as error:
        raise Unmeasured(f"no process could be started ({error.strerror or error})") from None
    finally:
        for process, output in started:
            if process.poll() is None:
                with suppress(OSError):
                    os.killpg(process.pid, signal.SIGKILL)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(1)  # a process that a disk holds in the kernel does not end even when killed
            output.close()


def _start(call: bytes) -> tuple[subprocess.Popen[bytes], IO[bytes]]:
    """Start this file as a program, which is no rank of a job, and return it with the file that it prints into."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_PREFIXES)}
    path = os.pathsep.join(filter(None, (os.path.dirname(FOLDER), kept.get("PYTHONPATH"))))
    output = tempfile.TemporaryFile()  # noqa: SIM115 - a pipe could fill up and hold the process
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "shardwright.cli.doctor.children"],
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=subprocess.DEVNULL,
        env=kept | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    with suppress(BrokenPipeError), process.stdin:  # type: ignore[union-attr]
        process.stdin.write(call)  # type: ignore[union-attr]
    return process, output


def _outcome(process: subprocess.Popen[bytes], output: IO[bytes]) -> dict[str, Any]:
    """Return the last line that a process printed: its result, or the reason why it has none."""
    output.seek(0)
    try:
        outcome: dict[str, Any] = json.loads(output.read().splitlines()[-1])
    except (ValueError, IndexError):
        status = process.returncode
        ended = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
        return {"reason": f"its process {ended}"}
    return outcome


def main() -> int:
    """Call the function that standard input holds, and print its result as JSON.

    SIGALRM ends the process after its time even if the process that started it is gone.
    """
    measure, arguments, seconds = pickle.load(sys.stdin.buffer)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(math.ceil(seconds) + 1)
    try:
        outcome = {"result": measure(*arguments)}
    except OSError as error:
        outcome = {"reason": error.strerror or error_text(error)}  # without the name of a file
    except Exception as error:
        outcome = {"reason": error_text(error)}
    print("\n" + strict_json(outcome))
    return int("reason" in outcome)


if __name__ == "__main__":
    sys.exit(main())
