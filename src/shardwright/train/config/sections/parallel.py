"""The section `[parallel]`."""

from __future__ import annotations

from math import prod
from typing import Annotated, Any, Literal

from pydantic import Field

from shardwright.engine.extend import layouts, memories, strategies
from shardwright.train.config.axes import AXES, Divided, ParallelDims, axes_that_divide
from shardwright.train.config.catalog.engines import ENGINES, EngineFacts, EngineName
from shardwright.train.config.catalog.registry_names import OneOf, summaries
from shardwright.train.config.sections.base import DType, Section


def _axis(name: str) -> Any:
    """Return the field for the axis of that name."""
    (axis,) = (axis for axis in AXES if axis.name == name)
    return Field(default=1, ge=1, description=axis.description)


class ParallelConfig(Section):
    """The engine that spreads the model over the ranks, and its precisions."""

    engine: EngineName = Field(
        default="shardwright",
        description="shardwright, or an engine of torch for comparison. none: a plain model on one rank.",
    )
    param_dtype: DType = Field(
        default="float32", description="Precision of the computation; the stored weights are float32."
    )
    reduce_dtype: DType = Field(
        default="float32", description="Precision in which gradients are summed over the ranks."
    )
    accumulate_dtype: DType | Literal["auto"] = Field(
        default="auto",
        description=(
            "Precision of the gradients that the engine shardwright holds between micro-batches. auto: reduce_dtype."
        ),
    )
    grad_dtype: DType | Literal["auto"] = Field(
        default="auto",
        description=(
            "Precision of the gradients that the optimizer gets from the engine shardwright. auto: float32, as for "
            "stored weights. bfloat16 halves their memory; of the built-in optimizers adamw8bit supports it."
        ),
    )
    keep_float32: Annotated[tuple[str, ...], Field(strict=False)] = Field(
        default=(),
        description=(
            'Patterns of names, such as ["*norm.weight", "*.router.*"]. The engine shardwright gathers these '
            "parameters in float32, whatever param_dtype is. Allowed: norms, routers, steps and decays of Mamba-2."
        ),
    )
    full_precision_in_eval: bool = Field(
        default=False,
        description="Validate in float32, whatever param_dtype is. Only for the engine shardwright.",
    )
    reshard_after_forward: Literal["default", "always", "never"] | Annotated[int, Field(ge=1)] = Field(
        default="default",
        description=(
            "Which gathered weights to free after the forward pass. default: all except the root's and the last "
            "block's. always: all. never: none (more memory, less communication). A number k: as default, but each "
            "group of k neighbouring ranks keeps the blocks' weights, one k-th on each rank, for the backward pass."
        ),
    )
    strategy: Annotated[str, OneOf(strategies)] = Field(
        default="zero3",
        description=f"What the engine shardwright shards over the ranks. {summaries(strategies)}",
    )
    replicas: int = Field(
        default=1,
        ge=1,
        description="Number of groups of ranks that each hold a whole model. hsdp and hfsdp need at least 2.",
    )
    tensor: int = _axis("tensor")
    expert: int = _axis("expert")
    context: int = _axis("context")
    layout: Annotated[str, OneOf(layouts)] | Annotated[int, Field(ge=1)] = Field(
        default="per_parameter",
        description=(
            f"Where the engine shardwright cuts parameters. {summaries(layouts)} A number: like ragged, but cut only "
            "between blocks of this many rows."
        ),
    )
    memory: Annotated[str, OneOf(memories)] = Field(
        default="dynamic",
        description=f"How the engine shardwright allocates the memory of a step. {summaries(memories)}",
    )
    prefetch: (
        Annotated[int, Field(ge=0)]
        | Annotated[str, Field(pattern=r"^\d+ ?[KMG]iB$", description='bytes, such as "512 MiB"')]
    ) = Field(
        default=1,
        description=(
            'Number of units that the engine shardwright gathers ahead, or number of bytes, such as "512 MiB".'
        ),
    )

    offload: Literal["none", "cpu", "optimizer"] = Field(
        default="none",
        description=(
            "What the engine shardwright keeps in the CPU's memory. cpu: parameters, gradients and optimizer state; "
            "the optimizer steps on the CPU (muon: on the device). optimizer: only the optimizer state, which moves "
            "to the device and back in each step."
        ),
    )

    @property
    def facts(self) -> EngineFacts:
        """The facts of the engine."""
        return ENGINES[self.engine]

    def dims(self, ranks: int) -> ParallelDims:
        """Return the sizes of all axes of a job on this many ranks.

        Raises:
            UserError: the sizes in the configuration do not divide the ranks.
        """
        return ParallelDims.of(self.replicas, self._sizes, ranks)

    def dims_near(self, ranks: int) -> ParallelDims:
        """Return the same, rounded down where the sizes do not divide the ranks, for checks before that is refused."""
        return ParallelDims.near(self.replicas, self._sizes, ranks)

    @property
    def _sizes(self) -> dict[str, int]:
        return {axis.name: getattr(self, axis.name) for axis in AXES}

    def parts_of(self, what: Divided) -> int:
        """Return the number of ranks that divide this thing of a model."""
        return prod(getattr(self, axis.name) for axis in axes_that_divide(what))

    @property
    def strategy_keeps_parameters(self) -> bool:
        """Whether parameters stay whole until the optimizer's step, and their gradients do not."""
        strategy = strategies.get(self.strategy)
        return strategy.keeps_parameters and any(strategy.stages)

    @property
    def keeps_parameters(self) -> bool:
        """Whether parameters stay whole between forward and backward, for one reason or the other."""
        return self.reshard_after_forward == "never" or self.strategy_keeps_parameters
