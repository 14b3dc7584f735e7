"""Work that may fail on one rank alone: then every rank ends with one error, and none waits in a collective."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from shardwright.checkpoint.pretrained.model import OtherRankFailed, on_every_rank
from shardwright.train.errors import UserError


def together(mesh: DeviceMesh | None, action: Callable[[], Any]) -> Any:
    """The result of `action` on this rank. Called by every rank of `mesh`; None: there are no others.

    Raises:
        UserError: `action` failed on another rank. The rank itself raises its own error.
    """
    try:
        return on_every_rank(mesh, action)
    except OtherRankFailed as error:
        raise UserError(str(error)) from error
