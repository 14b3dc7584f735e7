"""The epoch: a number that moves whenever parameters may have changed, so that no kept slab outlives its weights.

Any torch optimizer's step moves it; so do loading and writing back. It is one number for the process: moving it for
a model that did not change costs that model one gather and is never wrong.
"""

from __future__ import annotations

from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

_epoch = 0
_installed = False


def current() -> int:
    return _epoch


def advance() -> None:
    global _epoch
    _epoch += 1


def install(before_step: Any) -> None:
    """Follow every optimizer of the process, once; ``before_step()`` runs before each step."""
    global _installed
    if _installed:
        return
    _installed = True
    register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: before_step())
    register_optimizer_step_post_hook(lambda optimizer, args, kwargs: advance())
