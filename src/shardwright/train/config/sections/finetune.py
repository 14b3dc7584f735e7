"""The keys of `[finetune]`, and what cannot be combined with them. Nothing here imports torch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from shardwright.train.config.sections.base import DType, Section

if TYPE_CHECKING:
    from shardwright.train.config.sections.parallel import ParallelConfig
    from shardwright.train.config.sections.train import TrainConfig

Patterns = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(strict=False)]


class FinetuneConfig(Section):
    """The parameters that are trained: all of them, or adapters beside a frozen base."""

    method: Literal["full", "lora", "dora"] = Field(
        default="full",
        description=(
            "full: train all parameters. lora: freeze them and train adapters, two matrices of low rank beside each "
            "chosen linear layer. dora: lora with a trained length for each row of the layer's weight."
        ),
    )
    rank: int = Field(default=16, ge=1, description="Rank of the adapters.")
    alpha: float = Field(default=32.0, gt=0, description="Adapters are multiplied by alpha / rank.")
    rslora: bool = Field(default=False, description="Multiply adapters by alpha / sqrt(rank) instead.")
    dropout: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description=(
            "Fraction of the inputs of adapters that is set to 0 in training. The choice depends on the seed and the "
            "number of the sample only, so it is the same on any number of ranks and after a resume."
        ),
    )
    targets: Patterns = Field(
        default=(),
        description=(
            'Linear layers that get adapters, as patterns of names, such as ["wq", "*.attention.*"]. Empty: all linear '
            "layers in blocks except routers and the outputs of Mamba layers."
        ),
    )
    train_also: Patterns = Field(
        default=(),
        description=(
            'Parameters of the base that are trained in full, as patterns of names, such as ["*norm.weight"].'
        ),
    )
    base_dtype: DType = Field(
        default="float32",
        description=(
            "Precision in which frozen matrices are stored. bfloat16 halves their memory; a base that was stored in "
            "bfloat16 loses nothing."
        ),
    )
    adapters: str = Field(
        default="",
        description="Folder of adapters in the format of peft to start from. Empty: new adapters.",
    )

    @property
    def scale(self) -> float:
        """The factor of the adapters."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    @model_validator(mode="after")
    def _keys_belong_to_the_method(self) -> FinetuneConfig:
        if self.method == "full":
            for key, value, _ in self.changed(*(key for key in type(self).model_fields if key != "method")):
                raise ValueError(
                    f"{key}: found {value!r} with method 'full', which trains all parameters and has no adapters; set "
                    f"finetune.method to 'lora' or 'dora', or leave {key} out"
                )
        if self.method == "dora" and self.dropout:
            raise ValueError(
                f"dropout: expected 0 with method 'dora', found {self.dropout}; or set finetune.method to 'lora'"
            )
        return self


def conflict(settings: FinetuneConfig, train: TrainConfig, parallel: ParallelConfig) -> str | None:
    """The first value of another section that does not fit `[finetune]`, in a line; None if all fit."""
    if settings.method == "full":
        return None
    method = f"finetune.method = {settings.method!r}"
    if parallel.tensor > 1:
        return (
            f"parallel.tensor: expected 1 with {method}, found {parallel.tensor}; adapters are not cut over "
            "tensor-parallel ranks"
        )
    if parallel.engine == "fsdp1":
        return (
            f"parallel.engine: expected 'shardwright', 'fsdp2', 'ddp' or 'none' with {method}, found 'fsdp1'; it "
            "keeps frozen and trained parameters in one flat parameter"
        )
    if train.float8 != "none":
        return (
            f"train.float8: expected 'none' with {method}, found {train.float8!r}; layers in float8 have no "
            "adapters"
        )
    if settings.dropout and train.cuda_graph:
        return (
            "train.cuda_graph: expected false with finetune.dropout, found true; the numbers of the samples change "
            "between micro-batches of one graph"
        )
    if settings.base_dtype != "float32" and parallel.engine not in ("shardwright", "fsdp2"):
        return (
            f"finetune.base_dtype: expected 'float32' with parallel.engine {parallel.engine!r}, found "
            f"{settings.base_dtype!r}; this engine computes with weights in the precision in which they are stored"
        )
    return None
