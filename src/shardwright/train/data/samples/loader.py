"""The steps of one rank, made ahead of time by threads. `stream` decides what they contain.

Threads and not processes: a batch costs a few hundred microseconds of NumPy copies, which free the interpreter, while
a process costs seconds to start, a copy of every batch, and clean-up after signals.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple

from shardwright.train.data.samples.batch import Batch
from shardwright.train.data.samples.stream import Stream


@dataclass(frozen=True)
class Share:
    """The part of every global batch that one rank trains on: a contiguous one, in micro-batches."""

    global_batch: int
    """Samples of a step, over all ranks; a multiple of ranks * micro_batch."""
    micro_batch: int
    rank: int = 0
    """Among the ranks whose data differ."""
    ranks: int = 1

    def __post_init__(self) -> None:
        if self.global_batch % (self.ranks * self.micro_batch) or not 0 <= self.rank < self.ranks:
            raise ValueError(
                f"share: expected ranks that divide the global batch into micro-batches, found {self}"
            )

    def micro_batches(self, first: int) -> list[range]:
        """Return the samples of this rank in the step whose global batch starts at sample `first` of the run."""
        count = self.global_batch // (self.ranks * self.micro_batch)
        return [self.samples(first, number) for number in range(count)]

    def samples(self, first: int, number: int) -> range:
        """Return the samples of its micro-batch `number`, from 0."""
        begin = first + self.rank * (self.global_batch // self.ranks) + number * self.micro_batch
        return range(begin, begin + self.micro_batch)


@dataclass(frozen=True, eq=False)
class StepBatches:
    """The data of one step on one rank."""

    first: int
    """The sample of the run at which the global batch starts."""
    batches: tuple[Batch, ...]
    """This rank's micro-batches, in order."""
    trained: int
    """Targets that the loss counts in the global batch, over all ranks."""


class Loader(Iterator[StepBatches]):
    """The steps of one rank from sample `first` of the run to before sample `stop`; None: without end.

    `workers` threads make up to `ahead` steps before they are asked for; 0 workers: each when it is asked for. The
    steps are the same for any number. The `next` that would return a step raises the error that a worker had with it;
    no step is skipped. Close the loader, or use it in a `with` statement: then no thread is left.

    A step without a trained token is returned, too, but does not count: `stop` moves by its samples.

    `pin`: batches in page-locked memory, for copies to a GPU that do not wait.
    """

    def __init__(
        self,
        stream: Stream,
        share: Share,
        *,
        first: int = 0,
        stop: int | None = None,
        workers: int = 1,
        ahead: int = 2,
        pin: bool = False,
    ) -> None:
        if workers < 0 or ahead < 1 or first < 0:
            raise ValueError(
                f"loader: expected workers >= 0, ahead >= 1, first >= 0, found {workers}, {ahead}, {first}"
            )
        self._stream, self._share, self._pin = stream, share, pin
        self._next, self._stop, self._ahead = first, stop, ahead
        self._pending: deque[_Pending] = deque()
        self._pool = ThreadPoolExecutor(workers, "data") if workers else None
        self._closed = False

    def __next__(self) -> StepBatches:
        if self._closed:
            raise ValueError("loader: expected an open loader, found a closed one")
        self._submit(1 if self._pool is None else self._ahead + 1)
        if not self._pending:
            raise StopIteration
        step = self._pending[0].result()
        if not step.trained and self._stop is not None:
            self._stop += self._share.global_batch
        self._pending.popleft()  # not before: an error or a signal during the wait must not lose the step
        return step

    def close(self) -> None:
        """Stop the workers and wait for the work that they have begun. May be called twice."""
        self._closed = True
        self._pending.clear()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _submit(self, steps: int) -> None:
        """Begin to load steps until `steps` of them are pending."""
        while len(self._pending) < steps and (self._stop is None or self._next < self._stop):
            first = self._next
            batches = [self._begin(self._make, samples) for samples in self._share.micro_batches(first)]
            trained = self._begin(self._stream.trained, first, self._share.global_batch)
            self._pending.append(_Pending(first, batches, trained))
            self._next += self._share.global_batch

    def _begin(self, function: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
        """Begin a piece of work and return what waits for its result. Without workers, that does the work."""
        if self._pool is None:
            return partial(function, *arguments)
        return self._pool.submit(function, *arguments).result

    def _make(self, samples: range) -> Batch:
        batch = self._stream.batch(samples.start, len(samples))
        return batch.pinned() if self._pin else batch


class _Pending(NamedTuple):
    """A step whose parts are on their way."""

    first: int
    batches: list[Callable[[], Batch]]
    trained: Callable[[], int]

    def result(self) -> StepBatches:
        return StepBatches(self.first, tuple(batch() for batch in self.batches), self.trained())
