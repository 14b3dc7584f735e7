"""Threads in which a rank copies, digests, reads and writes. They are few, so that what they copy stays small."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
R = TypeVar("R")
Progress = Callable[[int], None]  #: gets the number of bytes since the last call

MOST = 2  #: more than these wait for the disk


def count() -> int:
    """Return the number of threads of a rank for its files: the ranks of a machine share its processors."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, min(MOST, len(os.sched_getaffinity(0)) // max(1, int(ranks) if ranks.isdecimal() else 1)))


def in_threads(
    items: Iterable[T], action: Callable[[T], R], then: Callable[[R], object] = lambda result: None
) -> list[R]:
    """Return the results of ``action`` for all items, in order. ``then`` gets each result in the caller's thread.

    ``action`` has to let go of the interpreter to gain from threads. It must not depend on the caller's grad mode,
    device or stream. After an error no other item is begun, and the error is raised when all threads have ended.
    """
    results = []
    pool = ThreadPoolExecutor(count(), "shardwright-checkpoint")
    try:
        for result in pool.map(action, items):
            results.append(result)
            then(result)
    finally:
        pool.shutdown(cancel_futures=True)
    return results


def wait_for_devices(tensors: Iterable[Tensor]) -> None:
    """Wait for accelerators. Threads use other streams than their caller, so they need it before and after."""
    for device in {each.device for each in tensors if each.device.type != "cpu"}:
        torch.accelerator.synchronize(device)


def ignore(nbytes: int) -> None:
    """Show no progress."""
