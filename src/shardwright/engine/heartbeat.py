"""The heartbeat of a process: where it is in its training, written into a small file of shared memory.

Other processes read it, also if this one is stopped, dead, or holds the interpreter. This file only defines the form of
a heartbeat and writes it. It must not wait, raise, or import anything but the standard library. ``watching`` reads
heartbeats.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

#: An entry: time, bytes, step, count, place (unit, phase, patience), collective (its name, group, subject), number. See
#: :class:`shardwright.watching.reading.Entry`. The number is written last, so an entry whose number fits its slot is
#: whole. Native integers are written at once.
ENTRY = struct.Struct("7q")
HEADER = struct.Struct("6q")  #: magic number, version of the form, process, rank, ranks, slots
MAGIC, VERSION = 0x7368617264626F61, 1
SLOTS = 512  #: entries in the ring, the latest ones
WORD = struct.Struct("q")
COUNTED, NAMES_SIZE, MESSAGE_SIZE, FLIGHTS_SIZE = 1024, 1 << 17, 1 << 16, 1 << 14
#: Places in the file. The names of units, collectives and groups are written once, and entries have their numbers.
NAME_COUNT_AT, HEARTBEAT_AT, CLOSED_AT, SIGNAL_AT = range(64, 96, 8)
MESSAGE_LENGTH_AT, BEGAN_AT, FLIGHTS_LENGTH_AT, ASKED_AT = range(96, 128, 8)
LEFT_AT = 128  #: when the process left the collective of the latest entry
#: For each group, by the number of its name: how many of its collectives this process has begun.
COUNTS_AT = 4096
NAMES_AT = COUNTS_AT + COUNTED * WORD.size
MESSAGE_AT = NAMES_AT + NAMES_SIZE
FLIGHTS_AT = MESSAGE_AT + MESSAGE_SIZE
RING_AT = FLIGHTS_AT + FLIGHTS_SIZE
_SIZE = ENTRY.size
SIZE = RING_AT + SLOTS * _SIZE
LENGTH = struct.Struct("H")
_put, _put_word, _now = ENTRY.pack_into, WORD.pack_into, time.monotonic_ns
#: Places in the integers of an entry. Names have numbers of 16 bits.
PHASE, PATIENT, AROUND = 16, 24, 32
GROUP, SUBJECT = 16, 32

#: Activities of a process, outside of collectives or around them.
(
    START, DATA, FORWARD, BACKWARD, CLIP, OPTIMIZER, SAVE, LOAD, VALIDATION, SAMPLE, OUTSIDE, END, MODEL
) = range(13)  # fmt: skip
PHASES = (
    "start", "data", "forward", "backward", "clipping", "optimizer", "save", "load", "validation", "sample",
    "outside the model", "end of the job", "forward and backward",
)  # fmt: skip
#: Phases that may last much longer than a step: files of any size are read and written, texts of any length made.
SLOW_PHASES = frozenset({START, SAVE, LOAD, SAMPLE, END})
#: Steps, from the begin of a heartbeat, that may last much longer than others: kernels are compiled and chosen in them.
FIRST_STEPS = 2
_PREFIX = "shardwright-heartbeat"
_STACKS = ".stacks"


def folder_of_heartbeats() -> Path:
    """Shared memory if the system has it, else the folder for temporary files."""
    memory = Path("/dev/shm")
    return memory if memory.is_dir() and os.access(memory, os.W_OK) else Path(tempfile.gettempdir())


def heartbeat_of(pid: int, folder: Path | None = None) -> Path:
    """The file of the heartbeat of a process of this host, container and user."""
    return (folder or folder_of_heartbeats()) / f"{_PREFIX}-{os.getuid()}-{_container()}-{pid}"


def _container(namespace: Path = Path("/proc/self/ns/pid")) -> int:
    """The namespace of this process's number. Containers may share memory (docker's --ipc=host), not numbers."""
    try:
        return namespace.stat().st_ino
    except OSError:
        return 0  # not Linux


def remove_left_heartbeats(folder: Path | None = None) -> None:
    """Remove the heartbeats of this user's processes that were killed. Their locks have ended with them."""
    for path in (folder or folder_of_heartbeats()).glob(f"{_PREFIX}-{os.getuid()}-*[0-9]"):
        if path == heartbeat_of(os.getpid(), folder):
            continue  # to close it would end the lock of this process
        with suppress(OSError), path.open("r+b") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(file.fileno(), path):
                path.unlink()
                stacks_beside(path).unlink(missing_ok=True)


