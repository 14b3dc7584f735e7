"""Several calls of an optimizer's own code that form one step. Each call sees the numbers from before the first call.

A step increases counters: numbers in the optimizer's groups and attributes. ``PartialSteps`` are the calls of one
``step()`` that steps whole tensors, or moves state to the device and back. ``CallsInBackward`` are spread over a
backward, and the user's code runs between them. Other files choose the tensors of each call.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

_NUMBERS = (int, float, torch.Tensor)


class Numbers:
    """A copy of the numbers in some dicts."""

    def __init__(self, dicts: Sequence[dict[str, Any]]) -> None:
        self._before = [
            {key: (value, _copy(value)) for key, value in values.items() if _is_number(value)}
            for values in dicts
        ]

    @torch.no_grad()
    def restore(self, dicts: Sequence[dict[str, Any]]) -> None:
        """Put them back into the same dicts. Tensors stay the same objects."""
        for values, before in zip(dicts, self._before, strict=True):
            for key, (value, copy) in before.items():
                values[key] = value
                if isinstance(value, torch.Tensor):
                    value.copy_(copy)

    def drop_new(self, dicts: Sequence[dict[str, Any]]) -> None:
        """Delete the numbers that the same dicts have under other keys."""
        for values, before in zip(dicts, self._before, strict=True):
            for key in [key for key, value in values.items() if _is_number(value) and key not in before]:
                del values[key]


class PartialSteps:
    """Calls the optimizer's own step several times within one step, each time with other tensors in the groups.

    After an exception there are no more calls. This rank continues to send, because other ranks wait for its tensors.

    Attributes:
        failure: the exception.
        failed_at: 0: no failure; -1: on local tensors; else 1 + the index of the call's first whole tensor.
    """

    def __init__(self, optimizer: Optimizer, plain_step: Callable[[Any], Any]) -> None:
        self.optimizer, self._plain_step = optimizer, plain_step
        self._counted_in = [vars(optimizer), *optimizer.param_groups]
        self._before = Numbers(self._counted_in)
        self._called = False
        self.failure: Exception | None = None
        self.failed_at = 0

    def __call__(self, groups: list[list[torch.Tensor]], state: Any, at: int = -1) -> None:
        if self.failure is not None:
            return
        if self._called:
            self._before.drop_new(self._counted_in)  # numbers that this call has added
            self._before.restore(self._counted_in)
        self._called = True
        for group, params in zip(self.optimizer.param_groups, groups, strict=True):
            group["params"] = params
        self.optimizer.state = state
        with self.holding(at):
            self._plain_step(self.optimizer)

    @contextmanager
    def holding(self, at: int = -1) -> Iterator[None]:
        """A context whose exception becomes ``failure`` instead of being raised, because others wait for this rank."""
        try:
            yield
        except Exception as error:
            if self.failure is None:
                self.failure, self.failed_at = error, at


class CallsInBackward:
    """The calls of one step, one for each unit. Each uses separate groups, with the options of the step's begin.

    The user may read and change the optimizer's groups between two calls. For example, a scheduler sets the next step's
    rate while gradients are still on their way to the host. So the groups have the counters of the first call, and
    later calls do not change them.

    Attributes:
        open: whether more calls of this step may follow.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)  # it refers to the calls
        self._options = [
            {key: _copy(value) for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]
        self._attributes = Numbers([vars(optimizer)])
        self._moved: list[tuple[dict[str, Any], str, Any]] = []  #: dict, key, earlier value
        self._called = False
        self.open = True

    def groups(self, params: list[list[torch.Tensor]]) -> list[dict[str, Any]]:
        """Groups for one call with these parameters."""
        self._rewind_attributes()
        return [
            {**{key: _copy(value) for key, value in options.items()}, "params": mine}
            for options, mine in zip(self._options, params, strict=True)
        ]

    def keep(self, called: list[dict[str, Any]], groups: list[dict[str, Any]]) -> None:
        """Use the counters that the first call has left in its groups for the whole step."""
        if self._called:
            return
        self._called = True
        for mine, before, real in zip(called, self._options, groups, strict=True):
            for key, value in mine.items():
                if key != "params" and isinstance(value, _NUMBERS) and _differ(value, before.get(key)):
                    self._moved.append((real, key, before.get(key)))
                    real[key] = value

    def rewind(self) -> None:
        """Undo the counters, because an ordinary call makes the rest of this step and counts itself."""
        self._rewind_attributes()
        for group, key, value in self._moved:
            if value is None:
                del group[key]
            else:
                group[key] = value

    def _rewind_attributes(self) -> None:
        optimizer = self._optimizer()
        if self._called and optimizer is not None:
            self._attributes.restore([vars(optimizer)])


def _is_number(value: Any) -> bool:
    """Return whether the value may be a counter. Parameters are not counters."""
    return isinstance(value, _NUMBERS) and not isinstance(value, nn.Parameter)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _differ(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one._version > 0  # a copy for the call; reading its value would make the host wait
    return one is not other and one != other
