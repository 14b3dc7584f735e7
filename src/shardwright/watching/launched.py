"""A launcher's view of the ranks that it has started on this host: their heartbeats, and the verdict on them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shardwright.engine import heartbeat
from shardwright.watching import evidence
from shardwright.watching.diagnosis import Diagnosis, diagnose, diagnose_start
from shardwright.watching.reading import STOPPED, HeartbeatReader, Seen, state_of

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
        """Lines for a user: the verdict, and the files about it."""
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
    """Return the seconds without a sign of a rank's thread after which something holds its interpreter."""
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


class Starting:
    """The ranks of this host while some of them have no heartbeat yet: only the states of their processes are known.

    Args:
        stall_seconds: how long ranks may wait for one another.
        key: the setting of this time, for messages.
    """

    def __init__(self, stall_seconds: float, key: str) -> None:
        self._seconds, self._key = min(STOPPED_AT_START, stall_seconds), key
        self._looks = Looks(stall_seconds)
        self._states: dict[int, tuple[str, int]] = {}  # by process, with the time of the first look at it

    def look(self, pids: Mapping[int, int]) -> list[Seen]:
        """Return each rank now, from the process of each. Its age is that of the state of its process."""
        since, now, seen = self._looks.note(), time.monotonic_ns(), []
        for rank, pid in pids.items():
            state, at = self._states.get(pid, ("", 0))
            if (found := state_of(pid)) != state:
                state, at = self._states[pid] = found, now
            age = (now - max(at, since)) / 1e9
            seen.append(Seen(rank, "", pid, state, None, age, phase=heartbeat.START))
        return seen

    def judge(self, seen: Sequence[Seen]) -> Diagnosis | None:
        """Return the verdict on these ranks, or None unless one has been stopped for too long."""
        return diagnose_start(seen, self._seconds, self._key)

    def first_running(self, seen: Sequence[Seen]) -> int | None:
        """Return the lowest rank that is not stopped: it acts for all of them."""
        return min((each.rank for each in seen if each.process != STOPPED), default=None)


class Eyes:
    """The heartbeats of the ranks that this launcher has started, all on this host."""

    def __init__(self, pids: Mapping[int, int], stall_seconds: float, folder: Path, key: str) -> None:
        """``pids``: the process of each rank. ``folder``: for files about a hang. ``key``: the setting in messages."""
        self.pids, self.stall_seconds, self.folder, self.key = dict(pids), stall_seconds, folder, key
        self._readers: dict[int, HeartbeatReader] = {}
        self._looks = Looks(stall_seconds)
        self._next = 0.0
        self._begun = time.time() - 1.0  # files have coarser times
        self._starting = Starting(stall_seconds, key)

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
        if len(self._readers) == len(self.pids):
            within = silence(self.stall_seconds)
            seen = [self._readers[rank].look(since=since, within=within) for rank in self.pids]
            verdict = diagnose(seen, self.stall_seconds, self.key, strict=True)
        else:
            seen = self._starting.look(self.pids)
            verdict = self._starting.judge(seen)
        if verdict is None:
            return None
        folder = self.folder / evidence.folder_name()
        return Hang(verdict, evidence.write(folder, self._readers.values(), verdict, seen))

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
