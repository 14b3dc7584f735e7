"""Data that Shardwright keeps about an optimizer between steps: a companion object in the optimizer's ``__dict__``.

State dicts, copies and pickles of an optimizer do not contain the companion. ``optim/companion.py`` has the companion
of sharded optimizers.
"""

from __future__ import annotations

import torch

COMPANION = "_shardwright_companion"


class Companion:
    """Data that the engine keeps about an optimizer.

    Attributes:
        stepped: whether a step has begun. The engine checks some things in the first step only.
        objects: how many parameter objects had become sharded ones when the optimizer's state was last checked.
    """

    def __init__(self, stepped: bool = False) -> None:
        self.stepped = stepped
        self.objects = 0

    @property
    def brings_state(self) -> bool:
        """Whether a step moves state from the host to the device and back."""
        return False


def companion_of(optimizer: torch.optim.Optimizer) -> Companion:
    """The optimizer's companion. The first call makes it.

    A wrapper that forwards attributes, such as Fabric's, has the companion of the optimizer inside.
    """
    companion: Companion | None = getattr(optimizer, COMPANION, None)
    if companion is None:
        companion = optimizer.__dict__[COMPANION] = Companion()
    return companion
