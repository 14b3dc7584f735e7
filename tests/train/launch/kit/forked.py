"""Launchers whose ranks are forked, also after restarts: a start takes a fraction of a second, not seconds.

The launchers are real: `shardwright train --nproc N` and torchrun. In both, torch's SubprocessHandler starts the ranks,
and this file replaces how it starts a process. Ranks are real processes with their own session and output.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from tests.support.pool import forkserver


def launch(
    folder: Path,
    *arguments: str | Path,
    torchrun: Sequence[str] | None = None,
    environment: dict[str, str] | None = None,
    imports: str = "shardwright.train.rank.process",
    seconds: float = 100,
) -> tuple[int | None, str, str]:
    """`shardwright` with these arguments, under torchrun if its options are given: status, stdout and stderr.

    The launcher imports the module `imports`, which its ranks then have, too.
    The working folder is `folder`, whose files `out` and `err` are replaced.
    """
    out, err = folder / "out", folder / "err"
    variables = {"OMP_NUM_THREADS": "1", **(environment or {})}
    options = None if torchrun is None else list(torchrun)
    process = forkserver().Process(
        target=_launcher, args=(folder, options, list(map(str, arguments)), variables, imports), daemon=False
    )
    process.start()
    process.join(seconds)
    if process.exitcode is None:
        process.kill()  # its ranks notice and leave
        process.join()
    return process.exitcode, out.read_text(), err.read_text()


def _launcher(
    folder: Path, torchrun: list[str] | None, arguments: list[str], variables: dict[str, str], imports: str
) -> None:
    _redirect(folder / "out", folder / "err")
    os.chdir(folder)
    os.environ.update(variables)
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    from shardwright.cli import main

    importlib.import_module(imports)
    SubprocessHandler._popen = _forked  # type: ignore[method-assign,assignment]
    if torchrun is None:
        sys.argv = ["shardwright", *arguments]  # as a process of its own, which ends after it
        sys.exit(main())
    from torch.distributed.run import main as torchrun_main

    torchrun_main([*torchrun, "-m", "shardwright", *arguments])


def _redirect(*files: Path) -> None:
    for number, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)


def _forked(self: Any, args: tuple[str, ...], env: dict[str, str]) -> Forked:
    """In place of `SubprocessHandler._popen`: `args` are `python ... -m shardwright ARGUMENTS`."""
    arguments = list(args[args.index("shardwright") + 1 :])
    sys.stdout.flush()
    sys.stderr.flush()
    process = os.fork()
    if not process:
        try:
            _rank(arguments, env, self._stdout, self._stderr)
        finally:
            os._exit(70)
    return Forked(process)


def _rank(arguments: list[str], variables: dict[str, str], out: IO[str] | None, err: IO[str] | None) -> None:
    """Run a rank in this process, which has been forked, and end it."""
    os.setsid()
    for stream, number in ((out, 1), (err, 2)):
        if stream is not None:
            os.dup2(stream.fileno(), number)
    os.closerange(3, 1 << 16)  # the sockets of the launcher's store, for example
    for each in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
        if callable(signal.getsignal(each)):
            signal.signal(each, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(variables)
    from shardwright.cli import main
    from shardwright.train.report import progress

    progress.START.__init__()  # type: ignore[misc]  # the launcher's has begun
    sys.argv = ["shardwright", *arguments]
    try:
        status: Any = main()
    except SystemExit as end:
        status = end.code
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(status or 0))


class Forked:
    """The part of `subprocess.Popen` that launchers use."""

    def __init__(self, process: int) -> None:
        self.pid = process
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode

    def wait(self, timeout: float = 60.0) -> int:
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("rank", timeout)
            time.sleep(0.01)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
