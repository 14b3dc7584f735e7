"""Files about a job that hangs: the verdict, and for each rank of this host the latest entries of its board and the
stacks of its threads. A thread of the process writes them. If something holds the interpreter, a signal handler in C
does; in a process whose threads run it could crash, since it reads what they change."""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from shardwright import board as boards
from shardwright.watching.diagnosis import Verdict
from shardwright.watching.reading import RUNS, Reader, Seen, in_words

#: Seconds for processes to write their stacks.
PATIENCE = 2.0
#: Seconds without a sign of a thread, after which something holds the interpreter.
HELD = 1.5
#: A signal that nothing else uses.
STACK_SIGNAL = signal.SIGRTMIN + 9 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2


class Stacks:
    """Writes the stacks of this process beside its board."""

    def __init__(self, board: boards.Board) -> None:
        self._board = board
        self._written = 0
        path = boards.stacks_beside(board.path)
        with suppress(FileNotFoundError):
            path.unlink()
        # The handler writes to this descriptor until the process ends, so it stays open.
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        faulthandler.register(STACK_SIGNAL, file=self._file, all_threads=True)
        board.answers_with_stacks(STACK_SIGNAL)

    def beat(self) -> None:
        """Show that a thread of this process runs, although it waits for others."""
        self._board.beat()

    def answer(self) -> None:
        """Write them if another process has asked. Called by a thread."""
        if self._board.asked > self._written:
            self._written = self._board.asked
            faulthandler.dump_traceback(file=self._file, all_threads=True)


def write(
    folder: Path,
    readers: Iterable[Reader],
    verdict: Verdict | None,
    seen: Sequence[Seen],
    own: Stacks | None = None,
) -> Path | None:
    """Write the files. Returns their folder, or None if it cannot be written: a full disk must not keep a job.

    ``own``: the stacks of this process, if it is one of the ranks.
    """
    readers = list(readers)
    place = folder / time.strftime("hang-%Y%m%dT%H%M%SZ", time.gmtime())
    stacks = _stacks_of(readers, own)
    try:
        place.mkdir(parents=True, exist_ok=True)
        if verdict is not None:
            lines = [verdict.text, "", *(_row(each) for each in seen), ""]
            (place / "diagnosis.txt").write_text("\n".join(lines), encoding="utf-8")
        for reader in readers:
            ring = [in_words(entry, reader.began) for entry in reader.entries()]
            (place / f"rank-{reader.rank}.ring.txt").write_text("\n".join([*ring, ""]), encoding="utf-8")
            (place / f"rank-{reader.rank}.stacks.txt").write_text(stacks[reader.rank], encoding="utf-8")
    except OSError:
        return None
    return place


def _row(seen: Seen) -> str:
    values = " ".join(f"{name}={value!r}" for name, value in vars(seen).items() if name != "phase")
    return f"phase={boards.PHASES[seen.phase]!r} {values}"


def _stacks_of(readers: Sequence[Reader], own: Stacks | None) -> dict[int, str]:
    """The stacks of each process, or why there are none."""
    texts, asked = {}, []
    for reader in readers:
        state = reader.process()
        if state != RUNS:
            texts[reader.rank] = f"no stacks: the process is in the state {state!r}\n"
            continue
        with suppress(OSError):
            if reader.answers(HELD) is False and reader.stack_signal:
                os.kill(reader.pid, reader.stack_signal)
            else:
                reader.ask_for_stacks()
            asked.append(reader)
    if own is not None:
        own.answer()
    deadline, sizes = time.monotonic() + PATIENCE, dict.fromkeys((each.rank for each in asked), 0)
    while asked and time.monotonic() < deadline:
        time.sleep(0.1)
        if own is not None:
            own.beat()
        before, sizes = sizes, {each.rank: _size(boards.stacks_beside(each.path)) for each in asked}
        if all(sizes.values()) and sizes == before:
            break
    for reader in asked:
        text = ""
        with suppress(OSError):
            text = boards.stacks_beside(reader.path).read_text(encoding="utf-8", errors="replace")
        texts[reader.rank] = text or f"no stacks: the process did not write them within {PATIENCE} s\n"
    return {reader.rank: texts.get(reader.rank, "no stacks: the process is gone\n") for reader in readers}


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
