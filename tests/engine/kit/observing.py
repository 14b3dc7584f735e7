"""Calls a test's function when a model's gathers begin and when they are awaited."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from shardwright.engine import UNIT
from shardwright.engine.weights.weights import Weights


def observe(model: nn.Module, watch: Callable[[str, Weights], object]) -> None:
    """From now on call ``watch`` with "issue" or "wait" and the weights of a unit, before its gather goes on."""
    for unit in getattr(model, UNIT).root.units():
        _observe(unit.weights, watch)


def _observe(weights: Any, watch: Callable[[str, Weights], object]) -> None:
    gather = weights.copies.current.gather
    begin, wait = gather.begin, weights.wait

    def begin_and_watch(*given: Any) -> Any:
        watch("issue", weights)
        return begin(*given)

    def wait_and_watch() -> None:
        if weights._flight is not None:
            watch("wait", weights)
        wait()

    gather.begin, weights.wait = begin_and_watch, wait_and_watch
