"""Local tensors that stand in for sharded parameters within a step, and the two forms of their state.

Inside a step, state belongs to local tensors. Outside, it is sharded like its parameter. Nothing here makes a step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwright.engine import RaggedSpec, RaggedTensor, as_sharded, part_of
from shardwright.engine.compat import dtensor_of, local_of
from shardwright.optim.cuts import block_spec
from shardwright.optim.needs import name_of

SHARDED = (DTensor, RaggedTensor)


class LocalStandIn:
    """A parameter's local tensor, and the last known state tensors of both forms.

    Attributes:
        inner: the state for the optimizer's own code.
        seen: by key, the outer value that belongs to ``shown[key]``.
        shown: the values of ``inner`` that the outer form shows.
    """

    __slots__ = ("inner", "local", "seen", "shown")

    def __init__(self, local: torch.Tensor, p: DTensor | RaggedTensor) -> None:
        self.local = local
        local.whole_shape = p.shape  # type: ignore[attr-defined]  # for optimizers that go by the size of the whole
        self.inner: dict[str, Any] = {}
        self.seen: dict[str, Any] = {}
        self.shown: dict[str, Any] = {}

    def clear(self) -> None:
        self.inner, self.seen, self.shown = {}, {}, {}

    def refresh(self, state: dict[str, Any], p: DTensor | RaggedTensor, optimizer: Optimizer) -> None:
        """Adopt outer state that was loaded or changed since the last step."""
        seen = self.seen
        if len(seen) == len(state):
            for key, value in state.items():
                if seen.get(key) is not value:
                    break
            else:
                return
        self.inner = {key: _local_state(key, value, p, optimizer) for key, value in state.items()}
        self.seen, self.shown = dict(state), dict(self.inner)

    def publish(self, outer: Any, p: DTensor | RaggedTensor, optimizer: Optimizer) -> None:
        """Put new state into the outer form, ``outer[p]``.

        A tensor with one element per element or block of the parameter is sharded like the parameter.
        """
        for key, value in self.inner.items():
            if key in self.shown and self.shown[key] is value:
                continue
            shown: Any = value
            if isinstance(value, torch.Tensor) and value.ndim:
                spec = ragged_spec(optimizer, p, key, value, self.local.shape)
                if spec is not None:
                    shown = RaggedTensor(value, spec)
                elif isinstance(p, DTensor) and value.shape == self.local.shape:
                    shown = as_sharded(dtensor_of(value, p.device_mesh, p.placements, p.shape, p.stride()))
                if shown is not value:
                    self.inner[key] = local_of(shown)
            outer[p][key] = self.seen[key] = shown
            self.shown[key] = self.inner[key]


def _local_state(key: str, value: Any, p: DTensor | RaggedTensor, optimizer: Optimizer) -> Any:
    spec = ragged_spec(optimizer, p, key, value, p.shape)
    if spec is not None:
        return part_of(value, spec)
    if isinstance(p, RaggedTensor):
        return value
    if isinstance(value, DTensor):
        if value.placements != p.placements:
            raise ValueError(
                f"Optimizer state {key!r} of parameter {name_of(p)} is placed {value.placements}, but the parameter "
                f"{p.placements}. Load optimizer state that is sharded like the model."
            )
        return local_of(value)
    if isinstance(value, torch.Tensor) and value.ndim and value.shape == p.shape:
        raise ValueError(
            f"Optimizer state {key!r} of parameter {name_of(p)} is a plain tensor, but its parameter is sharded. "
            "Load it with torch.distributed.checkpoint.state_dict.set_optimizer_state_dict."
        )
    return value


def ragged_spec(
    optimizer: Optimizer, p: DTensor | RaggedTensor, key: str, value: Any, shape: torch.Size
) -> RaggedSpec | None:
    """Return the spec of this state of ``p`` if its outer form is ragged: one element per block, or ``shape`` per
    element."""
    if key in getattr(optimizer, "state_per_block", ()):
        return block_spec(p, optimizer.shard_needs(p))  # type: ignore[attr-defined]
    if isinstance(p, RaggedTensor) and isinstance(value, torch.Tensor) and value.shape == shape:
        return p.spec
    return None
