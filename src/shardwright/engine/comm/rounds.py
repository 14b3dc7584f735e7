"""Rounds in which the ranks of a group exchange a record of a few integers, through gloo or shared pages.

The first rounds use gloo. Their records have the addresses of pages, so ranks of one host find each other's pages
(``pages.py``). When each rank has found all pages, later rounds use the pages, which takes a few microseconds. All
ranks change in the same round: the one after a round whose records all say that the pages were found.
"""

from __future__ import annotations

import ctypes
import struct
import time
import weakref
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from shardwright.engine.comm import pages
from shardwright.engine.comm.hall import RECORD, Hall, Missing, packed, unpacked
from shardwright.engine.comm.pages import NOWHERE, Address
from shardwright.engine.comm.shared_memory import SharedMemoryCollectives
from shardwright.engine.compat.collectives import AllToAllOptions, backend_for, timeout_of
from shardwright.engine.compat.modes import modes_are_active

LEFT = -1  #: first integer of the record of a rank that has left
#: Time that a rank that has left keeps its connections open. Then the connections of the others fail.
REACHABLE = timedelta(seconds=60)


class _Records:
    """A row for each rank of a group. Python reads and writes the tensor's memory directly, without torch operations.

    A row has a record, the address of its rank's ring, and whether that rank has found all other rings.
    """

    _row = struct.Struct(f"={RECORD + len(NOWHERE) + 1}q")

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        #: The tensor for collectives: flat, int64.
        self.tensor = torch.zeros(ranks * self._row.size // 8, dtype=torch.int64, device="cpu")
        self._memory = (ctypes.c_char * self.tensor.nbytes).from_address(self.tensor.data_ptr())

    def write(self, record: bytes, address: Address, all_rings_open: bool) -> None:
        """Write the same row for every rank."""
        self._memory.raw = self._row.pack(*unpacked(record), *address, all_rings_open) * self._ranks

    def rows(self) -> list[tuple[int, ...]]:
        return list(self._row.iter_unpack(self._memory.raw))


class Round(Protocol):
    """One exchange of records among the ranks."""

    @property
    def number(self) -> int:
        """Number of the record on pages; the same number on every rank."""

    @property
    def begun(self) -> bool:
        """Whether this rank has sent its record."""

    def make_room(self, limit: timedelta | None) -> None:
        """Wait until :meth:`begin` can send the record."""

    def begin(self) -> None:
        """Send the record. An interrupt comes before or after this, not in between."""

    def wait(self, limit: timedelta | None) -> None:
        """Wait for the other ranks."""

    def is_over(self) -> bool:
        """Whether all ranks have sent their records."""

    def records(self) -> list[bytes]:
        """The records of all ranks, after the end of the round."""

    def is_watched(self) -> bool:
        """Whether a rank had a dispatch mode around it, which may count collectives; once it is over."""


class ByGloo:
    """A round through gloo's all-to-all. It uses no dispatcher, and does not pair with collectives that users call."""

    number = 0

    def __init__(self, backend: Any, mine: _Records, theirs: _Records, options: Any) -> None:
        self._backend = backend
        self._mine = mine
        self._theirs = theirs
        self._options = options
        self._works: list[Any] = []

    @property
    def begun(self) -> bool:
        return bool(self._works)

    def make_room(self, limit: timedelta | None) -> None:
        """Does nothing: gloo always has room."""

    def begin(self) -> None:
        # No Python code runs between its begin and its entry in the list.
        tensors = (self._theirs.tensor,), (self._mine.tensor,)
        self._works.extend(map(self._backend.alltoall_base, *tensors, ([],), ([],), (self._options,)))

    def wait(self, limit: timedelta | None) -> None:
        work = self._works[0]
        work.wait() if limit is None else work.wait(limit)

    def is_over(self) -> bool:
        return bool(self._works[0].is_completed())

    def records(self) -> list[bytes]:
        return [packed(row[:RECORD]) for row in self._theirs.rows()]

    def is_watched(self) -> bool:
        return True  # collectives go by gloo, too

    def rows(self) -> list[tuple[int, ...]]:
        return self._theirs.rows()


class _ByPages:
    """A round through shared pages."""

    def __init__(self, hall: Hall, number: int, record: bytes, timeout: timedelta) -> None:
        self._hall = hall
        self.number = number
        self._record = record
        self._timeout = timeout
        self._records: list[bytes] = []
        self._missing: Missing | None = None  #: the rank that did not come in an earlier wait

    @property
    def begun(self) -> bool:
        return self._hall.mine.last >= self.number

    def make_room(self, limit: timedelta | None) -> None:
        if not self._hall.has_room(self.number):
            self._hall.wait_for_room(self.number, self._until(limit))

    def begin(self) -> None:
        self._hall.mine.write(self.number, self._record, modes_are_active())

    def _until(self, limit: timedelta | None) -> float:
        return time.monotonic() + (self._timeout if limit is None else limit).total_seconds()

    def wait(self, limit: timedelta | None) -> None:
        if self._missing is not None:  # as after a failed collective of gloo
            raise self._missing
        try:
            self._records = self._hall.wait_for(self.number, self._record, self._until(limit))
        except Missing as error:
            self._missing = error
            raise

    def is_over(self) -> bool:
        return all(ring.read(self.number) is not None for _, ring in self._hall.others())

    def records(self) -> list[bytes]:
        return self._records

    def is_watched(self) -> bool:
        return self._hall.is_flagged(self.number)


class Way:
    """Chooses between gloo and pages for the rounds of one group.

    Attributes:
        hall: the rings, if rounds use pages; None: rounds use gloo.
        unshown: records of a leaving rank for which there was no room, the oldest first. Others ignore duplicates.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group_ref = weakref.ref(group)
        self._device = device
        self._ranks = dist.get_process_group_ranks(group)
        self._mine, self._theirs = _Records(len(self._ranks)), _Records(len(self._ranks))
        self._ring = pages.new_ring()
        self._found: Hall | None = None  #: set when this rank has found all other rings
        self.hall: Hall | None = None
        self._shared: SharedMemoryCollectives | None = None
        self._left: list[tuple[ByGloo, Any]] = []  #: rounds of a leaving rank, with their memory
        self.unshown: list[bytes] = []

    @property
    def _backend(self) -> Any:
        group = self._group_ref()
        assert group is not None  # the calling communicator has it
        return backend_for(group, self._device)

    @property
    def shared_memory(self) -> SharedMemoryCollectives | None:
        """The ranks' collectives, once they meet on pages; None: they go by gloo."""
        hall = self.hall if self._device.type == "cpu" and pages.data_comes_first() else None
        if self._shared is None and hall is not None and hall.has_room_for_data():
            self._shared = SharedMemoryCollectives(hall.posts(), timeout_of(self._backend))
        return self._shared

    def new_round(self, record: bytes) -> Round:
        if self.hall is not None:
            return _ByPages(self.hall, self.hall.mine.last + 1, record, timeout_of(self._backend))
        address = self._ring.address if self._ring is not None else NOWHERE
        self._mine.write(record, address, self._found is not None)
        return ByGloo(self._backend, self._mine, self._theirs, AllToAllOptions())

    def learn(self, current: Round) -> None:
        """Find the rings of the ranks of this round. If all ranks had found all rings, later rounds use pages.

        A rank that has left did not wait for the round, so it does not know the records of the others.
        """
        if self._ring is None or self.hall is not None or not isinstance(current, ByGloo):
            return
        rows = current.rows()
        addresses = [Address(*row[RECORD:-1]) for row in rows]
        if any(row[0] == LEFT for row in rows) or NOWHERE in addresses:
            return
        if self._found is not None and all(row[-1] for row in rows):
            self.hall = self._found
        elif self._found is None:
            mine = self._ring.address
            try:
                rings = [None if each == mine else pages.other_ring(each) for each in addresses]
            except OSError:
                self._ring = None  # some are on other hosts
            else:
                self._found = Hall(self._ring, list(zip(self._ranks, rings, strict=True)))

    def leave(self, record: bytes) -> None:
        """Send this record without waiting for the other ranks."""
        hall = self.hall
        if hall is not None:
            number = hall.mine.last + 1
            if self.unshown or not hall.has_room(number):
                self.unshown.append(record)  # the others have missed many failures of this rank
            else:
                hall.mine.write(number, record)
            return
        self._left = [each for each in self._left if not each[0].is_over()]
        mine, theirs = _Records(len(self._ranks)), _Records(len(self._ranks))
        mine.write(record, NOWHERE, False)
        options = AllToAllOptions()
        options.timeout = REACHABLE
        leaving = ByGloo(self._backend, mine, theirs, options)
        leaving.begin()
        self._left.append((leaving, (mine, theirs)))

    def close(self, missing: int) -> None:
        """Called after the group's timeout, as gloo closes then. A rank that comes later gets no collective with this
        one."""
        if self.shared_memory is not None:
            self.shared_memory.close(missing)
        options = AllToAllOptions()
        options.timeout = timedelta(milliseconds=1)
        mine, theirs = _Records(len(self._ranks)), _Records(len(self._ranks))
        closing = ByGloo(self._backend, mine, theirs, options)
        with suppress(RuntimeError):
            closing.begin()
            closing.wait(None)
