"""Weights that are read by a module that is not theirs.

In a file of its own because torch.compile must see into it: what it may not trace of the engine it skips by file, and a
module whose attributes it cannot follow is not compiled at all.
"""

from __future__ import annotations

from typing import Any

from shardwright.engine.parameter import Managed, unit_of


class Lending:
    """In front of a sharded module with parameters of its own: another unit's forward may read them without calling it.

    ``nn.MultiheadAttention`` does so with its ``out_proj``, tied output layers with their embedding.
    """

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)  # type: ignore[misc]
        if isinstance(value, Managed) and (unit := unit_of(value)) is not None:
            unit.lend_if_called()
            return super().__getattr__(name)  # type: ignore[misc]
        return value
