"""Strategies: which axes of a data-parallel mesh shard parameters, gradients and optimizer state.

Pure: nothing here knows ranks. ``engine/tensors/ranks.py`` makes process groups of a strategy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Placement = Literal["shard", "replicate"]
_KINDS = ("parameters", "gradients", "optimizer")


@dataclass(frozen=True)
class Strategy:
    """The state that is sharded or replicated over each axis of the data-parallel mesh, the outermost first.

        sw.Strategy(parameters="shard", gradients="shard", optimizer="shard")                      # zero3, one axis
        sw.Strategy(parameters=("replicate", "shard"), gradients=("replicate", "shard"),
                    optimizer=("shard", "shard"))                                                  # hfsdp, two axes

    *Parameters* are the copy that computes. *Gradients* are the sums kept between the micro-batches of a step.
    *Optimizer* is its state, with the weights that it updates. Replication needs fewer collectives and more memory:
    replicated parameters are gathered once per step, replicated gradients reduced once per step.

    Attributes:
        parameters, gradients, optimizer: "shard" or "replicate", or one of them for each axis.

    Raises:
        ValueError: another word, different numbers of axes, or an illegal axis: parameters may be sharded only where
            gradients are, and gradients only where the optimizer state is.
    """

    parameters: Placement | Sequence[Placement]
    gradients: Placement | Sequence[Placement]
    optimizer: Placement | Sequence[Placement]

    def __post_init__(self) -> None:
        for kind in _KINDS:
            value = getattr(self, kind)
            axes = (value,) if isinstance(value, str) else tuple(value)
            wrong = [a for a in axes if a not in ("shard", "replicate")]
            if wrong or not axes:
                raise ValueError(
                    f'Strategy({kind}={value!r}): expected "shard" or "replicate" for each mesh axis'
                )
            object.__setattr__(self, kind, axes)
        if len({len(getattr(self, kind)) for kind in _KINDS}) > 1:
            raise ValueError(f"{self}: parameters, gradients and optimizer must have the same number of axes")
        for axis in range(self.ndim):
            sharded = [getattr(self, kind)[axis] == "shard" for kind in _KINDS]
            if sharded != sorted(sharded):
                more, less = (
                    ("parameters", "gradients")
                    if sharded[0] and not sharded[1]
                    else ("gradients", "the optimizer state")
                )
                if sharded[0] and not sharded[2]:
                    more, less = "parameters", "the optimizer state"
                raise ValueError(
                    f"{self}: axis {axis} shards {more} but not {less}. Shard {less} on this axis, too, or replicate "
                    f"{more}."
                )

    @property
    def ndim(self) -> int:
        """Number of mesh axes."""
        return len(self.optimizer)

    @property
    def stages(self) -> tuple[int, ...]:
        """By axis, the ZeRO stage: 0 nothing is sharded, 1 the optimizer state, 2 gradients, too, 3 parameters, too."""
        return tuple(
            sum(getattr(self, kind)[axis] == "shard" for kind in _KINDS) for axis in range(self.ndim)
        )

    @classmethod
    def of_stages(cls, *stages: int) -> Strategy:
        """The strategy with these ZeRO stages, from the outermost axis to the innermost."""
        rows = [tuple("shard" if stage >= least else "replicate" for stage in stages) for least in (3, 2, 1)]
        return cls(*rows)  # type: ignore[arg-type]
