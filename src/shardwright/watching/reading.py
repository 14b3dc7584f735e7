"""Reads heartbeats of processes of this host, also if a process is stopped, has ended, or holds its interpreter."""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import struct
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shardwright.engine import ENTRY, HEADER, MAGIC, RING_AT, SLOTS, VERSION, WORD, Heartbeat, heartbeat

_LOCK = struct.Struct("hhqqi4x")  #: struct flock
RUNS, STOPPED, DISK, ENDED, LEFT, SILENT = "runs", "stopped", "disk", "ended", "left", "silent"
#: Phases between two steps.
BETWEEN_STEPS = (heartbeat.VALIDATION, heartbeat.SAMPLE, heartbeat.SAVE)
#: States of a process, by their letters in /proc/PID/stat.
_STATES = {"T": STOPPED, "t": STOPPED, "D": DISK, "Z": ENDED, "X": ENDED}


@dataclass(frozen=True)
class HeartbeatEntry:
    """One entry of a heartbeat.

    Attributes:
        number: of the entry.
        time: of the host's monotonic clock, in nanoseconds.
        nbytes: of the collective.
        step: number of the running step.
        count: how many collectives of this group this process has begun.
        unit: the unit that computes.
        collective: the collective in which the process may wait; empty: none.
        group: its ranks.
        subject: the unit whose weights or gradients it moves.
        phase: one of ``heartbeat.PHASES``, by number.
        patient: whether this may last much longer than a step.
        around: the phase around this one, such as a validation; ``heartbeat.OUTSIDE``: none.
    """

    number: int
    time: int
    nbytes: int
    step: int
    count: int
    unit: str
    collective: str
    group: str
    subject: str
    phase: int
    patient: bool
    around: int


@dataclass(frozen=True)
class Seen:
    """The state of a rank at one moment. It travels between hosts as JSON.

    Attributes:
        process: RUNS, STOPPED, DISK (uninterruptible, as when a disk does not answer), ENDED (without a word), LEFT (in
            order), or SILENT: its host does not answer.
        answers: whether its threads run. None: not known. False: something holds its interpreter.
        age: seconds since its last entry.
        counts: by group, the number of collectives that it has begun.
        flights: collectives that it waits for, by torch's flight recorder: name, ranks, number, seconds. Empty while it
            does not wait long.
    """

    rank: int
    host: str
    pid: int
    process: str
    answers: bool | None
    age: float
    step: int = 0
    phase: int = heartbeat.START
    unit: str = ""
    collective: str = ""
    group: str = ""
    count: int = 0
    nbytes: int = 0
    subject: str = ""
    patient: bool = False
    counts: Mapping[str, int] = field(default_factory=dict)
    flights: tuple[tuple[str, str, int, float], ...] = ()
    around: int = heartbeat.OUTSIDE

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Seen:
        flights = tuple((str(n), str(g), int(c), float(a)) for n, g, c, a in values.get("flights", ()))
        return cls(**{**values, "flights": flights})

    @property
    def is_gone(self) -> bool:
        return self.process in (ENDED, LEFT)

    @property
    def is_stuck(self) -> bool:
        """Whether it cannot go on, however long one waits."""
        return self.process in (STOPPED, ENDED, LEFT, SILENT)


