"""Shared memory of the ranks of one host: short records in rings, and room for data.

Each process writes to its own page and reads the pages of others. A page is an anonymous file: it has no name, and
disappears with the last process that has it open. A record is written once, with its number and a checksum. So a reader
recognises a half-written record. Readers sleep on a futex of the writer. This file knows no process groups.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import mmap
import os
import platform
import secrets
import struct
import sys
import threading
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

WORDS = 6  #: int64 words of a record
SWITCH = "SHARDWRIGHT_CPU_COLLECTIVES"  #: environment variable; "gloo": no process uses pages

#: A slot: the record's number, the record, their checksum. "=" would write byte by byte, so that others could read half
#: a number; native integers are written at once.
_RING = struct.Struct(f"{WORDS + 2}q")
_RECORD = struct.Struct(f"={WORDS}q")
_HEADER = struct.Struct("=2q")  #: at the start of a page: the magic number, and its token
_BELL = struct.Struct("i")
_MARK = struct.Struct("q")  #: behind the bell
_FLAG = 32  #: the bit of the flag, above the checksum
_CLOSED = 16  #: where a byte says that a ring is closed
_MAGIC = 0x7368617264776701
SLOTS = 15  #: records of a ring of meetings, the latest ones
POSTS = 127  #: of a ring of posts
_RINGS = 64 * (SLOTS + 1), 64 * (POSTS + 1)  #: bytes of each; a ring is its bell and its mark, then its slots
_ROOM = sum(_RINGS)  #: of both rings of a group
_DATA = 1 << 30  #: where the room for data begins, behind all rings
_SIZES = (
    1 << 36,
    _DATA,
)  #: bytes of a page, the first that the system allows; only written parts take memory
_NAME = "shardwright"
_LOCK = struct.Struct("hhqqi4x")  #: struct flock
TICK = 0.1  #: longest sleep of a reader in seconds; then it checks whether the writer lives
_LOOKS = 8  #: how often a reader checks before it sleeps
_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine())  #: number of the system call
_WAIT, _WAKE = 0, 1


class Address(NamedTuple):
    """The address at which another process finds a ring: four int64 words."""

    pid: int
    file: int  #: its number in that process
    token: int  #: of the page
    offset: int  #: of the group's rings, in bytes; 0: there are none


NOWHERE = Address(0, 0, 0, 0)


def data_comes_first() -> bool:
    """Whether others see data before a record that was written after it. Other processors may reorder the two."""
    return platform.machine() == "x86_64"


def usable() -> bool:
    """Whether this process may use pages."""
    return (
        os.environ.get(SWITCH, "") != "gloo"
        and sys.platform == "linux"
        and _FUTEX is not None
        and hasattr(os, "memfd_create")
        and sys.byteorder == "little"
    )


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_tick = _Time(0, int(TICK * 1e9))
_EXPECTED = (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT)


@functools.cache
def _system() -> Any:
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    call.argtypes = (
        ctypes.c_long,
        ctypes.c_void_p,
        ctypes.c_long,
        ctypes.c_long,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_long,
    )
    return call


class Page:
    """The page of this process."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.file = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        try:
            self.memory = _mapped(self.file)
            # The system releases the lock when the process ends in any way. So other processes know whether it lives.
            fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self.file)
            raise
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.token = secrets.randbits(62)
        _HEADER.pack_into(self.memory, 0, _MAGIC, self.token)
        self._end = _ROOM
        self._data_end = _DATA
        self._choosing = threading.Lock()

    def room(self) -> int:
        """The offset of new rings, or 0 if the page is full. Offsets are not reused, since late readers may read
        there."""
        offset, end = self._end, self._end + _ROOM
        if end > _DATA:
            return 0
        self._end = end
        return offset

    @property
    def has_room_for_data(self) -> bool:
        return len(self.memory) > _DATA

    def room_for_data(self, nbytes: int) -> int:
        """The offset of room that nobody has used.

        Raises:
            MemoryError: the page is full.
        """
        with self._choosing:
            offset, end = self._data_end, self._data_end + nbytes
            if end <= len(self.memory):
                self._data_end = end
                return offset
        raise MemoryError(
            f"A collective needs {nbytes} more bytes of memory that the ranks of this host share. This process "
            f"can share {len(self.memory) >> 30} GiB, which have no room for them. Set {SWITCH}=gloo on all ranks."
        )