def _is_at(file: int, path: Path) -> bool:
    """Whether an open file has this path."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def _new_locked_file(path: Path) -> int:
    """Replace the file of an earlier process with this number.

    Until the new file is locked, another process may take it for a left one and remove it. Then it is made again. The
    system ends the lock with the process. A child that was forked does not have it.
    """
    with suppress(FileNotFoundError):
        path.unlink()
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.lockf(file, fcntl.LOCK_EX)
            if _is_at(file, path):
                return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)


def stacks_beside(beat: Path) -> Path:
    """The file into which the process of this heartbeat writes its stacks."""
    return beat.with_name(beat.name + _STACKS)


def group_name(ranks: Sequence[int]) -> str:
    """The name of a group on heartbeats: its ranks in ranges, as ``0-3,8``."""
    parts: list[str] = []
    first = last = None
    for rank in [*sorted(ranks), None]:
        if last is not None and rank == last + 1:
            last = rank
            continue
        if first is not None:
            parts.append(str(first) if first == last else f"{first}-{last}")
        first = last = rank
    return ",".join(parts)


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Ranks in a message: "rank 1", "ranks 1, 2". More than 8 ranks are shown in ranges, "ranks 0-15", 8 at most."""
    parts = group_name(ranks).split(",") if len(ranks) > 8 else [*map(str, ranks)]
    rest = len(ranks) - len(ranks_of(",".join(parts[:8])))
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(parts[:8])}{f' and {rest} more' if rest else ''}"


def ranks_of(name: str) -> list[int]:
    """The ranks of a group with this name."""
    ranks: list[int] = []
    for part in name.split(",") if name else ():
        first, _, last = part.partition("-")
        ranks.extend(range(int(first), int(last or first) + 1))
    return ranks


