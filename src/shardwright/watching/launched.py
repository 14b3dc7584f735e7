"""A launcher's view of the ranks that it has started on this host: their heartbeats, and the verdict on them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shardwright.engine import heartbeat
from shardwright.watching import evidence
from shardwright.watching.diagnosis import Diagnosis, diagnose, diagnose_start
from shardwright.watching.reading import HeartbeatReader, Seen, state_of

#: Seconds between two looks at the heartbeats.
EVERY = 0.5
#: The time between two looks after which the watching process itself was stopped, in times that a rank may wait.
GAP = 0.5
#: Seconds that a process may be stopped before every rank has a heartbeat. Nobody waits that long for a start.
STOPPED_AT_START = 10.0


@dataclass(frozen=True)
class Hang:
    """A job that hangs.

    Attributes:
        verdict: why.
        files: what was written about it.
    """

    verdict: Diagnosis
    files: evidence.EvidenceFiles

    @property
    def text(self) -> str:
        """Some lines for a user."""
        return f"{self.verdict.text}\n{self.files.in_words(self.verdict.culprits)}"


class Looks:
    """Times of looks. If the process that looks was stopped itself, ages begin again: the ranks were stopped, too, or
    their clocks have jumped while the host slept."""

    def __init__(self, stall_seconds: float) -> None:
        self._gap = max(5.0, GAP * stall_seconds)
        self._last = time.monotonic()
        self.since = 0

    def note(self) -> int:
        """Return the time from which ages count."""
        now = time.monotonic()
        if now - self._last > self._gap:
            self.since = time.monotonic_ns()
        self._last = now
        return self.since


def silence(stall_seconds: float) -> float:
    """Seconds without a sign of a rank's thread, after which something holds its interpreter."""
    return min(5.0, max(evidence.HELD, stall_seconds / 2))


def _open(pid: int) -> HeartbeatReader | None:
    """Return the heartbeat of this process; None if it has none yet.

    A killed one with the same number may have left its own.
    """
    with suppress(OSError):
        reader = HeartbeatReader(heartbeat.heartbeat_of(pid))
        if reader.is_alive():
            return reader
        reader.close()
    return None


class Processes:
    """The processes of ranks that may have no heartbeats yet."""

    def __init__(self) -> None:
        self._states: dict[int, tuple[str, int]] = {}  # by process, with the time of the first look at it

    def look(self, rank: int, pid: int, since: int = 0) -> Seen:
        """Return the process of a rank now.

        Its age is the one of its state. ``since``: see :meth:`HeartbeatReader.look`.
        """
        state, at = self._states.get(pid, ("", 0))
        now = time.monotonic_ns()
        if (found := state_of(pid)) != state:
            state, at = self._states[pid] = found, now
        return Seen(rank, "", pid, state, None, (now - max(at, since)) / 1e9, phase=heartbeat.START)


class Eyes:
    """The heartbeats of the ranks that this launcher has started, all on this host."""

    def __init__(self, pids: Mapping[int, int], stall_seconds: float, folder: Path, key: str) -> None:
        """``pids``: the process of each rank. ``folder``: for files about a hang. ``key``: the setting in messages."""
        self.pids, self.stall_seconds, self.folder, self.key = dict(pids), stall_seconds, folder, key
        self._readers: dict[int, HeartbeatReader] = {}
        self._looks = Looks(stall_seconds)
        self._next = 0.0
        self._begun = time.time() - 1.0  # files have coarser times
        self._processes = Processes()

    def look(self) -> Hang | None:
        """Return the hang, once the job hangs. Call it often; it looks each half second."""
        now = time.monotonic()
        if now < self._next:
            return None
        self._next = now + min(EVERY, self.stall_seconds / 4)
        since = self._looks.note()
        for rank, pid in self.pids.items():
            if rank not in self._readers and (reader := _open(pid)) is not None:
                self._readers[rank] = reader
        begun = len(self._readers) == len(self.pids)
        seen = [self._seen(rank, since, begun) for rank in self.pids]
        if begun:
            verdict = diagnose(seen, self.stall_seconds, self.key, strict=True)
        else:
            verdict = diagnose_start(seen, min(STOPPED_AT_START, self.stall_seconds), self.key)
        if verdict is None:
            return None
        folder = self.folder / evidence.folder_name()
        return Hang(verdict, evidence.write(folder, self._readers.values(), verdict, seen))

    def _seen(self, rank: int, since: int, begun: bool) -> Seen:
        """Return the rank now. ``begun``: all ranks have heartbeats.

        Before that, its age is the one of its process's state.
        """
        if begun:
            return self._readers[rank].look(since=since, within=silence(self.stall_seconds))
        return self._processes.look(rank, self.pids[rank], since)

    def steps_done(self) -> dict[int, int]:
        """Return the steps that each rank has done, also one that has ended, even between two looks."""
        for rank, pid in self.pids.items():
            path = heartbeat.heartbeat_of(pid)
            if rank not in self._readers:
                with suppress(OSError):  # it has no heartbeat, or has removed it
                    if path.stat().st_mtime >= self._begun:  # else of an earlier process with that number
                        self._readers[rank] = HeartbeatReader(path)
        return {rank: max(0, reader.last().step - 1) for rank, reader in self._readers.items()}

    def close(self) -> None:
        """Remove what killed ranks have left."""
        for reader in self._readers.values():
            reader.remove()
            reader.close()