def _mapped(file: int) -> mmap.mmap:
    for size in _SIZES:
        try:
            os.ftruncate(file, size)
            memory = mmap.mmap(file, size)
        except OSError:
            if size == _SIZES[-1]:
                raise
        else:
            with suppress(AttributeError, OSError):
                memory.madvise(mmap.MADV_DONTDUMP)
            return memory
    raise AssertionError


_own: Page | None = None


def new_ring() -> Ring | None:
    """A ring for records that this process writes and others read. None if there is no room."""
    global _own
    if not usable():
        return None
    try:
        if _own is None or _own.process != os.getpid():  # a forked process has pages of its own
            _own = Page()
        offset = _own.room()
    except OSError:
        return None
    return Ring(_own, offset) if offset else None


class Ring:
    """The records of this process in one group, number 1 first."""

    def __init__(self, page: Page, offset: int, slots: int = SLOTS) -> None:
        self.page = page
        self._offset = offset
        self._slots = slots
        self._last = 0
        self._bells = 0
        self.address = Address(page.process, page.file, page.token, offset)

    def posts(self) -> Ring:
        """The group's other ring, for what this process posts."""
        return Ring(self.page, self._offset + _RINGS[0], POSTS)

    @property
    def last(self) -> int:
        """The number of the last record, read from the memory, because an interrupt may come after any line."""
        while self._number_at(self._last + 1) == self._last + 1:
            self._last += 1
        return self._last

    def _number_at(self, number: int) -> int:
        start = _slot(self._offset, number, self._slots)
        return int.from_bytes(self.page.memory[start : start + 8], "little")

    def write(self, number: int, record: bytes, flag: bool = False) -> None:
        """Write the next record. Readers see all of it or nothing."""
        for step in self.writing(number, record, flag):
            step()

    def writing(self, number: int, record: bytes, flag: bool = False) -> tuple[Callable[[], Any], ...]:
        """:meth:`write` as calls that run no Python, to be called in this order."""
        slot = _slot(self._offset, number, self._slots)
        self._bells = (self._bells + 1) & 0x7FFFFFFF
        memory, bell = self.page.memory, self.page.base + self._offset
        words = _RECORD.unpack(record)
        return (
            functools.partial(
                _RING.pack_into, memory, slot, number, *words, _checksum(number, record) | flag << _FLAG
            ),
            functools.partial(_BELL.pack_into, memory, self._offset, self._bells),
            functools.partial(_system(), _FUTEX, bell, _WAKE, 0x7FFFFFFF, None, None, 0),
        )

    def flag(self, number: int) -> bool:
        """Whether this record was written with a flag."""
        return _flag(self.page.memory, _slot(self._offset, number, self._slots))

    def mark(self, number: int) -> None:
        """Say how far this process has read the others' data."""
        _MARK.pack_into(self.page.memory, self._offset + 8, number)

    @property
    def marked(self) -> int:
        """The last mark."""
        number: int = _MARK.unpack_from(self.page.memory, self._offset + 8)[0]
        return number

    @property
    def is_closed(self) -> bool:
        return bool(self.page.memory[self._offset + _CLOSED])

    def close(self) -> None:
        """Say that no record follows."""
        self.page.memory[self._offset + _CLOSED] = 1


def _slot(offset: int, number: int, slots: int) -> int:
    return offset + 64 * (1 + number % slots)


def _checksum(number: int, record: bytes) -> int:
    return zlib.crc32(record, number & 0xFFFFFFFF)