class HeartbeatReader:
    """The heartbeat of a process. Keeps reading after the file is removed and after the process has ended."""

    def __init__(self, beat: Path | Heartbeat) -> None:
        """``heartbeat``: the file of another process, or the heartbeat of this one, whose file must not be opened
        again: to close it would end the lock.

        Raises FileNotFoundError: there is no heartbeat, or no whole one yet.
        """
        self._file: int | None = None
        if isinstance(beat, Heartbeat):
            self._memory, self.path = beat.memory, beat.path
        else:
            self.path = beat
            self._file = os.open(beat, os.O_RDWR | os.O_CLOEXEC)  # a lock may be asked for only so
        try:
            if self._file is not None:
                self._memory = mmap.mmap(self._file, heartbeat.SIZE, prot=mmap.PROT_READ)
            magic, version, self.pid, self.rank, self.ranks, slots = HEADER.unpack_from(self._memory, 0)
            if (magic, version, slots) != (MAGIC, VERSION, SLOTS):
                raise FileNotFoundError(f"{self.path} is no heartbeat of this version")
        except (OSError, ValueError) as error:
            if self._file is not None:
                os.close(self._file)
            raise FileNotFoundError(str(error)) from error
        self._names = [""]
        self._name_end = heartbeat.NAMES_AT

    def close(self) -> None:
        if self._file is not None:
            self._memory.close()
            os.close(self._file)

    def _word(self, at: int) -> int:
        value: int = WORD.unpack_from(self._memory, at)[0]
        return value

    def _name(self, number: int) -> str:
        while len(self._names) <= min(number, self._word(heartbeat.NAME_COUNT_AT)):
            (length,) = heartbeat.LENGTH.unpack_from(self._memory, self._name_end)
            start = self._name_end + heartbeat.LENGTH.size
            self._names.append(self._memory[start : start + length].decode(errors="replace"))
            self._name_end = start + length
        return self._names[number] if number < len(self._names) else "?"

    def entries(self) -> list[HeartbeatEntry]:
        """Return the entries of the ring, the oldest first. One that is being written is left out."""
        rows = list(ENTRY.iter_unpack(self._memory[RING_AT:]))
        whole = sorted(
            (row for slot, row in enumerate(rows) if row[-1] % SLOTS == slot and row[-1]), key=lambda r: r[-1]
        )
        # The place of the oldest one is the one that is written next.
        entries = [self._entry(row) for row in (whole[1:] if len(whole) == SLOTS else whole)]
        return [*entries, *(each for each in map(self._after, entries[-1:]) if each is not entries[-1])]

    def _after(self, entry: HeartbeatEntry) -> HeartbeatEntry:
        """Return the latest entry, or if its collective has ended, what the process does since."""
        left = self._word(heartbeat.LEFT_AT)
        if not entry.collective or left < entry.time:
            return entry
        return replace(entry, time=left, collective="", group="", count=0, nbytes=0, subject="")

    def _entry(self, row: tuple[int, ...]) -> HeartbeatEntry:
        at, nbytes, step, count, place, named, number = row
        phase, around = _phase(place >> heartbeat.PHASE), _phase(place >> heartbeat.AROUND)
        return HeartbeatEntry(
            number, at, nbytes, step, count, self._name(place & 0xFFFF), self._name(named & 0xFFFF),
            self._name(named >> heartbeat.GROUP & 0xFFFF), self._name(named >> heartbeat.SUBJECT & 0xFFFF), phase,
            bool(place >> heartbeat.PATIENT & 1), around,
        )  # fmt: skip

    @property
    def message(self) -> str:
        """The last message of the process."""
        length = self._word(heartbeat.MESSAGE_LENGTH_AT)
        return self._memory[heartbeat.MESSAGE_AT : heartbeat.MESSAGE_AT + length].decode(errors="replace")

    def ask_for_stacks(self) -> None:
        """Ask a thread of the process to write its stacks. It may be unable to."""
        number = WORD.pack(self._word(heartbeat.ASKED_AT) + 1)
        if self._file is not None:
            os.pwrite(self._file, number, heartbeat.ASKED_AT)
        else:
            self._memory[heartbeat.ASKED_AT : heartbeat.ASKED_AT + WORD.size] = number

    def remove(self) -> None:
        """Remove the files of a process that cannot do so."""
        for path in (self.path, heartbeat.stacks_beside(self.path)):
            with suppress(OSError):
                path.unlink()

    @property
    def stack_signal(self) -> int:
        """Return the signal at which a process writes its stacks even if something holds it, or 0 if there is none."""
        return self._word(heartbeat.SIGNAL_AT)

    @property
    def began(self) -> int:
        return self._word(heartbeat.BEGAN_AT)

    def is_alive(self) -> bool:
        """Return whether the process runs. It has a lock on the file until it ends."""
        if self._file is None:
            return True
        asked = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        return bool(_LOCK.unpack(fcntl.fcntl(self._file, fcntl.F_GETLK, asked))[0] != fcntl.F_UNLCK)

    def process(self) -> str:
        if self._word(heartbeat.CLOSED_AT):
            return LEFT
        if not self.is_alive():
            return ENDED
        return state_of(self.pid)

    def answers(self, within: float) -> bool | None:
        """Return whether a thread ran in the last ``within`` seconds, or None if the process has no such thread."""
        beat = self._word(heartbeat.HEARTBEAT_AT)
        if not beat:
            return None
        return time.monotonic_ns() - beat < within * 1e9

    def look(self, host: str = "", since: int = 0, within: float = 5.0) -> Seen:
        """Return the rank now. ``since``: ages count from this time of the clock at the earliest."""
        last = self.last()
        age = max(0, time.monotonic_ns() - max(last.time, since)) / 1e9
        return Seen(
            self.rank, host, self.pid, self.process(), self.answers(within), age, last.step, last.phase, last.unit,
            last.collective, last.group, last.count, last.nbytes, last.subject, last.patient, *self._counts(last.time),
            last.around,
        )  # fmt: skip

    def last(self) -> HeartbeatEntry:
        """Return the newest entry, or what the process does since."""
        rows = ENTRY.iter_unpack(self._memory[RING_AT:])
        # The place of the newest one is full before its number is there.
        newest = max(
            (row for slot, row in enumerate(rows) if row[-1] % SLOTS == slot), key=lambda row: row[-1]
        )
        return self._after(self._entry(newest))

    def _counts(self, since: int) -> tuple[dict[str, int], tuple[tuple[str, str, int, float], ...]]:
        """Return the number of collectives that the rank has begun in each group, and the collectives of the flight
        recorder."""
        last = min(self._word(heartbeat.NAME_COUNT_AT), heartbeat.COUNTED - 1)
        numbers = struct.unpack_from(f"{last + 1}q", self._memory, heartbeat.COUNTS_AT)
        counts = {self._name(number): count for number, count in enumerate(numbers) if count}
        length = self._word(heartbeat.FLIGHTS_LENGTH_AT)
        with suppress(ValueError, KeyError, TypeError):
            noted = json.loads(self._memory[heartbeat.FLIGHTS_AT : heartbeat.FLIGHTS_AT + length])
            if noted["time"] > since:
                counts |= {str(group): int(count) for group, count in noted["counts"].items()}
                return counts, tuple((str(n), str(g), int(c), float(a)) for n, g, c, a in noted["flights"])
        return counts, ()