class Heartbeat:
    """The heartbeat of this process.

    A rank calls :meth:`at`, :meth:`enter`, :meth:`await_result` and :meth:`leave` in its main thread and in autograd's.

    Attributes:
        step: the number of the running step, from 1.
        path: its file.
        began: when, by the host's monotonic clock, in nanoseconds.
    """

    __slots__ = (
        "_around", "_begun", "_counts", "_file", "_memory", "_name_end", "_named", "_numbers", "_place", "_places",
        "_sequence", "_steps", "began", "path", "step",
    )  # fmt: skip

    def __init__(self, rank: int, ranks: int, folder: Path | None = None) -> None:
        self.path = heartbeat_of(os.getpid(), folder)
        self._file = _new_locked_file(self.path)
        try:
            os.ftruncate(self._file, SIZE)
            self._memory = mmap.mmap(self._file, SIZE)
        except OSError:
            os.close(self._file)
            self.path.unlink()
            raise
        self.step = 1
        self._steps = self._begun = 0  # steps that have ended, and steps that have begun with a number
        self._sequence = 0
        self._around = OUTSIDE
        self._numbers = {"": 0}
        self._named: dict[tuple[str, str, str], int] = {}  # integers of collectives
        self._places: dict[tuple[int, str], int] = {}  # of phases and units, as long as patience is the same
        self._counts: dict[str, int] = {}
        self._name_end = NAMES_AT
        self.began = time.monotonic_ns()
        self._word(BEGAN_AT, self.began)
        HEADER.pack_into(self._memory, 0, MAGIC, VERSION, os.getpid(), rank, ranks, SLOTS)
        self.at(START)

    def _word(self, at: int, value: int) -> None:
        WORD.pack_into(self._memory, at, value)

    def _number(self, name: str) -> int:
        """The number of a name. Names for which there is no room have the number of the empty name."""
        number = self._numbers.get(name)
        if number is not None:
            return number
        encoded = name.encode(errors="replace")[:1000]
        end = self._name_end + LENGTH.size + len(encoded)
        number = len(self._numbers)
        if end > MESSAGE_AT or number >= 1 << 16:
            return 0
        LENGTH.pack_into(self._memory, self._name_end, len(encoded))
        self._memory[self._name_end + LENGTH.size : end] = encoded
        self._name_end = end
        self._numbers[name] = number
        self._word(NAME_COUNT_AT, number)  # last: readers now see it
        return number

    def _write(self) -> None:
        self._sequence = number = self._sequence + 1
        _put(self._memory, RING_AT + number % SLOTS * _SIZE, _now(), 0, self.step, 0, self._place, 0, number)

    # -- entries -------------------------------------------------------------------------------------------------

    # The functions below run for every unit, so they write without calls between.

    def at(self, phase: int, unit: str = "") -> None:
        """The process is now in a phase, of a unit if there is one, outside of any collective."""
        place = self._places.get((phase, unit))
        if place is None:
            place = self._places[phase, unit] = self._new_place(phase, unit)
        self._place = place
        self._sequence = number = self._sequence + 1
        _put(self._memory, RING_AT + number % SLOTS * _SIZE, _now(), 0, self.step, 0, place, 0, number)

    def _new_place(self, phase: int, unit: str) -> int:
        around = self._around
        patient = phase in SLOW_PHASES or around in SLOW_PHASES or self._steps < FIRST_STEPS
        # In a validation nothing is outside: between the calls of units the validation goes on.
        shown = around if phase == OUTSIDE else phase
        return self._number(unit) | shown << PHASE | patient << PATIENT | around << AROUND

    def enter(self, collective: str, group: str, nbytes: int = 0, subject: str = "") -> None:
        """The process begins a collective of a group, for the unit ``subject``. It may wait for other ranks now."""
        named = self._named.get((collective, group, subject))
        if named is None:
            named = self._name(collective, group, subject)
        count = self._counts[group] = self._counts.get(group, 0) + 1
        _put_word(self._memory, COUNTS_AT + (named >> GROUP & 0xFFFF) * 8, count)
        self._sequence = number = self._sequence + 1
        _put(
            self._memory, RING_AT + number % SLOTS * _SIZE, _now(), nbytes, self.step, count, self._place, named, number
        )  # fmt: skip

    def await_result(self, collective: str, group: str, nbytes: int = 0, subject: str = "") -> None:
        """The process waits for the result of a collective that it has begun."""
        named = self._named.get((collective, group, subject))
        if named is None:
            named = self._name(collective, group, subject)
        count = self._counts.get(group, 0)
        self._sequence = number = self._sequence + 1
        _put(
            self._memory, RING_AT + number % SLOTS * _SIZE, _now(), nbytes, self.step, count, self._place, named, number
        )  # fmt: skip

    def leave(self) -> None:
        """The process goes on after a collective. This is a time and no entry: it costs a third of one."""
        _put_word(self._memory, LEFT_AT, _now())

    def _name(self, collective: str, group: str, subject: str) -> int:
        number = self._number(group)
        if number >= COUNTED:
            number = 0  # there is no room for its count
        named = self._number(collective) | number << GROUP | self._number(subject) << SUBJECT
        self._named[collective, group, subject] = named
        return named

    def begin_step(self, number: int) -> None:
        """A step with this number begins. Without this, steps of optimizers count."""
        self.step = number
        self._count_steps(self._begun)
        self._begun += 1

    def count_step(self) -> None:
        """A step of an optimizer has ended."""
        self._count_steps(self._steps + 1)
        self.step += 1

    def end_step(self, following: int) -> None:
        """A step that began with a number has ended. ``following``: the number of the next one."""
        self.step = following

    def _count_steps(self, steps: int) -> None:
        if self._steps < FIRST_STEPS:
            self._places.clear()  # patience may end
        self._steps = steps

    def go_into(self, phase: int) -> tuple[int, int]:
        """A phase begins that has others inside, as a validation. Returns the earlier place; for :meth:`go_back`."""
        before = self._place, self._around
        self._around = phase
        self._places.clear()
        self.at(phase)
        return before

    def go_back(self, before: tuple[int, int]) -> None:
        """The process is in an earlier phase again."""
        self._place, self._around = before
        self._places.clear()
        self._write()

    def be_patient(self) -> None:
        """The running phase may last much longer than a step."""
        self._place |= 1 << PATIENT
        self._write()

    # -- for those who watch --------------------------------------------------------------------------------------

    @property
    def memory(self) -> mmap.mmap:
        return self._memory

    def beat(self) -> None:
        """A thread of this process runs: nothing holds the interpreter."""
        self._word(HEARTBEAT_AT, time.monotonic_ns())

    def answers_with_stacks(self, number: int) -> None:
        """The process writes its stacks when it gets this signal."""
        self._word(SIGNAL_AT, number)

    @property
    def asked(self) -> int:
        """Number of times that other processes have asked this one for its stacks."""
        asked: int = WORD.unpack_from(self._memory, ASKED_AT)[0]
        return asked

    def say(self, text: str) -> None:
        """Leave a message: why the job ends. Readers see all of it or nothing."""
        encoded = text.encode(errors="replace")[:MESSAGE_SIZE]
        self._memory[MESSAGE_AT : MESSAGE_AT + len(encoded)] = encoded
        self._word(MESSAGE_LENGTH_AT, len(encoded))

    def note_flights(self, text: str) -> None:
        """Leave what torch's flight recorder says of this process. Readers check that it is whole."""
        encoded = text.encode(errors="replace")
        self._word(FLIGHTS_LENGTH_AT, 0)
        if len(encoded) <= FLIGHTS_SIZE:
            self._memory[FLIGHTS_AT : FLIGHTS_AT + len(encoded)] = encoded
            self._word(FLIGHTS_LENGTH_AT, len(encoded))

    def close(self) -> None:
        """The process leaves in order. Those who have opened the file can still read it."""
        self._word(CLOSED_AT, 1)
        for path in (self.path, stacks_beside(self.path)):
            with suppress(OSError):
                path.unlink()


