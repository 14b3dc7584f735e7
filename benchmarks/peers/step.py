"""The result of every engine's builder, and the parts that all share: the optimizer's settings and the clipping."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

Step = Callable[[Tensor, float], tuple[Any, Any]]
"""Forward, backward, clipping, AdamW and the end of the gradients, on this rank's tokens with the loss times a weight.

Returns this rank's loss and the norm of the gradients before clipping, as the engine returns them: reading them is
not part of a step.
"""

CLIP = 1.0
RATE = 1e-3


def adamw_options(kind: str) -> dict[str, Any]:
    """AdamW with torch's defaults, or with one of its two other implementations."""
    return {"lr": RATE, **({} if kind == "default" else {kind: True})}


def as_float(value: Any) -> float:
    """A number of a loss or a norm. All ranks call it: a norm may be a DTensor that is not reduced yet."""
    full = getattr(value, "full_tensor", None)
    return float(full() if full is not None else value)
