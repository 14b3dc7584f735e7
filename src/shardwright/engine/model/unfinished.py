"""An optimizer's step that began and did not end, because an exception, as of a signal's handler, came in between.

It may have changed some weights and not others. Nothing here is read in a step that ends.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from shardwright.engine.compat.dtensor import local_of


class BegunStep:
    """A step of an optimizer that has begun, with what is needed to see later whether it has changed anything.

    Optimizers change all parameters by one operation after another, or one parameter after another. So the first and
    the last parameter, and the state of the first one, show whether a step has changed something. Kernels that write
    without version counters are not seen.
    """

    __slots__ = ("_before", "_has_state", "_optimizer")

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> None:
        """``parameters``: those that the step changes, at least one."""
        self._optimizer = weakref.ref(optimizer)
        state = _first_state(optimizer)
        self._has_state = bool(state)
        tensors = [*(local_of(p) for p in (parameters[0], parameters[-1])), *state]
        self._before = [(t, t._version) for t in tensors]

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

    def has_changed_something(self) -> bool:
        """Return whether parameters or state were written since the step began. State that is new counts only if it was
        written after it was made: a step may fail for lack of memory for it."""
        if any(t._version != version for t, version in self._before):
            return True
        optimizer = self._optimizer()
        if self._has_state or optimizer is None:
            return False
        return any(t._version for t in _first_state(optimizer))


def _first_state(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the tensors in the state of the optimizer's first parameter, as far as it is on the device now."""
    state: Any = vars(optimizer).get("state")  # an attribute that is not there waits for copies from the host
    first: Any = next(iter(state.values()), None) if state else None
    if not isinstance(first, dict):
        return []
    return [getattr(each, "_local_tensor", each) for each in first.values() if isinstance(each, torch.Tensor)]