class Listener(Protocol):
    """Hears what this process notes, in the thread that notes it. It must not raise."""

    def at(self, phase: int, unit: str) -> None:
        """See :meth:`Heartbeat.at`."""

    def enter(self, collective: str, group: str, nbytes: int, subject: str) -> None:
        """See :meth:`Heartbeat.enter`."""

    def await_result(self, collective: str, group: str, nbytes: int, subject: str) -> None:
        """See :meth:`Heartbeat.await_result`."""

    def leave(self) -> None:
        """See :meth:`Heartbeat.leave`. It may come without a collective before it."""

    def end_step(self) -> None:
        """See :meth:`Heartbeat.end_step`."""


class Relay:
    """Passes the notes of this process to its heartbeat, if it has one, and to listeners."""

    __slots__ = ("_heartbeat", "_listeners")

    def __init__(self, beat: Heartbeat | None, listeners: Sequence[Listener]) -> None:
        self._heartbeat, self._listeners = beat, (*listeners,)

    def at(self, phase: int, unit: str = "") -> None:
        """See :meth:`Heartbeat.at`."""
        if self._heartbeat is not None:
            self._heartbeat.at(phase, unit)
        for listener in self._listeners:
            listener.at(phase, unit)

    def enter(self, collective: str, group: str, nbytes: int = 0, subject: str = "") -> None:
        """See :meth:`Heartbeat.enter`."""
        if self._heartbeat is not None:
            self._heartbeat.enter(collective, group, nbytes, subject)
        for listener in self._listeners:
            listener.enter(collective, group, nbytes, subject)

    def await_result(self, collective: str, group: str, nbytes: int = 0, subject: str = "") -> None:
        """See :meth:`Heartbeat.await_result`."""
        if self._heartbeat is not None:
            self._heartbeat.await_result(collective, group, nbytes, subject)
        for listener in self._listeners:
            listener.await_result(collective, group, nbytes, subject)

    def leave(self) -> None:
        """See :meth:`Heartbeat.leave`."""
        for listener in self._listeners:
            listener.leave()
        if self._heartbeat is not None:
            self._heartbeat.leave()

    def begin_step(self, number: int) -> None:
        """See :meth:`Heartbeat.begin_step`."""
        if self._heartbeat is not None:
            self._heartbeat.begin_step(number)

    def count_step(self) -> None:
        """See :meth:`Heartbeat.count_step`."""
        if self._heartbeat is not None:
            self._heartbeat.count_step()

    def end_step(self, following: int) -> None:
        """See :meth:`Heartbeat.end_step`."""
        for listener in self._listeners:
            listener.end_step()
        if self._heartbeat is not None:
            self._heartbeat.end_step(following)

    def go_into(self, phase: int) -> tuple[int, int]:
        """See :meth:`Heartbeat.go_into`."""
        return (0, 0) if self._heartbeat is None else self._heartbeat.go_into(phase)

    def go_back(self, before: tuple[int, int]) -> None:
        """See :meth:`Heartbeat.go_back`."""
        if self._heartbeat is not None:
            self._heartbeat.go_back(before)

    def be_patient(self) -> None:
        """See :meth:`Heartbeat.be_patient`."""
        if self._heartbeat is not None:
            self._heartbeat.be_patient()


