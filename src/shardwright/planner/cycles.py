"""Python's search for cycles, which takes half the time of code that makes many tuples."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collections() -> Iterator[None]:
    """Inside the context Python does not look for cycles."""
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
    """Python looks for cycles once, at the end of the context, and never again among what the first one leaves alive.

    For work that repeats, such as the plans of a search. Each leaves a whole model that only Python's search finds.
    What they share, mostly modules, is the larger part of all objects: `search_all` has it searched again.
    """
    with without_collections():
        yield
    gc.collect()
    if not gc.get_freeze_count():
        gc.freeze()


def search_all() -> None:
    """Let Python look for cycles among all objects again, after contexts of `one_collection`."""
    gc.unfreeze()
