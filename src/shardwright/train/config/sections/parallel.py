"""The section `[parallel]`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from shardwright.extend import layouts, memories, strategies
from shardwright.train.config.registered import OneOf, summaries
from shardwright.train.config.sections.base import DType, Section


class ParallelConfig(Section):
    """The engine that spreads the model over the ranks, and its precisions."""

    engine: Literal["shardwright", "fsdp2", "fsdp1", "ddp", "none"] = Field(
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
    tensor: int = Field(
        default=1,
        ge=1,
        description=(
            "Number of neighbouring ranks that share every layer and the sequence: tensor and sequence parallelism. "
            "These groups divide the data."
        ),
    )
    expert: int = Field(
        default=1,
        ge=1,
        description=(
            "Number of neighbouring ranks that share the experts of every layer: expert parallelism. Each rank has "
            "different data. Only for the engine shardwright."
        ),
    )
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

    @model_validator(mode="after")
    def _fits_the_engine(self) -> ParallelConfig:
        ours = (
            "strategy",
            "replicas",
            "expert",
            "layout",
            "memory",
            "prefetch",
            "offload",
            "accumulate_dtype",
            "grad_dtype",
            "keep_float32",
            "full_precision_in_eval",
        )
        for key, value, default in self.changed(*ours):
            if self.engine != "shardwright":
                raise ValueError(
                    f"{key}: expected {default!r} with engine {self.engine!r}, found {value!r}; only the engine "
                    "shardwright supports other values"
                )
        if self.keep_float32 and self.param_dtype == "float32":
            raise ValueError(
                "keep_float32: expected no patterns with param_dtype 'float32', since all parameters are then "
                "gathered in float32"
            )
        if (
            "auto" not in (self.grad_dtype, self.accumulate_dtype)
            and self.grad_dtype != self.accumulate_dtype
        ):
            raise ValueError(
                f"grad_dtype: expected 'auto' or accumulate_dtype, {self.accumulate_dtype!r}, found "
                f"{self.grad_dtype!r}; reduced micro-batches add up in the gradients"
            )
        if self.engine not in ("shardwright", "fsdp2") and self.tensor > 1:
            raise ValueError(
                f"tensor: engine {self.engine!r} has no tensor parallelism; expected 1, found {self.tensor}"
            )
        strategy = strategies.get(self.strategy)
        if strategy.axes == 2 and self.replicas < 2:
            raise ValueError(
                f"replicas: expected at least 2 with strategy {self.strategy!r}, found {self.replicas}; or set "
                "strategy = 'zero3', which has no replicas"
            )
        if strategy.axes is None and self.replicas > 1:
            raise ValueError(
                f"replicas: expected 1 with strategy {self.strategy!r}, which treats all ranks alike, found "
                f"{self.replicas}; set strategy = 'hsdp' for groups of ranks that each hold a whole model"
            )
        reshard = self.reshard_after_forward
        if strategy.keeps_parameters and any(strategy.stages) and reshard not in ("default", "never"):
            raise ValueError(
                f"reshard_after_forward: strategy {self.strategy!r} keeps parameters whole until the optimizer's step; "
                f"expected 'default' or 'never', found {reshard!r}"
            )
        if self.engine in ("ddp", "none") and reshard != "default":
            raise ValueError(
                f"reshard_after_forward: expected 'default' with engine {self.engine}, which shards nothing, found "
                f"{reshard!r}"
            )
        if self.engine == "fsdp1" and isinstance(reshard, int):
            raise ValueError(
                "reshard_after_forward: engine 'fsdp1' does not support a number; expected 'default', 'always' or "
                f"'never', found {reshard}"
            )
        return self
