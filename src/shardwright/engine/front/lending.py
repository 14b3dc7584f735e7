"""Weights that another unit's forward reads without a call of their module.

This is a separate file because torch.compile must trace it. torch.compile skips other files of the engine. It does not
compile a module whose attributes it cannot trace.
"""

from __future__ import annotations

from typing import Any

from shardwright.engine.model.calls import lend_if_called
from shardwright.engine.tensors.parameter import Managed, unit_of


def lends(cls: type) -> dict[str, Any]:
    """Attributes for a class in front of ``cls``, if another unit's forward may read its parameters without a call.

    ``nn.MultiheadAttention`` does so with its ``out_proj``, tied output layers with their embedding.
    """

    def __getattr__(self: Any, name: str) -> Any:
        value = cls.__getattr__(self, name)  # type: ignore[attr-defined]
        if isinstance(value, Managed) and (unit := unit_of(value)) is not None:
            lend_if_called(unit)
            return cls.__getattr__(self, name)  # type: ignore[attr-defined]
        return value

    return {"__getattr__": __getattr__}
