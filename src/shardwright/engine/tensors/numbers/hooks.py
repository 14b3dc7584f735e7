"""The engine's own gradient hooks on sharded tensors, which are not the user's hooks.

Autograd makes the gradient of a tensor that was summed, or added to a plain loss, plain or whole; a hook cuts it again,
so that a parameter's gradient is sharded like the parameter. Other hooks average a gradient over the ranks, or scale
it. This file knows no units and optimizers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch

from shardwright.engine.compat.autograd import gradient_hooks
from shardwright.engine.compat.callers import refusal

CutFunction = Callable[[torch.Tensor], torch.Tensor]


class EngineHook(ABC):
    """A gradient hook that is the engine's and not the user's. The engine's reduced gradients do not pass through.

    autograd passes None for a gradient that is not defined, such as that of a norm of order 0.
    """

    def __call__(self, gradient: torch.Tensor | None) -> torch.Tensor | None:
        return None if gradient is None else self.replaced(gradient)

    @abstractmethod
    def replaced(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient that takes the place of this one."""


class CutGradient(EngineHook):
    """A gradient hook of a tensor that was summed or added to a plain loss."""

    def __init__(self, cut: CutFunction) -> None:
        self.cut = cut

    def replaced(self, gradient: torch.Tensor) -> torch.Tensor:
        return self.cut(gradient)


def tracked(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether autograd records an operation on these tensors."""
    return torch.is_grad_enabled() and any([t.requires_grad for t in tensors])


def cut_gradient(tensor: torch.Tensor, cut: CutFunction) -> None:
    """Let ``cut`` make this rank's part of the gradient of ``tensor``, which is about to be summed or added.

    ``cut`` must not refer to the tensor. It returns a gradient that is already cut unchanged.
    """
    if not (tensor.requires_grad and torch.is_grad_enabled()):
        return
    for hook in (gradient_hooks(tensor) or {}).values():
        if type(hook) is CutGradient:
            hook.cut = cut  # the cut of the parameter may have changed
            return
    tensor.register_hook(CutGradient(cut))


class AverageGradient(EngineHook):
    """A gradient hook of a value that the program reads: the gradient becomes its mean over the ranks."""

    def __init__(self, average: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.average = average

    def replaced(self, gradient: torch.Tensor) -> torch.Tensor:
        return self.average(gradient)


class ScaleGradient(EngineHook):
    """A gradient hook of a parameter whose unit divides gradients by another number than that of the ranks."""

    def __init__(self, factor: Callable[[], float]) -> None:
        self.factor = factor

    def replaced(self, gradient: torch.Tensor) -> torch.Tensor:
        factor = self.factor()
        return gradient if factor == 1 else gradient * factor


class WholeGradient(EngineHook):
    """A gradient hook of a parameter that a function with a backward of its own has got: its gradient may be whole.

    ``cut`` makes this rank's part of the mean of a whole gradient over the ranks.
    """

    def __init__(self, cut: CutFunction) -> None:
        self.cut = cut

    def replaced(self, gradient: torch.Tensor) -> torch.Tensor:
        return self.cut(gradient) if type(gradient) is torch.Tensor else gradient


def average_gradient(tensor: torch.Tensor, average: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Let ``average``, which must not refer to ``tensor``, replace the gradient of ``tensor``.

    A program is about to read the tensor.
    """
    if tracked([tensor]):
        register(tensor, AverageGradient(average))


def register(tensor: torch.Tensor, hook: EngineHook) -> None:
    """Register a hook of the engine on a tensor. It replaces an earlier hook of its kind."""
    hooks = gradient_hooks(tensor) or {}
    for number, each in hooks.items():
        if type(each) is type(hook):
            hooks[number] = hook
            return
    tensor.register_hook(hook)
    hooks = gradient_hooks(tensor) or {}
    for number in [number for number, each in hooks.items() if type(each) is CutGradient]:
        hooks[number] = hooks.pop(number)  # a gradient is averaged before it is cut


def forget_scale(tensor: torch.Tensor) -> None:
    """Remove the :class:`ScaleGradient` of another unit that had the parameter before."""
    hooks = gradient_hooks(tensor) or {}
    for number in [number for number, each in hooks.items() if type(each) is ScaleGradient]:
        del hooks[number]


def forget_hooks(tensor: torch.Tensor) -> None:
    """Remove the engine's hooks from ``tensor``, because from now on it is sharded in another way."""
    hooks = gradient_hooks(tensor) or {}
    for number in [number for number, hook in hooks.items() if isinstance(hook, EngineHook)]:
        del hooks[number]


def refuse_loss_in_place(func: Any) -> NoReturn:
    raise refusal(
        f"{func} adds a plain tensor, such as a loss, in place into a sharded tensor without dimensions, such as "
        "a penalty. The plain tensor may have a different value on each rank; the sharded tensor must have one "
        "value. Write `loss = loss + penalty`, or `loss += penalty`."
    )


def only_engine_hooks(hooks: dict[int, Any] | None) -> bool:
    """Return whether none of a tensor's gradient hooks is the user's."""
    return not hooks or all(isinstance(hook, EngineHook) for hook in hooks.values())
