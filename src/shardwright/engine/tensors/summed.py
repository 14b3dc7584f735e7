"""Gradients of sharded tensors that were summed or added to a plain loss. Autograd makes them plain or whole.

This file cuts them again, so that a parameter's gradient is sharded like the parameter. It knows no units and
optimizers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwright._torch import gradient_hooks

Cut = Callable[[torch.Tensor], torch.Tensor]


class CutGradient:
    """A gradient hook of a tensor that was summed or added to a plain loss."""

    def __init__(self, cut: Cut) -> None:
        self.cut = cut

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        return self.cut(gradient)


def cut_gradient(tensor: torch.Tensor, cut: Cut) -> None:
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


def forget_cut(tensor: torch.Tensor) -> None:
    """Remove the hook of :func:`cut_gradient`: ``tensor`` is sharded in another way from now on."""
    hooks = gradient_hooks(tensor) or {}
    for number in [number for number, hook in hooks.items() if type(hook) is CutGradient]:
        del hooks[number]


def joins_loss(func: Any, args: Sequence[Any]) -> bool:
    """Whether a plain loss and another tensor without dimensions are added, to be differentiated.

    ``func`` is an addition or subtraction, and one of ``args`` at least is a sharded tensor.

    Raises:
        NotImplementedError: the loss would be added in place, into a sharded tensor.
    """
    plain = [t for t in args[:2] if type(t) is torch.Tensor]
    joins = bool(
        plain
        and torch.is_grad_enabled()
        and plain[0].requires_grad
        and all(isinstance(t, torch.Tensor) and not t.dim() for t in args[:2])
    )
    if joins and func._schema.is_mutable and plain[0] is not args[0]:
        raise NotImplementedError(
            f"{func} adds a plain tensor, such as a loss, in place into a sharded tensor without dimensions, such as "
            "a penalty. The plain tensor may have a different value on each rank; the sharded tensor must have one "
            "value. Write `loss = loss + penalty`, or `loss += penalty`."
        )
    return joins


def only_cut(hooks: dict[int, Any] | None) -> bool:
    """Whether none of a tensor's gradient hooks is the user's."""
    return not hooks or all(type(hook) is CutGradient for hook in hooks.values())
