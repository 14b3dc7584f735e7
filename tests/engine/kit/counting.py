"""Counts of the operations of a piece of training."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from shardwright.engine.comm import Communicator


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Collectives of more than one rank that communicators issue inside."""
    seen: Counter[str] = Counter()
    kinds = ("all_gather", "reduce_scatter", "all_reduce")
    originals = {kind: getattr(Communicator, kind) for kind in kinds}

    def counting(kind: str) -> Callable[..., Any]:
        @functools.wraps(originals[kind])
        def method(self: Communicator, *args: Any, **kwargs: Any) -> Any:
            if self.group is not None:
                assert self.world_size > 1, "a collective of one rank"
                seen[kind] += 1
            return originals[kind](self, *args, **kwargs)

        return method

    try:
        for kind in kinds:
            setattr(Communicator, kind, counting(kind))
        yield seen
    finally:
        for kind, original in originals.items():
            setattr(Communicator, kind, original)
