"""The thread of a rank that watches the ranks of its job, and ends the process when the job hangs.

The lowest rank of a host whose thread runs leads: it judges, and leaves the verdict on its heartbeat, where the other
ranks of the host find it. So every rank says the same, and all end at one moment: the end of one looks like a failure
to the others. A thread needs the interpreter, so a rank that something holds is seen by the others alone.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from shardwright.engine import heartbeat
from shardwright.watching import evidence
from shardwright.watching.diagnosis import Diagnosis, diagnose
from shardwright.watching.evidence import note_flights
from shardwright.watching.hosts import Courier
from shardwright.watching.launched import Hang, Looks, silence
from shardwright.watching.reading import DISK, ENDED, RUNS, SILENT, STOPPED, HeartbeatReader, Seen

#: The exit status of a rank of a job that hangs: EX_TEMPFAIL of sysexits.h, "try again".
TRY_AGAIN = 75
#: Characters of a verdict on a heartbeat, and of the lines about files. JSON makes at most twelve bytes of each, and
#: half of a message would end no rank.
MOST, MOST_OF_FILES = heartbeat.MESSAGE_SIZE // 12 - 1100, 1000
#: Seconds from a verdict to the end of the processes, in which each rank finds it and prints it.
TO_SAY = 1.5


@dataclass(frozen=True)
class WatchSettings:
    """Settings of a rank's watch.

    Attributes:
        stall_seconds: how long a rank may wait.
        folder: for files about a hang.
        key: the setting in messages.
        judges: whether this rank judges. A launcher may do so instead.
        strict: see :func:`diagnose`.
        say: called with the text about a hang, on every rank, in place of printing it and of the end of the process.
        frame: makes what is printed from this text, where all of it is printed.
        record: called with the verdict, on the rank that leads, before the end.
    """

    stall_seconds: float
    folder: Path
    key: str = "stall_seconds"
    judges: bool = True
    strict: bool = False
    say: Callable[[str], None] | None = None
    frame: Callable[[str], str] = str
    record: Callable[[Hang], None] | None = None


class Finding(NamedTuple):
    """A hang as all hosts describe it.

    Attributes:
        text: of the verdict.
        name: of the folder of its files.
        culprits: see :class:`Diagnosis`.
    """

    text: str
    name: str
    culprits: list[int]


class Watcher:
    """The thread of a rank that watches until :meth:`close`."""

    def __init__(
        self, beat: heartbeat.Heartbeat, readers: Mapping[int, HeartbeatReader], settings: WatchSettings,
        courier: Courier | None = None, host: str = "", job: str = "",
    ) -> None:  # fmt: skip
        """``readers``: of the ranks of this host, with this one. ``courier``: to other hosts, if there are any.

        ``job``: differs for jobs that share ``settings.folder``.
        """
        self._heartbeat, self._readers, self._settings = beat, dict(readers), settings
        self._courier, self._host, self._job = courier, host, job
        self._rank = next(rank for rank, reader in readers.items() if reader.pid == os.getpid())
        self._looks = Looks(settings.stall_seconds)
        self._within = silence(settings.stall_seconds)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shardwright-watch", daemon=True)
        self._stacks = evidence.Stacks(beat)
        beat.beat()
        self._thread.start()

    def close(self) -> None:
        """End the watch."""
        self._closed.set()
        if self._courier is not None:
            self._courier.close()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        interval = min(0.5, max(0.05, self._settings.stall_seconds / 8))
        own = self._readers[self._rank]
        while not self._closed.wait(interval):
            since = self._looks.note()
            self._heartbeat.beat()
            self._stacks.answer()
            if own.look(since=since).age > self._settings.stall_seconds / 3:
                note_flights(self._heartbeat)
            if self._settings.judges and (message := self._find(since)):
                self._end(json.loads(message))
                break
        while not self._closed.wait(interval):
            self._heartbeat.beat()  # a function of the user has the message, and the process goes on

    # -- the verdict ---------------------------------------------------------------------------------------------

    def _find(self, since: int) -> str:
        """Return the message about a hang, of another rank of this host, or of this one if it leads.

        Empty: there is none.
        """
        for reader in self._readers.values():
            if message := reader.message:
                return message
        seen = [reader.look(self._host, since, self._within) for reader in self._readers.values()]
        if self._leader(seen) != self._rank:
            if self._courier is not None:
                self._courier.rest()
            return ""
        stall = self._settings.stall_seconds
        everyone: list[Seen] | None = seen
        if self._courier is not None:
            everyone = self._courier.exchange(seen, any(each.age > stall / 2 for each in seen))
            if self._courier.verdict is not None:
                return self._leave(Finding(*json.loads(self._courier.verdict)), None, seen)
        verdict = (
            None if everyone is None else diagnose(everyone, stall, self._settings.key, self._settings.strict)
        )
        if verdict is None:
            return ""
        finding = Finding(verdict.text, evidence.folder_name(self._job), [*verdict.culprits])
        if self._courier is not None:
            silent = [each.rank for each in everyone or () if each.process == SILENT]
            finding = Finding(*json.loads(self._courier.post(json.dumps(finding), silent)))
        return self._leave(finding, verdict, everyone or seen)

    def _leader(self, seen: list[Seen]) -> int:
        able = [each.rank for each in seen if each.process in (RUNS, DISK) and each.answers is not False]
        return min([self._rank, *able])

    def _leave(self, finding: Finding, verdict: Diagnosis | None, seen: list[Seen]) -> str:
        """Write the files, print the text, and leave the message for the other ranks of this host."""
        folder = self._settings.folder / finding.name
        files = evidence.write(folder, self._readers.values(), verdict, seen, self._stacks)
        text = f"{finding.text[:MOST]}\n{files.in_words(finding.culprits)[:MOST_OF_FILES]}"
        if verdict is not None and self._settings.record is not None:
            _within(1.0, lambda: self._settings.record(Hang(verdict, files)))  # type: ignore[misc]
        if self._courier is not None:
            self._courier.meet(self._heartbeat.beat)
        # Before the message: if nobody reads what this rank prints, each other one prints all of it.
        printed = self._settings.say is None and self._print(f"rank {self._rank}: {text}")
        at = time.monotonic_ns() + int(TO_SAY * 1e9)
        message = json.dumps({"text": text, "at": at, "by": self._rank if printed else None})
        self._heartbeat.say(message)
        return message

    # -- the end -------------------------------------------------------------------------------------------------

    def _end(self, message: dict[str, object]) -> None:
        """Say it on this rank, and end the process at the moment on which the ranks of this host agree."""
        text, at, by = f"rank {self._rank}: {message['text']}", int(str(message["at"])), message["by"]
        if self._settings.say is not None:
            threading.Thread(target=self._call, args=(self._settings.say, text, at), daemon=True).start()
            return
        if by is None:
            self._print(text)
        elif by != self._rank:
            _print(f"{text.splitlines()[0]} (rank {by} has printed where each rank is)")
        self._leave_process(at)

    def _print(self, text: str) -> bool:
        return _print(text, self._settings.frame)

    def _call(self, say: Callable[[str], None], text: str, at: int) -> None:
        """Give the text to a function of the user. If it fails, print the text and end the process, as without it."""
        try:
            say(text)
        except BaseException as error:  # also SystemExit, which ends a thread alone
            closed = self._closed.is_set()
            way = "" if closed else ", so this process ends"
            _print(f"{text}\nrank {self._rank}: on_stall raised {error!r}{way}\n{traceback.format_exc()}")
            if not closed:
                self._leave_process(at)

    def _leave_process(self, at: int) -> None:
        while time.monotonic_ns() < at:
            self._heartbeat.beat()
            time.sleep(0.05)
        seen = [reader.look(within=evidence.HELD) for reader in self._readers.values()]
        if self._leader(seen) == self._rank:
            for each in (each for each in seen if each.rank != self._rank):
                if _cannot_end(each):
                    _kill(each.pid)
                if each.process == ENDED or _cannot_end(each):
                    self._readers[each.rank].remove()
        heartbeat.close_heartbeat()
        os._exit(TRY_AGAIN)


def _cannot_end(seen: Seen) -> bool:
    return seen.process == STOPPED or (seen.process in (RUNS, DISK) and seen.answers is False)


def _kill(pid: int) -> None:
    """End a process that would not end, and that would keep a launcher waiting."""
    with suppress(OSError):
        os.kill(pid, signal.SIGKILL)


def _print(text: str, frame: Callable[[str], str] = str) -> bool:
    """Return whether it was printed in time."""
    done = threading.Event()

    def try_it() -> None:
        with suppress(OSError, ValueError):
            print(frame(text), file=sys.stderr, flush=True)
            done.set()

    _within(TO_SAY, try_it)
    return done.is_set()


def _within(seconds: float, action: Callable[[], None]) -> None:
    """Wait for this at most so long: a pipe that nobody reads, or a disk, may block it."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    thread.join(seconds)
