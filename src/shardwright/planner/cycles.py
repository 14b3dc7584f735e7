"""Python's search for cycles, which takes half the time of code that makes many tuples."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_frozen = False  #: whether a context of `one_collection` has ended since the last `search_all`


@contextmanager
def without_collections() -> Iterator[None]:
    """Keep Python from looking for cycles inside this context."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def one_collection() -> Iterator[None]:
    """Let Python look for cycles only once, at the end of this context, and keep what is alive then from later looks.

    For work that repeats, such as the plans of a search. Each leaves a whole model that only Python's search finds.
    What they share, mostly modules, is the larger part of all objects: `search_all` has it searched again.
    """
    with without_collections():
        yield
    gc.collect()
    global _frozen
    if not _frozen:  # Python would count all frozen objects to tell
        gc.freeze()
        _frozen = True


def search_all() -> None:
    """Let Python look for cycles among all objects again, after contexts of `one_collection`."""
    global _frozen
    gc.unfreeze()
    _frozen = False
