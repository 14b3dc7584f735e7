"""Plain values between ranks, and work that succeeds on all ranks or raises an error on all of them.

    ranks = RankGroup(process_group)
    sizes = ranks.run_on_all(lambda: path.stat().st_size)   # of each rank; if one fails, all raise one error
    step = ranks.run_on_first(lambda: newest_step(folder))  # the first rank looks, all get its answer
    plan = ranks.run_own(make_plan)   # its own on each rank; if one fails, all raise one error
    plan = ranks.run_own(make_plan, others_raise=OtherRankFailed)   # or that one its own error, the others this kind

Values are pickled, and the host waits for them: this is for what happens once, such as a start, a save or a load. A
step exchanges what it needs in the engine's own collectives (``engine/model/agreement.py``). Before the process group
exists and when ranks may be gone, ranks exchange text through a store (``train/rank``, ``train/launch``, ``watching``),
since a collective would wait for them. Nothing here knows models or files.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any, Self, TypeVar

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from shardwright.common.errors import Damaged, OtherOptimizer, SharedError
from shardwright.engine.comm.notes import noted

S = TypeVar("S")
T = TypeVar("T")

#: Errors that keep their kind on every rank. A SharedError does, too; others arrive as a RuntimeError. If ranks raise
#: different kinds, all ranks raise the first one of this table. So a rank that could do no work (a missing file, no
#: right to write) wins over a rank that did its work and found damage or a wrong value.
_KINDS: tuple[type[Exception], ...] = (
    RuntimeError, FileExistsError, FileNotFoundError, OSError, TypeError, KeyError, Damaged, OtherOptimizer,
    ValueError,
)  # fmt: skip

LOST_CONTACT = (
    "Connection closed", "Connection reset", "Broken pipe", "imed out", "timeout", "[c10d]", "gloo/",
)  # fmt: skip
"""Parts of the messages of collectives that fail inside autograd or an engine. There no frame shows that a collective
failed, and gloo has no exception class of its own."""


def is_lost_contact(error: BaseException) -> bool:
    """Whether this is the error of a collective that failed because of another rank."""
    if isinstance(error, dist.DistError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    return frames[-1].filename == c10d.__file__ or any(sign in str(error) for sign in LOST_CONTACT)


class OtherRankFailed(RuntimeError):
    """Another rank raised the error that the message names."""


class RankGroup:
    """The ranks of a process group or of a mesh, or this process alone. Every rank calls the same methods.

    Attributes:
        alone: whether there are no other ranks.
        rank: the number of this rank among them.
        size: how many they are.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, alone: bool = False) -> None:
        """The ranks of a group, by default all; without process groups this process alone."""
        self.alone = alone or not (dist.is_available() and dist.is_initialized())
        self.rank = 0 if self.alone else dist.get_rank(group)
        self.size = 1 if self.alone else dist.get_world_size(group)
        self._mesh: DeviceMesh | None = None
        #: A value goes through these one after the other: the last axis of a mesh first.
        self._groups: list[dist.ProcessGroup | None] = [] if self.alone else [group]

    @classmethod
    def of_mesh(cls, mesh: DeviceMesh | None) -> Self:
        """The ranks of a mesh, in its order. None: this process alone."""
        ranks = cls(alone=True)
        if mesh is not None:
            ranks.alone, ranks._mesh, ranks.size = False, mesh, mesh.size()
            for place, length in zip(mesh.get_coordinate() or (), mesh.shape, strict=False):
                ranks.rank = ranks.rank * length + place
            ranks._groups = [mesh.get_group(axis) for axis in reversed(range(mesh.ndim))]
        return ranks

    @property
    def numbers(self) -> Sequence[int]:
        """The number of each rank in messages: in its group, or for a mesh among all ranks of the job."""
        return range(self.size) if self._mesh is None else self._mesh.mesh.flatten().tolist()

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    # -- values --------------------------------------------------------------------------------------------------------

    def all_gather(self, value: T, what: str = "objects") -> list[T]:
        """The value of each rank, on every rank. ``what``: the name of the values on heartbeats."""
        values: list[Any] = [value]
        for group in self._groups:
            parts: list[Any] = [None] * dist.get_world_size(group)
            if dist.get_backend(group) == "fake":  # of a plan, whose other ranks do not exist
                values = [each for _ in parts for each in values]
                continue
            with noted(f"all-gather of {what}", group):
                dist.all_gather_object(parts, values, group)
            values = [each for part in parts for each in part]
        return values

    def broadcast(self, value: T) -> T:
        """The first rank's value, on every rank."""
        box = [value]
        for group in self._groups:
            with noted("broadcast of objects", group):
                dist.broadcast_object_list(box, group=group, group_src=0)
        return box[0]

    def gather(self, value: T) -> list[T] | None:
        """The value of each rank, on the first one; None on the others. Not over a mesh with several axes."""
        if self.alone:
            return [value]
        (group,) = self._groups
        values: list[Any] | None = [None] * self.size if self.is_first else None
        with noted("gather of objects", group):
            dist.gather_object(value, values, group=group, group_dst=0)
        return values

    def scatter(self, values: list[T] | None) -> T:
        """One value for each rank, which the first rank has. Not over a mesh with several axes."""
        if self.alone:
            assert values is not None
            return values[0]
        (group,) = self._groups
        mine: list[Any] = [None]
        with noted("scatter of objects", group):
            dist.scatter_object_list(mine, values, group=group, group_src=0)
        return mine[0]  # type: ignore[no-any-return]

    # -- agreement -----------------------------------------------------------------------------------------------------

    def different(self, values: Sequence[object]) -> list[int]:
        """The numbers of the ranks whose value is not the first rank's. ``values``: of each rank, as gathered."""
        return [rank for rank, each in zip(self.numbers, values, strict=True) if each != values[0]]

    def check_equal(self, values: Sequence[T], error: Callable[[list[int], T, T], Exception]) -> None:
        """Raise if the value of a rank is not the first rank's, on every rank the same error.

        Args:
            values: of each rank, as :meth:`all_gather` and :meth:`run_on_all` return them.
            error: makes the error of the ranks that differ, the value of the first of them, and the first rank's.
        """
        if ranks := self.different(values):
            raise error(ranks, next(each for each in values if each != values[0]), values[0])

    # -- work ----------------------------------------------------------------------------------------------------------

    def run_on_all(self, action: Callable[[], T]) -> list[T]:
        """The result of ``action`` on each rank. If it raises on one, all ranks raise one error with the same text.

        A SharedError is raised as it is. ``action`` does not communicate. Its results are pickled.
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
        shared = error if isinstance(error, SharedError) else None
        outcomes = self.all_gather((result, shared, None if error is None else described(error)))
        failures = [(rank, *each) for rank, (*_, each) in enumerate(outcomes) if each is not None]
        if failures:
            raise_for(
                failures, self.size, error, next((each for _, each, _ in outcomes if each is not None), None)
            )
        return [outcome for outcome, *_ in outcomes]

    def run_own(self, action: Callable[[], T], *, others_raise: type[Exception] | None = None) -> T:
        """This rank's result of ``action``, which is not pickled. If it raises on one rank, all raise as above.

        With ``others_raise`` the rank where it raises keeps its own error, whatever its kind, and the other ranks raise
        one of this kind that names the rank.
        """
        if others_raise is None:
            return self.run_and_share(action, lambda result: None)[0]
        failure: Exception | None = None
        result: Any = None
        try:
            result = action()
        except Exception as raised:
            failure = raised
        self.stop_after(failure, others_raise)
        return result  # type: ignore[no-any-return]

    def run_and_share(self, action: Callable[[], T], shared: Callable[[T], S]) -> tuple[T, list[S]]:
        """This rank's result of ``action``, and ``shared(result)`` of each rank, which is pickled."""
        results: list[T] = []

        def act() -> S:
            results.append(action())
            return shared(results[0])

        everyones = self.run_on_all(act)
        return results[0], everyones

    def run_on_first(self, action: Callable[[], T]) -> T:
        """The result of ``action`` on the first rank, which alone runs it. If it raises, all ranks raise."""
        outcomes = self.run_on_all(action if self.is_first else lambda: None)
        return outcomes[0]  # type: ignore[return-value]

    def stop_after(self, failure: Exception | None, others_raise: type[Exception] = OtherRankFailed) -> None:
        """Raise on every rank if one has a failure: there its own, elsewhere one of this kind that names the rank."""
        for rank, text in self.failures_of_others(failure):
            raise others_raise(f"Rank {rank} failed, so all ranks stop. {text}")

    def failures_of_others(self, failure: Exception | None) -> list[tuple[int, str]]:
        """Raise this rank's own failure, if it has one; else return the ranks that have one, with kind and text."""
        texts = self.all_gather(None if failure is None else f"{type(failure).__name__}: {failure}", "states")
        if failure is not None:
            raise failure
        return [(rank, text) for rank, text in zip(self.numbers, texts, strict=True) if text is not None]


# -- errors that travel ------------------------------------------------------------------------------------------------


def raise_for(
    failures: list[tuple[int, int, str]],
    ranks: int,
    own: BaseException | None,
    shared: SharedError | None = None,
) -> None:
    """Raise the first failure. Each is a rank, the number of its kind, and its text. An interrupt stays one, and the
    ``shared`` error, if there is one, is raised before others."""
    if own is not None and not isinstance(own, Exception):
        raise own
    if shared is not None:
        raise shared from None if shared is own else own
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
