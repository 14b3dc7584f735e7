"""The common base of the two classes of sharded tensors: those of ``rows``, and those of ``ragged``.

Both have the shape of the whole tensor, while a local tensor has this rank's elements. Which elements these are, and
how operations compute with them, is in the folder of each class.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from shardwright.engine.compat.callers import called_by_stager
from shardwright.engine.tensors.naming import EDITED, ORIGIN
from shardwright.engine.tensors.numbers.averaging import OWN, RECIPE

#: The dtype in which modules compute, set on a sharded tensor that was used beside this rank's plain tensors.
BESIDE_PLAIN = "_shardwright_beside_plain"
#: Attributes that the engine sets on a sharded tensor and that describe this one alone, not copies of it
OF_THIS_TENSOR = frozenset({EDITED, ORIGIN, OWN, RECIPE, BESIDE_PLAIN, "_viewed", "_steps", "_seen"})


class NotGathered(RuntimeError):
    """An operation needs whole weights, and their unit is not gathered."""


class Attempt:
    """Whether an operation is attempted on parts that gets whole weights if it needs them (``direct.py``)."""

    running = False


class Sharded(torch.Tensor):
    """A tensor of global shape of which this rank has a part: the base of ``ShardedTensor`` and ``RaggedTensor``."""

    __slots__ = ()
    _local_tensor: torch.Tensor  #: this rank's part
    _kind: str  #: the word before "tensors" in messages

    def become(self, other: Any) -> None:
        """Give this object the shape, dtype, local tensor and place on the ranks of ``other``."""
        raise NotImplementedError

    def cut_own_gradient(self) -> None:
        """Let a hook cut the gradient of this tensor, which is about to be summed or added to a plain loss."""
        raise NotImplementedError

    def _check_data(self, value: torch.Tensor) -> None:
        """Raise if ``value`` cannot be this tensor's ``.data``."""
        raise NotImplementedError

    def _copy(self) -> Any:
        """Return a copy of this tensor that has a local tensor of its own, and neither graph nor unit."""
        raise NotImplementedError

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined,no-any-return]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        # torch's own assignment would change the outside only, so that the values would stay.
        self._check_data(value)
        self.become(value)

    def data_ptr(self) -> int:
        return 0 if called_by_stager() else self._local_tensor.data_ptr()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy a leaf with its gradient and its attributes, as torch copies plain tensors."""
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError(
                f"Only {self._kind} tensors that are leaves of the graph can be deep-copied; detach it first."
            )
        result = memo[id(self)] = self._copy().requires_grad_(self.requires_grad)
        if self.grad is not None and not isinstance(
            self, nn.Parameter
        ):  # copies of parameters have no gradient
            result.grad = copy.deepcopy(self.grad, memo)
        for name, value in self.__dict__.items():
            if name not in OF_THIS_TENSOR:
                result.__dict__[name] = copy.deepcopy(value, memo)
        return result
