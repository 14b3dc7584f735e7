"""The section `[finetune]`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from shardwright.train.config.sections.base import DType, Section

if TYPE_CHECKING:
    pass

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
    freeze: Patterns = Field(
        default=(),
        description=(
            "Parameters that method full leaves as they are, as patterns of names of parameters or of modules, such as "
            '["embed_tokens", "layers.0.*"]. Checkpoints do not hold them.'
        ),
    )
    train_only: Patterns = Field(
        default=(),
        description="The parameters that method full trains, as patterns like those of freeze. All others are frozen.",
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
    def has_adapters(self) -> bool:
        """Whether layers get adapters."""
        return self.method != "full"

    @property
    def has_base(self) -> bool:
        """Whether parameters are frozen by these settings: checkpoints do not hold them, so a run states where they
        come from, and a resume compares them."""
        return self.has_adapters or bool(self.freeze or self.train_only)

    @property
    def scale(self) -> float:
        """The factor of the adapters."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)
