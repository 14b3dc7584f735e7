"""Decides what a unit does with its gradients after a backward: a pure function of settings and held gradients."""

from __future__ import annotations

from enum import Enum, IntEnum


class Held(IntEnum):
    """The gradients of earlier micro-batches that a unit holds, on this rank or on another."""

    NOTHING = 0
    SUMS = 1  #: sums over the ranks that shard gradients
    WHOLE = 2  #: full gradients, which are not summed over ranks; perhaps also sums


class Due(Enum):
    """The next action, and what the unit holds after it."""

    leaves: Held

    HOLD = "add full gradients to those held", Held.WHOLE
    SCATTER = "sum over the ranks that shard gradients, and hold the sums", Held.SUMS
    FINISH = "reduce full gradients and sums", Held.NOTHING
    FINISH_SUMS = "reduce sums, if there are no full gradients", Held.NOTHING

    def __init__(self, action: str, leaves: Held) -> None:
        self.leaves = leaves


def due(*, sync: bool, completes: bool, finishes_late: bool, held: Held, needed: bool) -> Due:
    """The next action for a unit's gradients.

    Args:
        sync: whether this backward may communicate gradients.
        completes: whether this backward runs all reductions, so that none is left for the last one of its step.
        finishes_late: whether the strategy sums over some ranks in each backward and over others once per step.
        held: the gradients that the unit holds.
        needed: no backward has reached the unit, but an optimizer, clipping or the step's last backward needs the held
            gradients.
    """
    if needed:
        return Due.FINISH if held is Held.WHOLE or not finishes_late else Due.FINISH_SUMS
    if not sync:
        return Due.HOLD
    if completes:
        return Due.FINISH
    return Due.SCATTER if finishes_late else Due.HOLD
