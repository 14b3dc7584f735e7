"""Strategies that have a name, for ``fully_shard(strategy=...)`` and ``[parallel] strategy``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwright.engine.extend.registry import Registry

if TYPE_CHECKING:
    from shardwright.engine.layout import Strategy


@dataclass(frozen=True)
class NamedStrategy:
    """A strategy with a name: the state that is sharded over each axis of a mesh.

    Attributes:
        name: by which ``fully_shard`` and configurations know it.
        stages: the ZeRO stage of each axis, the outermost first: 0 nothing is sharded, 1 the optimizer state, 2
            gradients, too, 3 parameters, too. One stage alone holds for all axes of any mesh.
        summary: what it does, in a sentence.
    """

    name: str
    stages: tuple[int, ...]
    summary: str

    def __post_init__(self) -> None:
        stages = self.stages if isinstance(self.stages, tuple) else ()
        if len(stages) not in (1, 2) or any(stage not in (0, 1, 2, 3) for stage in stages):
            raise ValueError(
                f"NamedStrategy {self.name!r}: expected stages of one axis or two, each 0, 1, 2 or 3, as in (0, 3); "
                f"found {self.stages!r}"
            )

    @property
    def axes(self) -> int | None:
        """Number of axes that its mesh must have; None: any number."""
        return len(self.stages) if len(self.stages) > 1 else None

    @property
    def keeps_parameters(self) -> bool:
        """Whether every rank keeps whole parameters from step to step."""
        return max(self.stages) < 3

    def on(self, ndim: int) -> Strategy:
        """The strategy for a mesh of ``ndim`` axes.

        Raises:
            ValueError: an axis shards less than the engine can, as ``Strategy`` says.
        """
        from shardwright.engine.layout import Strategy

        return Strategy.of_stages(*(self.stages * ndim if len(self.stages) == 1 else self.stages))


_ZERO3 = (
    "fsdp",
    "fsdp1",
    "fsdp2",
    "full_shard",
    "fully_shard",
    "full",
    "zero",
    "stage3",
    "stage_3",
    "deepspeed",
    "3",
)
_OTHER_NAMES = {
    **dict.fromkeys(_ZERO3, "zero3"),
    **dict.fromkeys(("shard_grad_op", "_hybrid_shard_zero2", "stage2", "stage_2", "2"), "zero2"),
    **dict.fromkeys(("zero_redundancy", "stage1", "stage_1", "1"), "zero1"),
    **dict.fromkeys(("hybrid_shard", "hybrid_sharding", "hybrid"), "hsdp"),
    **dict.fromkeys(("no_shard", "data_parallel", "dp", "none", "stage0", "0"), "ddp"),
}
"""Strategies by the names of FSDP1, FSDP2, DeepSpeed and accelerate."""

strategies: Registry[NamedStrategy] = Registry(
    "strategy",
    "strategies",
    NamedStrategy,
    (
        NamedStrategy("ddp", (0,), "Parameters, gradients and optimizer state are whole on every rank."),
        NamedStrategy("zero1", (1,), "The optimizer state is sharded."),
        NamedStrategy("zero2", (2,), "Gradients and the optimizer state are sharded."),
        NamedStrategy("zero3", (3,), "Parameters, gradients and the optimizer state are sharded."),
        NamedStrategy("hsdp", (0, 3), "zero3 inside each replica; replicas are equal copies."),
        NamedStrategy(
            "hfsdp", (1, 3), "zero3 inside each replica; the optimizer state is sharded over replicas, too."
        ),
    ),
    _OTHER_NAMES,
)


def resolve(strategy: str | NamedStrategy | Strategy | None, ndim: int) -> Strategy:
    """The strategy of this name for a mesh of ``ndim`` axes; None means zero3, or hsdp on two axes.

    A name for one axis holds for both of two: ``zero1`` shards the optimizer state over all their ranks.

    Raises:
        ValueError: no such name, or a strategy for another number of axes.
    """
    from shardwright.engine.layout import Strategy

    if strategy is None:
        strategy = "zero3" if ndim == 1 else "hsdp"
    if isinstance(strategy, str):
        strategy = strategies.get(strategy)
    name: object = strategy
    if isinstance(strategy, NamedStrategy):
        name, resolved = strategy.name, strategy.on(ndim)
    elif isinstance(strategy, Strategy):
        resolved = strategy
    else:
        raise ValueError(f"strategy: expected a Strategy or {strategies.expected()}, found {strategy!r}")
    if resolved.ndim != ndim:
        raise ValueError(
            f"strategy {name!r} is for a mesh of {resolved.ndim} dimensions, and this mesh has {ndim}. "
            + (
                "Pass a 2-D mesh, replicas outside."
                if resolved.ndim == 2
                else "Pass a Strategy with a word for each axis."
            )
        )
    return resolved
