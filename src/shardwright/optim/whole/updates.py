"""Steps in two parts: a tensor's owner computes an update from the gradient, and every rank applies it to its part.

So only gradients move to owners, and only updates move back. This file has the updates of torch's Muon, and finds those
of an optimizer. ``step`` computes updates, and ``plan`` moves and applies them. Nothing here communicates.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from shardwright.engine.compat import alone, muon_functions, step_without_hooks


@dataclass(frozen=True)
class Updates:
    """Functions that divide an optimizer's step on a whole tensor. Both see the options of the tensor's group.

    Attributes:
        dtype: the dtype of every update.
        compute: ``compute(gradient, state, group)`` returns the update. It has the shape of the gradient
            and of the whole tensor. ``state`` is the tensor's state, an empty dict at first, and is changed in place.
        apply: ``apply(part, update, group, shape)`` changes a part of the tensor in place, element by element.
            ``update`` has the part's shape. ``shape`` is the shape of the whole tensor.
    """

    dtype: torch.dtype
    compute: Callable[[torch.Tensor, dict[str, Any], dict[str, Any]], torch.Tensor]
    apply: Callable[[torch.Tensor, torch.Tensor, dict[str, Any], torch.Size], None]


def updates_of(optimizer: Optimizer) -> Callable[[torch.Tensor], Updates | None]:
    """Return the function from a parameter to its updates: the optimizer's ``shard_updates(self, p)``, or those of
    torch's Muon. None: the optimizer's own step needs the whole parameter.

    A subclass that has its own ``step`` but inherits ``shard_updates`` has no updates, because they are not its step's.
    """
    kind = type(optimizer)
    if kind is torch.optim.Muon:
        return muon_updates
    definer = next((each for each in kind.__mro__ if "shard_updates" in vars(each)), None)
    if definer is None or step_without_hooks(kind) is not step_without_hooks(definer):
        return lambda p: None
    return optimizer.shard_updates  # type: ignore[attr-defined, no-any-return]


def muon_updates(p: torch.Tensor) -> Updates | None:
    """Return updates of ``torch.optim.Muon`` in bfloat16, the dtype of its iterations, or None to step ``p`` whole.

    For a bfloat16 parameter torch's CPU kernel rounds the sum of parameter and update in other ways in its vector loop
    and after it. So a part of the sum differs from the sum of the parts. In wider dtypes they are equal.
    """
    if not p.is_floating_point() or p.dtype.itemsize < 2 or p.dtype == torch.bfloat16:
        return None
    return _muon_updates()


@functools.cache
def _muon_updates() -> Updates | None:
    """Return the updates if they are those of this version of torch.

    None: it has other private functions, or numbers.
    """
    functions = muon_functions()
    if functions is None:
        return None
    orthogonalized, adjusted_lr = functions

    def compute(gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> torch.Tensor:
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        momentum, buffer = group["momentum"], state["momentum_buffer"]
        buffer.lerp_(gradient, 1 - momentum)
        direction = gradient.lerp(buffer, momentum) if group["nesterov"] else buffer
        return orthogonalized(direction, group["ns_coefficients"], group["ns_steps"], group["eps"])

    def apply(part: torch.Tensor, update: torch.Tensor, group: dict[str, Any], shape: torch.Size) -> None:
        lr = group["lr"]
        if isinstance(lr, torch.Tensor):
            lr = lr.squeeze()
        part.mul_(1 - lr * group["weight_decay"])
        part.add_(update, alpha=-adjusted_lr(lr, group["adjust_lr_fn"], shape))

    updates = Updates(torch.bfloat16, compute, apply)
    with alone(torch.device("cpu")):
        return updates if _equal_torchs_muon(updates) else None


@torch.no_grad()
def _equal_torchs_muon(updates: Updates) -> bool:
    """Return whether two steps have the bits of torch's own step."""
    whole = torch.linspace(-1, 1, 15, device="cpu", dtype=torch.float32).view(5, 3)
    parts, state = whole.clone(), dict[str, Any]()
    theirs = torch.optim.Muon([whole], lr=0.1)
    try:
        for step in (1, 2):
            whole.grad = torch.linspace(0, step, 15, device="cpu", dtype=torch.float32).view(5, 3).sin()
            theirs.step()
            update = updates.compute(whole.grad, state, theirs.defaults)
            updates.apply(parts[:2], update[:2], theirs.defaults, whole.shape)
            updates.apply(parts[2:], update[2:], theirs.defaults, whole.shape)
    except TypeError:  # the private functions have other arguments
        return False
    return torch.equal(parts, whole) and list(state) == list(theirs.state[whole])
