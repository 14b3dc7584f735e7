"""Collectives of ranks of one host, as copies through memory that they share.

A rank copies its data into a segment of its page and posts where that is. So a collective begins, and waits for nobody.
A rank that waits for it copies the other ranks' data out of their segments and marks how far it has read. A segment is
used again once all ranks have read it. Ranks agree on a collective before (``meeting.py``), so posts are in one order.
"""

from __future__ import annotations

import ctypes
import functools
import operator
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch

from shardwright.engine.comm.division import Division
from shardwright.engine.comm.hall import LEFT_AFTER_TIMEOUT, Hall, Missing, packed, unpacked
from shardwright.engine.comm.pages import POSTS, OtherPage, Page

_SMALLEST = 1 << 12  #: bytes of a segment


class RankData(NamedTuple):
    """The place of one rank's data."""

    page: Page | OtherPage
    offset: int

    def address(self) -> int:
        return self.page.base + self.offset

    def view(self, offset: int, like: torch.Tensor) -> torch.Tensor:
        """The part of the data that begins there and is as large as ``like``, without a copy."""
        memory, start = self.page.memory, self.offset + offset
        return torch.frombuffer(memory, dtype=like.dtype, count=like.numel(), offset=start)


#: Makes results of the data of all ranks; may run again after an interrupt.
ReadsData = Callable[[list[RankData]], None]
#: Where data goes in the segment, where it is, and its size; all in bytes.
Send = tuple[int, int, int]


class _PageRoom:
    """Room in this process's page, for one collective at a time."""

    def __init__(self, page: Page, offset: int) -> None:
        self.page = page
        self.offset = offset
        #: The post that it was last used for, with its group; one value, so that an interrupt leaves it whole.
        self.use: tuple[int, Hall] | None = None

    def is_free(self, number: int, posts: Hall) -> bool:
        """Whether a post may use it: every rank, this one too, has read what is there, or has ended."""
        if self.use is None:
            return True
        used, by = self.use
        if by.mine is posts.mine and used == number:
            return True  # that post was never written, or this would have the next number
        if by.mine.last < used or by.mine.marked < used:
            return False
        return all(ring.marked >= used or not ring.is_alive() for _, ring in by.others())


