"""The ranks that save or load a checkpoint together: what they exchange, and errors that all of them raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from shardwright.checkpoint.format.digests import Damaged
from shardwright.comm.noted import noted

T = TypeVar("T")

#: Errors that keep their kind on every rank; others become a RuntimeError on the ranks without them. The first kind
#: that any rank has wins, so that damage is not reported where a rank could not work at all.
_KINDS: tuple[type[Exception], ...] = (
    RuntimeError, FileExistsError, FileNotFoundError, OSError, TypeError, KeyError, Damaged, ValueError,
)  # fmt: skip


class Ranks:
    """The ranks of a process group, or this process alone."""

    def __init__(self, group: dist.ProcessGroup | None = None, *, alone: bool = False) -> None:
        self.alone = alone or not (dist.is_available() and dist.is_initialized())
        self.group = group
        self.rank = 0 if self.alone else dist.get_rank(group)
        self.size = 1 if self.alone else dist.get_world_size(group)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def everyones(self, value: T) -> list[T]:
        """The value of each rank."""
        if self.alone:
            return [value]
        values: list[Any] = [None] * self.size
        with noted("all-gather of objects", self.group):
            dist.all_gather_object(values, value, self.group)
        return values

    def of_first(self, value: T) -> T:
        """The first rank's value."""
        if self.alone:
            return value
        box = [value]
        with noted("broadcast of objects", self.group):
            dist.broadcast_object_list(box, group=self.group, group_src=0)
        return box[0]

    def at_first(self, value: T) -> list[T] | None:
        """The value of each rank, on the first one; None on the others."""
        if self.alone:
            return [value]
        values: list[Any] | None = [None] * self.size if self.is_first else None
        with noted("gather of objects", self.group):
            dist.gather_object(value, values, group=self.group, group_dst=0)
        return values

    def from_first(self, values: list[T] | None) -> T:
        """This rank's one of the first rank's values."""
        if self.alone:
            assert values is not None
            return values[0]
        mine: list[Any] = [None]
        with noted("scatter of objects", self.group):
            dist.scatter_object_list(mine, values, group=self.group, group_src=0)
        return mine[0]  # type: ignore[no-any-return]

    def together(self, action: Callable[[], T]) -> list[T]:
        """Run ``action`` on every rank and return the results of all. ``action`` must not communicate.

        If it raises on one rank, all ranks raise.
        """
        result: Any = None
        error: BaseException | None = None
        try:
            result = action()
        except BaseException as failure:  # also an interrupt: the other ranks would wait for this one
            error = failure
        if self.alone:
            if error is not None:
                raise error
            return [result]
        failure_here = None if error is None else described(error)
        outcomes = self.everyones((result, failure_here))
        failures = [(rank, *each) for rank, (_, each) in enumerate(outcomes) if each is not None]
        if failures:
            raise_for(failures, self.size, error)
        return [outcome for outcome, _ in outcomes]

    def by_first(self, action: Callable[[], T]) -> T:
        """Run ``action`` on the first rank alone and return its result on all. If it raises, all ranks raise."""
        outcomes = self.together(action if self.is_first else lambda: None)
        return outcomes[0]  # type: ignore[return-value]


def raise_for(failures: list[tuple[int, int, str]], ranks: int, own: BaseException | None) -> None:
    """Raise the first failure. Each is a rank, the number of its kind, and its text. An interrupt stays one."""
    if own is not None and not isinstance(own, Exception):
        raise own
    rank, kind, text = min(failures, key=lambda each: (each[1], each[0]))
    same = len(failures) == ranks and all(each[2] == text for each in failures)
    message = text if same or text.startswith("rank ") else f"rank {rank}: {text}"
    raise _KINDS[kind](message) from own


def described(error: BaseException) -> tuple[int, str]:
    """The number of an error's kind, and the error in one line: what :func:`raise_for` takes."""
    return _kind(error), _text(error)


def _kind(error: BaseException) -> int:
    return next((n for n, kind in enumerate(_KINDS) if n and isinstance(error, kind)), 0)


def _text(error: BaseException) -> str:
    """The error in one line. Errors of the system name their file."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, KeyError) and error.args:
        return str(error.args[0])
    text = (str(error).strip().splitlines() or [""])[0]
    return (
        text
        if _kind(error) or type(error) is RuntimeError
        else f"{type(error).__name__}: {text}".removesuffix(": ")
    )
