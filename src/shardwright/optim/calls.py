"""Several calls of an optimizer's own code that are one step: each finds the numbers as they were before the first.

A step counts in numbers, which are in its groups and attributes. ``Calls`` are those of one ``step()``, which is on
whole tensors, or passes state through the device. ``CallsInBackward`` are spread over a backward, and the user's code
runs between them. Which tensors a call is for is chosen elsewhere.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

_NUMBERS = (int, float, torch.Tensor)


class Numbers:
    """The numbers in some dicts, as they are now."""

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


class Calls:
    """Calls the optimizer's own step several times within one: on groups of other tensors each time.

    After an exception nothing more is called, since other ranks still wait for what this one has to send.

    Attributes:
        failure: the exception.
        failed_at: where: 0 nowhere, -1 on local tensors, else 1 + the index of the call's first whole tensor.
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
            self._before.drop_new(self._counted_in)  # counted in for the first time
            self._before.restore(self._counted_in)
        self._called = True
        for group, params in zip(self.optimizer.param_groups, groups, strict=True):
            group["params"] = params
        self.optimizer.state = state
        try:
            self._plain_step(self.optimizer)
        except Exception as error:
            self.failed(error, at)

    def failed(self, error: Exception, at: int) -> None:
        if self.failure is None:
            self.failure, self.failed_at = error, at


class CallsInBackward:
    """Calls that are one step, one for each unit. Each has groups of its own, with the options at the step's begin.

    The user may read and change the optimizer's groups between two calls: a scheduler sets the next step's rate while
    gradients are still on their way to the host. So the groups show what the first call has counted, and later calls
    do not write into them.

    Attributes:
        open: whether calls for more units belong to this step.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)  # which holds the calls
        self._options = [
            {key: _copy(value) for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]
        self._attributes = Numbers([vars(optimizer)])
        self._moved: list[tuple[dict[str, Any], str, Any]] = []  #: where, key, value before
        self._called = False
        self.open = True

    def groups(self, params: list[list[torch.Tensor]]) -> list[dict[str, Any]]:
        """Groups for one call, of these parameters."""
        self._rewind_attributes()
        return [
            {**{key: _copy(value) for key, value in options.items()}, "params": mine}
            for options, mine in zip(self._options, params, strict=True)
        ]

    def keep(self, called: list[dict[str, Any]], groups: list[dict[str, Any]]) -> None:
        """After the first call: what it counted in its groups holds for the step."""
        if self._called:
            return
        self._called = True
        for mine, before, real in zip(called, self._options, groups, strict=True):
            for key, value in mine.items():
                if key != "params" and isinstance(value, _NUMBERS) and _differ(value, before.get(key)):
                    self._moved.append((real, key, before.get(key)))
                    real[key] = value

    def rewind(self) -> None:
        """The rest of this step is made by an ordinary call, which counts for itself."""
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
    """Whether a step may count in it. A parameter is stepped."""
    return isinstance(value, _NUMBERS) and not isinstance(value, nn.Parameter)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _differ(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one._version > 0  # a copy made for the call; the host must not wait for what is in it
    return one is not other and one != other
