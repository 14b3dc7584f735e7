"""The ranks of a group as readers of each other's rings, all on one host."""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from typing import NamedTuple

from shardwright.engine.comm.pages import SLOTS, TICK, WORDS, OtherRing, Ring

LEFT_AFTER_TIMEOUT = "it waited for the group's timeout and left"
RECORD = WORDS  #: integers that ranks show each other


def packed(record: Sequence[int]) -> bytes:
    return struct.pack(f"={RECORD}q", *record, *[0] * (RECORD - len(record)))


def unpacked(record: bytes) -> list[int]:
    return list(struct.unpack(f"={RECORD}q", record))


class Missing(Exception):
    """A rank does not send its record."""

    def __init__(self, rank: int, reason: str, late: bool) -> None:
        super().__init__(reason)
        self.rank = rank
        self.late = late  #: whether its process still runs


class Hall(NamedTuple):
    """The rings of a group, if all its ranks are on one host."""

    mine: Ring
    rings: list[tuple[int, OtherRing | None]]  #: by rank; None: this rank's

    def posts(self) -> Hall:
        """The same ranks' other rings."""
        return Hall(
            self.mine.posts(),
            [(rank, ring.posts() if ring is not None else None) for rank, ring in self.rings],
        )

    def others(self) -> list[tuple[int, OtherRing]]:
        return [(rank, ring) for rank, ring in self.rings if ring is not None]

    def has_room_for_data(self) -> bool:
        """Whether the pages of all ranks have; every rank finds the same."""
        return all((ring or self.mine).page.has_room_for_data for _, ring in self.rings)

    def is_flagged(self, number: int) -> bool:
        """Whether any rank has written its record of this number, which all have read, with a flag."""
        return self.mine.flag(number) or any(ring.flag(number) for _, ring in self.others())

    def wait_for(self, number: int, record: bytes, until: float) -> list[bytes]:
        """The records of this number of all ranks. ``record`` is this rank's record.

        Raises:
            Missing: a process has ended, or ``until`` (of ``time.monotonic``) is over.
        """
        return [
            record if ring is None else self.wait_for_one(rank, ring, number, until)
            for rank, ring in self.rings
        ]

    def wait_for_one(self, rank: int, ring: OtherRing, number: int, until: float) -> bytes:
        """The record of one rank. Raises as :meth:`wait_for`."""
        while (record := ring.wait(number)) is None:
            self._check(number, until, rank)
        return record

    def _check(self, number: int, until: float, slow: int) -> None:
        """Raise if a rank has ended or left, or if the time of the ``slow`` rank is over."""
        for rank, ring in self.others():
            if not ring.has_written(number):
                closed, alive = ring.is_closed, ring.is_alive()
                if (closed or not alive) and not ring.has_written(number):
                    reason = LEFT_AFTER_TIMEOUT if alive else "its process has ended"
                    raise Missing(rank, reason, late=False)
        if time.monotonic() > until:
            raise Missing(slow, "timed out", late=True)

    def has_room(self, number: int) -> bool:
        """Whether all ranks have read the older record that the record of this number overwrites."""
        read = number - SLOTS + 1
        return read <= 0 or all(ring is None or ring.has_written(read) for _, ring in self.rings)

    def wait_for_room(self, number: int, until: float) -> None:
        """Wait until there is room. Needed only after this rank has left many times. Raises as :meth:`wait_for`."""
        read = number - SLOTS + 1
        while read > 0 and (late := [rank for rank, ring in self.others() if not ring.has_written(read)]):
            self._check(read, until, late[0])
            time.sleep(TICK / 10)

    def wait_for_marks(self, number: int, until: float) -> None:
        """Until all ranks have read the data of this post. Raises as :meth:`wait_for`."""
        for rank, ring in self.others():
            while ring.marked < number:
                if ring.is_closed or not ring.is_alive():
                    reason = LEFT_AFTER_TIMEOUT if ring.is_closed else "its process has ended"
                    raise Missing(rank, reason, late=False)
                if time.monotonic() > until:
                    raise Missing(rank, "timed out", late=True)
                time.sleep(TICK / 100)
