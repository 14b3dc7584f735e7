"""What Shardwright keeps of an optimizer from step to step: one companion object, in the optimizer's ``__dict__``.

State dicts, copies and pickles of an optimizer leave the companion out. What sharded optimizers keep besides is in
``optim/companion.py``.
"""

from __future__ import annotations

import torch

COMPANION = "_shardwright_companion"


class Companion:
    """What the engine keeps of an optimizer.

    Attributes:
        stepped: whether a step has begun. The engine checks some things in the first step only.
    """

    def __init__(self, stepped: bool = False) -> None:
        self.stepped = stepped

    @property
    def brings_state(self) -> bool:
        """Whether a step brings state from the host to the device, and back."""
        return False


def companion_of(optimizer: torch.optim.Optimizer) -> Companion:
    """The optimizer's companion. The first call makes it.

    A wrapper that passes attributes on, such as Fabric's, has the companion of the optimizer inside.
    """
    companion: Companion | None = getattr(optimizer, COMPANION, None)
    if companion is None:
        companion = optimizer.__dict__[COMPANION] = Companion()
    return companion
