"""Gradients of sharded tensors that were summed up: autograd makes them whole on every rank, here they are cut again.

A parameter's own gradient would else not be sharded as the parameter is. Units and optimizers are not known here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardwright._torch import gradient_hooks

Cut = Callable[[torch.Tensor], torch.Tensor]


class CutGradient:
    """A gradient hook of a tensor that was summed up."""

    def __init__(self, cut: Cut) -> None:
        self.cut = cut

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        return self.cut(gradient)


def cut_gradient(tensor: torch.Tensor, cut: Cut) -> None:
    """Let ``cut`` make this rank's part of the gradient of ``tensor``, which is about to be summed up.

    ``cut`` may not refer to the tensor, and leaves a gradient as it is that is cut already.
    """
    if not (tensor.requires_grad and torch.is_grad_enabled()):
        return
    for hook in (gradient_hooks(tensor) or {}).values():
        if type(hook) is CutGradient:
            hook.cut = cut  # a parameter may have been cut in another way since
            return
    tensor.register_hook(CutGradient(cut))


def only_cut(hooks: dict[int, Any] | None) -> bool:
    """Whether none of a tensor's gradient hooks is the user's."""
    return not hooks or all(type(hook) is CutGradient for hook in hooks.values())
