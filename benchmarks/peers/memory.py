"""Bytes that torch's CPU allocator has given out, from its own events, and the fewest that a strategy needs.

The events cover what operators allocate inside, what C++ keeps (buckets of DDP, saved activations) and what gloo's
workers allocate as tensors. Buffers that gloo allocates by itself are not among them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.peers.shapes import Shape, loss_of
from benchmarks.peers.step import Step

STEPS = 5
"""Planned memory is recorded in the first step and used from the second on; the last one is looked at."""
_MARK = "benchmarks.peers"


@dataclass
class Levels:
    """Bytes given out at the end of each marked span and the most within it."""

    last: list[int] = field(default_factory=list)
    most: list[int] = field(default_factory=list)


@contextmanager
def _recorded(levels: Levels) -> Iterator[None]:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        yield
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    spans = sorted((e.start_ns(), e.end_ns()) for e in events if e.name() == _MARK)
    for start, end in spans:
        level = sum(nbytes for time, nbytes in changes if time < start)
        most = level
        for _, nbytes in (change for change in changes if start <= change[0] <= end):
            level += nbytes
            most = max(most, level)
        levels.last.append(level)
        levels.most.append(most)


def of_a_step(build: Callable[[], Step], tokens: Callable[[int], Any]) -> tuple[int, int]:
    """Bytes between steps, and the most within one."""
    levels = Levels()
    with _recorded(levels):
        step = build()
        for number in range(STEPS):
            batch = tokens(number)
            with record_function(_MARK):
                step(batch)
    return levels.last[-1], levels.most[-1]


def activations(shape: Shape) -> int:
    """Bytes that the plain model's forward leaves for its backward."""
    levels = Levels()
    with _recorded(levels):
        model, tokens = shape.model(), shape.tokens(0, 0, 1)
        with record_function(_MARK):
            pass
        with record_function(_MARK):
            loss = loss_of(model, tokens)
        del loss
    return levels.last[1] - levels.last[0]


def elements(shape: Shape) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in shape.model().parameters())


def least(stage: int, elements: int, activations: int, ranks: int) -> tuple[int, int]:
    """The fewest bytes between steps and within one, in float32.

    Between steps: parameters and the two moments of AdamW. Within a step, without recomputation: that, and the larger
    of all activations (at the end of forward) and all gradients (at the end of backward).
    """
    cut = {name: ranks if stage >= needed else 1 for name, needed in (("moments", 1), ("gradients", 2), ("parameters", 3))}
    rest = 4 * (elements / cut["parameters"] + 2 * elements / cut["moments"])
    return round(rest), round(rest + max(activations, 4 * elements / cut["gradients"]))
