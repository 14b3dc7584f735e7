"""Weights that are read by a module that is not theirs.

In a file of its own because torch.compile must see into it: what it may not trace of the engine it skips by file, and a
module whose attributes it cannot follow is not compiled at all.
"""

from __future__ import annotations

from typing import Any

from shardwright.engine.model.calls import lend_if_called
from shardwright.engine.tensors.parameter import Managed, unit_of


def lends(cls: type) -> dict[str, Any]:
    """What a class in front of ``cls`` has if another unit's forward may read its parameters without calling it.

    ``nn.MultiheadAttention`` does so with its ``out_proj``, tied output layers with their embedding.
    """

    def __getattr__(self: Any, name: str) -> Any:
        value = cls.__getattr__(self, name)  # type: ignore[attr-defined]
        if isinstance(value, Managed) and (unit := unit_of(value)) is not None:
            lend_if_called(unit)
            return cls.__getattr__(self, name)  # type: ignore[attr-defined]
        return value

    return {"__getattr__": __getattr__}