#: Where this process writes its notes. None: nobody watches or listens, and nothing is written.
current: Heartbeat | Relay | None = None
#: The heartbeat of this process, which other processes read. None: nobody watches.
own: Heartbeat | None = None
_listeners: list[Listener] = []


def _route() -> None:
    """Let notes go to the heartbeat, and to all listeners."""
    global current
    current = Relay(own, _listeners) if _listeners else own


def open_heartbeat(rank: int, ranks: int, folder: Path | None = None) -> Heartbeat:
    """Begin to write. Raises OSError: there is no room for the file."""
    global own
    remove_left_heartbeats(folder)
    own = Heartbeat(rank, ranks, folder)
    _route()
    return own


def close_heartbeat() -> None:
    """Write no more, and say that the process has left in order."""
    global own
    beat, own = own, None
    _route()
    if beat is not None:
        beat.close()


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Inside the context ``listener`` hears the notes of this process, also without a heartbeat. Without listeners
    notes cost what they cost before."""
    _listeners.append(listener)
    _route()
    try:
        yield
    finally:
        if listener in _listeners:  # not in a child that was forked
            _listeners.remove(listener)
        _route()


def _forget() -> None:
    global own
    own = None
    _listeners.clear()
    _route()


os.register_at_fork(after_in_child=_forget)  # a child must not write to the heartbeat of its parent


def at(phase: int, unit: str = "") -> None:
    """See :meth:`Heartbeat.at`."""
    if current is not None:
        current.at(phase, unit)


def begin_step(number: int) -> None:
    """See :meth:`Heartbeat.begin_step`."""
    if current is not None:
        current.begin_step(number)


def end_step(following: int) -> None:
    """See :meth:`Heartbeat.end_step`."""
    if current is not None:
        current.end_step(following)


def be_patient() -> None:
    """See :meth:`Heartbeat.be_patient`."""
    if current is not None:
        current.be_patient()


@contextmanager
def during(phase: int) -> Iterator[None]:
    """The phase of what is done inside this context, also around the phases of units; afterwards the earlier one."""
    beat = current
    if beat is None:
        yield
        return
    before = beat.go_into(phase)
    try:
        yield
    finally:
        beat.go_back(before)


@contextmanager
def inside(collective: str, group: str, nbytes: int = 0, subject: str = "") -> Iterator[None]:
    """A collective inside this context. For those that are not called for each unit."""
    beat = current
    if beat is None:
        yield
        return
    beat.enter(collective, group, nbytes, subject)
    try:
        yield
    finally:
        beat.leave()