def _phase(bits: int) -> int:
    return min(bits & 0xFF, len(heartbeat.PHASES) - 1)


def place_in_words(phase: int, unit: str, around: int) -> str:
    """Return the work of a process, in words: "forward of layers.7 in the validation"."""
    inside = "" if around in (heartbeat.OUTSIDE, phase) else f" in the {heartbeat.PHASES[around]}"
    return heartbeat.PHASES[phase] + (f" of {unit}" if unit else "") + inside


def outer_phase(phase: int, around: int) -> int:
    return phase if around == heartbeat.OUTSIDE else around


def step_in_words(step: int, phase: int, around: int) -> str:
    """Return the step of a process, in words: "step 5" or "after step 4"."""
    return f"after step {step - 1}" if outer_phase(phase, around) in BETWEEN_STEPS else f"step {step}"


def state_of(pid: int) -> str:
    """Return RUNS, STOPPED, DISK or ENDED, all that is known of a process without a heartbeat."""
    return _STATES.get(_letter(pid), RUNS)


def _letter(pid: int) -> str:
    """Return the state of a process in the words of the system: one letter. Empty where the system does not say it."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    return ""


def in_words(entry: HeartbeatEntry, begin: int) -> str:
    """Return an entry as a line of a file: seconds since ``begin``, step, place, collective."""
    seconds, place = (entry.time - begin) / 1e9, place_in_words(entry.phase, entry.unit, entry.around)
    step = step_in_words(entry.step, entry.phase, entry.around)
    text = f"{entry.number:8d} {seconds:+12.6f} s  {step}  {place}"
    if entry.collective:
        subject = f" of {entry.subject}" if entry.subject else ""
        text += f"  in {entry.collective}{subject}, number {entry.count} of ranks {entry.group}, {entry.nbytes} bytes"
    return text
