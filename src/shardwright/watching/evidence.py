"""Files about a job that hangs: the verdict, and for each rank of this host the latest entries of its heartbeat and the
stacks of its threads. A thread of the process writes them. If something holds the interpreter, a signal handler in C
does; in a process whose threads run it could crash, since it reads what they change.

Collectives that nobody has noted on the heartbeat, such as a user's own barrier, are known to torch's flight recorder
alone, which only the process itself can read. So a thread of it copies them to the heartbeat.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwright.engine import heartbeat
from shardwright.watching.diagnosis import Diagnosis
from shardwright.watching.reading import RUNS, HeartbeatReader, Seen, in_words

#: Seconds for processes to write their stacks.
PATIENCE = 2.0
#: Seconds without a sign of a thread, after which something holds the interpreter.
HELD = 1.5
#: A signal that nothing else uses.
STACK_SIGNAL = signal.SIGRTMIN + 9 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2


class Stacks:
    """Writes the stacks of this process beside its heartbeat."""

    def __init__(self, beat: heartbeat.Heartbeat) -> None:
        self._heartbeat = beat
        self._written = 0
        path = heartbeat.stacks_beside(beat.path)
        with suppress(FileNotFoundError):
            path.unlink()
        # The handler writes to this descriptor until the process ends, so it stays open.
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        faulthandler.register(STACK_SIGNAL, file=self._file, all_threads=True)
        beat.answers_with_stacks(STACK_SIGNAL)

    def beat(self) -> None:
        """Show that a thread of this process runs, although it waits for others."""
        self._heartbeat.beat()

    def answer(self) -> None:
        """Write them if another process has asked. Called by a thread."""
        if self._heartbeat.asked > self._written:
            self._written = self._heartbeat.asked
            faulthandler.dump_traceback(file=self._file, all_threads=True)


@dataclass(frozen=True)
class EvidenceFiles:
    """The files written about a hang.

    Attributes:
        folder: of the files.
        stacks: the ranks whose stacks are there.
        problem: why not all files are there; empty if they are.
    """

    folder: Path
    stacks: Collection[int] = ()
    problem: str = ""

    def in_words(self, culprits: Collection[int]) -> str:
        """Return lines for a user. ``culprits``: the ranks for which the others wait."""
        if self.problem:
            return f"stacks and latest actions of the ranks could not be written to {self.folder}: {self.problem}"
        hint = self._hint(culprits)
        return f"{hint}{chr(10) if hint else ''}stacks and latest actions of the ranks: {self.folder}"

    def _hint(self, culprits: Collection[int]) -> str:
        if not culprits or not {*culprits} <= {*self.stacks}:
            return ""
        return "Their stacks show where they are." if len(culprits) > 1 else "Its stacks show where it is."


def folder_name(job: str = "") -> str:
    """Return the name of the folder of a hang that is found now.

    ``job``: differs for jobs that share the folder around it.
    """
    return time.strftime("hang-%Y%m%dT%H%M%SZ", time.gmtime()) + (f"-{job}" if job else "")


def check_folder(folder: Path) -> None:
    """Raise OSError if this process may not write into the folder, or may not make it. It is not made here."""
    whole = folder.absolute()
    place = next(each for each in (whole, *whole.parents) if os.path.lexists(each))
    problem = ""
    if not place.is_dir():
        problem = f"{place} is no folder"
    elif not os.access(place, os.W_OK | os.X_OK):
        problem = f"this process may not write in {place}"
    if problem:
        raise OSError(
            f"folder: expected a folder for files about a hang, got {folder}: {problem}. Give another one."
        )


def write(
    folder: Path,
    readers: Iterable[HeartbeatReader],
    verdict: Diagnosis | None,
    seen: Sequence[Seen],
    own: Stacks | None = None,
) -> EvidenceFiles:
    """Write the files into this folder, which other hosts may use, too. A full disk does not keep a job.

    ``own``: the stacks of this process, if it is one of the ranks.
    """
    readers = list(readers)
    texts, with_stacks = _stacks_of(readers, own)
    files = EvidenceFiles(folder, with_stacks)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for reader in readers:
            ring = [in_words(entry, reader.began) for entry in reader.entries()]
            (folder / f"rank-{reader.rank}.ring.txt").write_text("\n".join([*ring, ""]), encoding="utf-8")
            (folder / f"rank-{reader.rank}.stacks.txt").write_text(texts[reader.rank], encoding="utf-8")
        if verdict is not None:
            lines = [verdict.text, files.in_words(verdict.culprits), "", *(_row(each) for each in seen), ""]
            (folder / "diagnosis.txt").write_text("\n".join(lines), encoding="utf-8")
    except (OSError, ValueError) as error:
        return EvidenceFiles(folder, problem=getattr(error, "strerror", None) or str(error))
    return files


def _row(seen: Seen) -> str:
    numbers = {"phase": seen.phase, "around": seen.around}
    phases = [f"{name}={heartbeat.PHASES[number]!r}" for name, number in numbers.items()]
    values = [f"{name}={value!r}" for name, value in vars(seen).items() if name not in numbers]
    return " ".join([*phases, *values])


def _stacks_of(readers: Sequence[HeartbeatReader], own: Stacks | None) -> tuple[dict[int, str], set[int]]:
    """Return the stacks of each process, or why there are none, and the ranks that have some."""
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
        before, sizes = sizes, {each.rank: _size(heartbeat.stacks_beside(each.path)) for each in asked}
        if all(sizes.values()) and sizes == before:
            break
    with_stacks: set[int] = set()
    for reader in asked:
        text = ""
        with suppress(OSError):
            text = heartbeat.stacks_beside(reader.path).read_text(encoding="utf-8", errors="replace")
        texts[reader.rank] = text or f"no stacks: the process did not write them within {PATIENCE} s\n"
        with_stacks.update([reader.rank] if text else [])
    gone = "no stacks: the process is gone\n"
    return {reader.rank: texts.get(reader.rank, gone) for reader in readers}, with_stacks


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


# -- torch's flight recorder -------------------------------------------------------------------------------------------


MOST = 32  #: collectives that are noted


def note_flights(beat: heartbeat.Heartbeat) -> None:
    """Copy the collectives that run, and the numbers of the last ones of each group, to the heartbeat.

    Copies nothing if a record has another form, or a group ends meanwhile: without the thread that calls this, the rank
    would look as if something held its interpreter.
    """
    # Imported here, because the launcher, which reads evidence, has no engine.
    from shardwright.engine.compat import flight_entries, ranks_by_group_name

    with suppress(LookupError, TypeError, ValueError, RuntimeError):
        entries = flight_entries()
        if entries is not None:
            _note(beat, entries, ranks_by_group_name())


def _note(beat: heartbeat.Heartbeat, entries: list[dict[str, Any]], ranks: dict[str, Any]) -> None:
    counts: dict[str, int] = {}
    flights: list[tuple[str, str, int, float]] = []
    for entry in entries:
        group = _group_of(entry, ranks)
        if group is None or entry.get("is_p2p"):
            continue
        number = int(entry["collective_seq_id"])
        counts[group] = max(number, counts.get(group, 0))
        if not entry["retired"] and len(flights) < MOST:
            age = max(0.0, (time.time_ns() - entry["time_created_ns"]) / 1e9)
            flights.append((entry["profiling_name"].partition(":")[2] or "a collective", group, number, age))
    beat.note_flights(json.dumps({"time": time.monotonic_ns(), "counts": counts, "flights": flights}))


def _group_of(entry: dict[str, Any], ranks: dict[str, list[int]]) -> str | None:
    """Return the group of a collective on heartbeats. torch numbers its collectives, so its name has
    torch's name, too."""
    name = entry["process_group"][0]
    return f"{heartbeat.group_name(ranks[name])}#{name}" if name in ranks else None