class _Segments:
    """The segments of one page, by size and thread: no two threads choose among the same ones."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self._segments: dict[tuple[int, int], list[_PageRoom]] = {}

    def take(self, nbytes: int, number: int, posts: Hall) -> _PageRoom:
        """A segment for this post. It counts as used until all ranks have read it.

        Raises:
            MemoryError: the page is full.
        """
        size = _rounded(nbytes)
        segments = self._segments.setdefault((size, threading.get_ident()), [])
        segment = next((each for each in segments if each.is_free(number, posts)), None)
        if segment is None:
            segment = _PageRoom(self.page, self.page.room_for_data(size))
            segments.append(segment)
        segment.use = number, posts
        return segment


def _rounded(nbytes: int) -> int:
    """Few sizes, so that segments fit again; at most a quarter is unused."""
    step = max(_SMALLEST, 1 << max(nbytes - 1, 1).bit_length() >> 3)
    return -(-max(nbytes, 1) // step) * step


@functools.cache
def _segments_of(page: Page) -> _Segments:
    return _Segments(page)


def _none() -> None:
    """A reference to nothing."""


class Exchange:
    """One collective, which every rank has begun or is about to begin. Its buffers live until it is over."""

    #: Nothing is written to the results before :meth:`wait`, so nobody has to wait before their memory is used again.
    in_background = False

    def __init__(
        self,
        copies: SharedMemoryCollectives,
        number: int,
        segment: _PageRoom,
        sends: list[Send],
        read: ReadsData,
    ) -> None:
        self.number = number
        self._meeting = 0
        self._copies = copies
        self._place = RankData(segment.page, segment.offset)
        self._sends = sends
        self._nbytes = sum(nbytes for _, _, nbytes in sends)
        self._read: ReadsData | None = read

    def steps(self, meeting: int) -> Iterator[Callable[[], Any]]:
        """Calls that begin it; the last returns it. They run no Python, so no interrupt comes between them.

        Args:
            meeting: the number of the ranks' last record; the same one on all of them.
        """
        self._meeting = meeting
        start = self._place.address()
        for to, source, nbytes in self._sends:
            yield functools.partial(ctypes.memmove, start + to, source, nbytes)
        yield functools.partial(self._copies.unread.__setitem__, self.number, weakref.ref(self))
        record = packed([self._place.offset, self._nbytes, meeting])
        yield from self._copies.posts.mine.writing(self.number, record)
        yield functools.partial(operator.getitem, (self,), 0)

    def wait(self, limit: timedelta | None = None) -> None:
        """Read the other ranks' data, once they have posted it; may be repeated after an interrupt.

        Raises:
            Missing: a rank has ended, or does not come within ``limit`` (default: the group's timeout).
            RuntimeError: a rank has posted something else.
        """
        if self._read is None:
            return
        posts, until = self._copies.posts, self._copies.until(limit)
        places = []
        for rank, ring in posts.rings:
            if ring is None:
                places.append(self._place)
                continue
            offset, *theirs = unpacked(posts.wait_for_one(rank, ring, self.number, until))[:3]
            if theirs != (mine := [self._nbytes, self._meeting]):
                raise RuntimeError(
                    f"Collective {self.number} of a group is not the same on rank {rank} and on this rank. There it "
                    f"has {theirs[0]} bytes and follows exchange {theirs[1]}, here {mine[0]} bytes and exchange "
                    f"{mine[1]}. Make the process group again, on all ranks."
                )
            places.append(RankData(ring.page, offset))
        self._read(places)
        self._read = None
        self._copies.forget(self)

    def is_completed(self) -> bool:
        """Whether :meth:`wait` would not wait."""
        return self._read is None or all(
            ring.has_written(self.number) for _, ring in self._copies.posts.others()
        )

    def __del__(self) -> None:
        if hasattr(self, "_read"):  # an interrupt may come while it is made
            self._copies.forget(self)


def _check(pieces: Sequence[torch.Tensor], wholes: Sequence[torch.Tensor], ranks: int) -> None:
    """Their memory is read and written without torch, which would check it."""
    for piece, whole in zip(pieces, wholes, strict=True):
        if not (piece.is_contiguous() and whole.is_contiguous() and whole.nbytes == ranks * piece.nbytes):
            raise ValueError(
                f"A collective of {ranks} ranks got tensors of {tuple(piece.shape)} and {tuple(whole.shape)}; the "
                f"second must have {ranks} times the bytes of the first, and both must be contiguous."
            )


class SharedMemoryCollectives:
    """Collectives of one group. Tensors are flat and contiguous.

    Attributes:
        posts: where each rank says where its data is.
        missing: the rank for which this one waited until the group's timeout.
        unread: collectives that this rank has begun and whose data it has not read, by number.
    """

    def __init__(self, posts: Hall, timeout: timedelta) -> None:
        self.posts = posts
        self.missing: int | None = None
        self.unread: dict[int, weakref.ref[Exchange]] = {}
        self._timeout = timeout
        self._segments = _segments_of(posts.mine.page)
        self._rank = next(i for i, (_, ring) in enumerate(posts.rings) if ring is None)
        self._ranks = len(posts.rings)

    def close(self, missing: int) -> None:
        """No collective follows, on any rank: this one has waited for rank ``missing`` until the group's timeout."""
        self.missing = missing
        self.posts.mine.close()

    def until(self, limit: timedelta | None) -> float:
        """When a wait ends, as of ``time.monotonic``."""
        return time.monotonic() + (self._timeout if limit is None else limit).total_seconds()

    def forget(self, exchange: Exchange) -> None:
        """This rank reads no data of it any more. If it never began, its number may be another one's."""
        if self.posts.mine.page.process != os.getpid():
            return  # a forked process has the objects of its parent, and must not write to the parent's page
        reference = self.unread.get(exchange.number)
        if reference is None or reference() not in (exchange, None):
            return
        for number, each in list(self.unread.items()):
            if number == exchange.number or each() is None:  # an interrupt in ``__del__`` leaves dead ones
                self.unread.pop(number, None)
        self.posts.mine.mark(min(self.unread, default=self.posts.mine.last + 1) - 1)

    def gather(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Exchange:
        """``outputs[i]`` will hold every rank's ``inputs[i]``, rank after rank."""
        _check(inputs, outputs, self._ranks)
        sends: list[Send] = []
        end = 0
        for piece in inputs:
            sends.append((end, piece.data_ptr(), piece.nbytes))
            end += piece.nbytes

        def read(places: list[RankData]) -> None:
            for output, (offset, _, nbytes) in zip(outputs, sends, strict=True):
                to = output.data_ptr()
                for i, place in enumerate(places):
                    ctypes.memmove(to + i * nbytes, place.address() + offset, nbytes)

        return self._exchange(sends, end, read)

    def reduce_scatter(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], division: Division
    ) -> Exchange:
        """``outputs[i]`` will hold the sum of this rank's pieces of all ranks' ``inputs[i]``, divided.

        An input is its pieces, rank after rank.
        """
        n, mine = self._ranks, self._rank
        _check(outputs, inputs, n)
        row = sum(tensor.nbytes for tensor in inputs) // n
        sends: list[Send] = []
        end = 0
        for tensor in inputs:
            source, nbytes = tensor.data_ptr(), tensor.nbytes // n
            sends.extend((i * row + end, source + i * nbytes, nbytes) for i in range(n) if i != mine)
            end += nbytes

        def read(places: list[RankData]) -> None:
            offset = mine * row
            for output, tensor in zip(outputs, inputs, strict=True):
                if output.numel():
                    parts = [
                        tensor.view(n, -1)[i] if i == mine else place.view(offset, output)
                        for i, place in enumerate(places)
                    ]
                    division.sum_parts(parts, output)
                offset += output.nbytes

        return self._exchange(sends, n * row, read)

    def all_reduce(self, tensor: torch.Tensor, division: Division) -> Exchange:
        """``tensor`` will be the sum of all ranks', divided."""

        def read(places: list[RankData]) -> None:
            if tensor.numel():
                division.sum_parts([place.view(0, tensor) for place in places], tensor)

        return self._exchange([(0, tensor.data_ptr(), tensor.nbytes)], tensor.nbytes, read)

    def _exchange(self, sends: list[Send], nbytes: int, read: ReadsData) -> Exchange:
        """An exchange of ``nbytes`` in a segment.

        Raises:
            MemoryError: there is no room for the data.
            Missing: ranks do not read what was posted long ago, or the group is closed.
        """
        if self.missing is not None:
            raise Missing(self.missing, "this rank waited for the group's timeout", late=False)
        for rank, ring in self.posts.others():
            if ring.is_closed:
                raise Missing(rank, LEFT_AFTER_TIMEOUT, late=False)
        number = self.posts.mine.last + 1
        if number > POSTS:
            self._make_room(number - POSTS)
        return Exchange(self, number, self._segments.take(nbytes, number, self.posts), sends, read)

    def _make_room(self, oldest: int) -> None:
        """Wait until all ranks have read the data of post ``oldest``, in whose place another one is written.

        This rank reads its own first: ranks that have begun that many collectives would wait for each other.
        """
        for number in sorted(self.unread):
            exchange = (self.unread.get(number) or _none)()
            if number <= oldest and exchange is not None:
                exchange.wait()
                self.forget(exchange)
        self.posts.wait_for_marks(oldest, self.until(None))
