"""What a unit does with gradients when a backward leaves it: a pure function of settings and of what is held."""

from __future__ import annotations

from enum import Enum, IntEnum


class Held(IntEnum):
    """What earlier micro-batches have left in a unit, on this rank or on another."""

    NOTHING = 0
    SUMS = 1  #: sums over the ranks that shard gradients
    WHOLE = 2  #: full gradients, which no ranks have summed; sums perhaps as well


class Due(Enum):
    """What is due, and what the unit holds after it."""

    HOLD = "add full gradients to those held", Held.WHOLE
    SCATTER = "sum over the ranks that shard gradients, and hold the sums", Held.SUMS
    FINISH = "reduce full gradients and sums", Held.NOTHING
    FINISH_SUMS = "reduce sums, if there are no full gradients", Held.NOTHING

    @property
    def leaves(self) -> Held:
        return self.value[1]


def due(*, sync: bool, completes: bool, finishes_late: bool, held: Held, needed: bool) -> Due:
    """What is due.

    Args:
        sync: whether this backward may communicate gradients.
        completes: whether it leaves nothing for the last one of its step.
        finishes_late: whether the strategy sums over some ranks in each backward and over others once per step.
        held: by the unit.
        needed: no backward has come to the unit, but an optimizer, clipping or the step's last backward needs what is
            held.
    """
    if needed:
        return Due.FINISH if held is Held.WHOLE or not finishes_late else Due.FINISH_SUMS
    if not sync:
        return Due.HOLD
    if completes:
        return Due.FINISH
    return Due.SCATTER if finishes_late else Due.HOLD
