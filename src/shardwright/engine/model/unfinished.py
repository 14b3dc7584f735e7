"""An optimizer's step that began and did not end, because an exception, as of a signal's handler, came in between.

It may have changed some weights and not others. Nothing here is read in a step that ends.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

import torch


class BegunStep:
    """A step of an optimizer that has begun. Before it, it notes what it needs to see whether the optimizer's state has
    changed."""

    __slots__ = ("_before", "_optimizer")

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._before = _version_of_state(optimizer)

    def is_running(self, beginning: torch.optim.Optimizer | None) -> bool:
        """Return whether the step still runs, because its closure has called the model, or its code has begun another
        step. ``beginning``: the optimizer of that other step, which may be the same one."""
        optimizer, frame = self._optimizer(), sys._getframe(1)
        count = 0
        while frame is not None:
            if frame.f_code.co_name in ("step", "wrapper") and frame.f_locals.get("self") is optimizer:
                count += 1
            frame = frame.f_back  # type: ignore[assignment]
        return count > (optimizer is beginning)

    def may_have_changed_state(self) -> bool:
        """Return whether the optimizer's state differs from that before the step.

        Optimizers change the state of all parameters by one operation after another, so the first parameter's state
        shows it. Kernels that write without version counters are not seen.
        """
        optimizer = self._optimizer()
        return optimizer is None or _version_of_state(optimizer) != self._before


def _version_of_state(optimizer: torch.optim.Optimizer) -> int:
    """Return a number that changes with the state of the optimizer's first parameter; -1: it has none."""
    first: Any = next(iter(optimizer.state.values()), None)
    if first is None:
        return -1
    tensors = [value for value in first.values() if isinstance(value, torch.Tensor)]
    return sum(getattr(value, "_local_tensor", value)._version for value in tensors)
