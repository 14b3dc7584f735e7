"""The companion of a sharded optimizer: data that it keeps between steps, such as owners and places of state.

``sharded.py`` and ``in_backward.py`` read this data when they step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwright.engine import Companion, Unit, companion_of
from shardwright.optim.calls import CallsInBackward
from shardwright.optim.host_state import HostState
from shardwright.optim.needs import Need
from shardwright.optim.stand_ins import LocalStandIn
from shardwright.optim.whole.step import Owners
from shardwright.optim.whole.updates import Updates


@dataclass
class BackwardSteps:
    """Settings and state of an optimizer that steps in backward.

    Attributes:
        kind: the optimizer's class without our subclass.
        clip_value: the largest absolute value of a gradient's element; None leaves gradients as they are.
        units: each unit's parameters, group by group, after the key for which they are valid.
        calls: the calls of the running step.
        stepped: the units that were stepped since the user called ``step()``.
        again: the name of a unit that was stepped more than once since then.
        step_called: whether the user's program calls ``step()``.
    """

    kind: type
    clip_value: float | None
    units: weakref.WeakKeyDictionary[Unit, Any] = field(default_factory=weakref.WeakKeyDictionary)
    calls: CallsInBackward | None = None
    stepped: weakref.WeakSet[Unit] = field(default_factory=weakref.WeakSet)
    again: str | None = None
    step_called: bool = False

    def end_step(self) -> None:
        """Forget the units of a step, because the next backward makes another step."""
        self.stepped.clear()
        self.again = None


class ShardedCompanion(Companion):
    """The companion of a sharded optimizer.

    Attributes:
        needs: the piece of a parameter that the optimizer needs whole.
        updates: how the step on a parameter is divided, if it is.
        owners: the owners of parameters that it needs whole, by mesh.
        whole: the parameters that it needs whole.
        host_state: brings state from the host to the device and back. None: all state is where its parameter is.
        hidden_state: the optimizer's ``state`` after a step that used ``host_state``, until somebody reads it. Else
            None.
        stand_ins: each sharded parameter's local stand-in.
        unfinished: what the running step will put back at its end. It stays after a step that could not.
        backward: how the optimizer steps in backward, once ``in_backward`` was called.
    """

    def __init__(
        self,
        needs: Callable[[torch.Tensor], Need],
        updates: Callable[[torch.Tensor], Updates | None],
        stepped: bool,
    ) -> None:
        super().__init__(stepped)
        self.needs = needs
        self.updates = updates
        self.owners: dict[DeviceMesh, Owners] = {}
        self.whole: set[torch.Tensor] = set()
        self.host_state: HostState | None = None
        self.hidden_state: Any = None
        self.stand_ins: dict[torch.Tensor, LocalStandIn] = {}
        self.unfinished: Any = None
        self.backward: BackwardSteps | None = None

    @property
    def brings_state(self) -> bool:
        return self.host_state is not None


def sharded_companion(optimizer: Any) -> ShardedCompanion:
    """Return the companion of an optimizer that went through ``fully_shard_optimizer``.

    Raises:
        RuntimeError: the optimizer is a copy of such a one. Copies have no companion.
    """
    companion = companion_of(optimizer)
    if not isinstance(companion, ShardedCompanion):
        raise RuntimeError(
            f"This {type(optimizer).__name__} is a copy of a sharded optimizer, but a copy has no record of how its "
            "parameters are sharded. Build a new optimizer, call fully_shard_optimizer, and load the state dict."
        )
    return companion
