"""Python's search for cycles around work that repeats."""

from __future__ import annotations

import gc
import weakref

from shardwright.planner import one_collection, search_all
from tests.support import multirank


class _Cycle:
    def __init__(self) -> None:
        self.own = self


@multirank(
    1
)  # in another process, because what is frozen stays frozen in that of the tests (tests/conftest.py)
def test_cycles_of_one_context_are_gone_after_it_and_the_first_ones_objects_are_not_searched_again(
    rank: int, world_size: int
) -> None:
    seen: list[weakref.ref[_Cycle]] = []
    frozen = gc.get_freeze_count()  # what the worker froze before
    gc.unfreeze()
    try:
        for _ in range(2):
            with one_collection():
                assert not gc.isenabled()
                seen.append(weakref.ref(_Cycle()))
            assert gc.isenabled()
            assert seen[-1]() is None
            assert gc.get_freeze_count() > 0
    finally:
        search_all()
    assert gc.get_freeze_count() == 0
    if frozen:
        gc.freeze()