def _flag(memory: mmap.mmap, slot: int) -> bool:
    return bool(memory[slot + 56 + _FLAG // 8])


class OtherPage:
    """The page of another process, for reading."""

    def __init__(self, address: Address) -> None:
        """Raises OSError: that process is on another host, belongs to another user or has ended."""
        path = f"/proc/{address.pid}/fd/{address.file}"
        if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
            raise FileNotFoundError(path)
        # A rank of another host may have the same numbers. A lock disappears when its process closes any such file.
        mine = _own.file if _own is not None and _own.process == os.getpid() else None
        if mine is not None and os.path.samestat(os.stat(path), os.fstat(mine)):
            raise FileNotFoundError(path)
        self.file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            # Readers do not write, but a futex needs writable memory.
            self.memory = mmap.mmap(self.file, os.fstat(self.file).st_size)
        except (OSError, ValueError) as error:
            os.close(self.file)
            raise FileNotFoundError(path) from error
        if _HEADER.unpack_from(self.memory, 0) != (_MAGIC, address.token):
            self.memory.close()
            os.close(self.file)
            raise FileNotFoundError(path)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))

    @property
    def has_room_for_data(self) -> bool:
        return len(self.memory) > _DATA

    def is_alive(self) -> bool:
        asked = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        return _LOCK.unpack(fcntl.fcntl(self.file, fcntl.F_GETLK, asked))[0] != fcntl.F_UNLCK


_others: dict[tuple[int, int], OtherPage] = {}  #: by process and token


def other_ring(address: Address) -> OtherRing:
    """The ring of another process.

    Raises:
        OSError: it cannot be read.
    """
    key = os.getpid(), address.token
    if key not in _others:
        _others[key] = OtherPage(address)
    return OtherRing(_others[key], address.offset)


class OtherRing:
    """The records of another process in one group."""

    def __init__(self, page: OtherPage, offset: int, slots: int = SLOTS) -> None:
        self.page = page
        self._offset = offset
        self._slots = slots

    def posts(self) -> OtherRing:
        """The group's other ring, for what that process posts."""
        return OtherRing(self.page, self._offset + _RINGS[0], POSTS)

    @property
    def marked(self) -> int:
        """Number of the last record whose data that process has read."""
        number: int = _MARK.unpack_from(self.page.memory, self._offset + 8)[0]
        return number

    def read(self, number: int) -> bytes | None:
        """The record of this number, or None if it does not exist (yet)."""
        start = _slot(self._offset, number, self._slots)
        slot = self.page.memory[start : start + 64]
        record = slot[8:56]
        if int.from_bytes(slot[:8], "little") != number:
            return None
        return record if int.from_bytes(slot[56:60], "little") == _checksum(number, record) else None

    def flag(self, number: int) -> bool:
        """Whether this record, which is there, was written with a flag."""
        return _flag(self.page.memory, _slot(self._offset, number, self._slots))

    def has_written(self, number: int) -> bool:
        """Whether this record was written. A later record may have replaced it."""
        start = _slot(self._offset, number, self._slots)
        return int.from_bytes(self.page.memory[start : start + 8], "little") >= number

    def wait(self, number: int) -> bytes | None:
        """The record of this number, or None if it does not come within ``TICK``."""
        for _ in range(_LOOKS):
            if (record := self.read(number)) is not None:
                return record
        memory, offset, call = self.page.memory, self._offset, _system()
        end = time.monotonic() + TICK
        while True:
            (bell,) = _BELL.unpack_from(memory, offset)
            if (record := self.read(number)) is not None or time.monotonic() > end:
                return record
            failed = call(_FUTEX, self.page.base + offset, _WAIT, bell, ctypes.addressof(_tick), None, 0) < 0
            if failed and ctypes.get_errno() not in _EXPECTED:
                time.sleep(TICK / 100)

    def is_alive(self) -> bool:
        """Whether the writing process still runs."""
        return self.page.is_alive()

    @property
    def is_closed(self) -> bool:
        """Whether no record follows those that are there."""
        return bool(self.page.memory[self._offset + _CLOSED])
