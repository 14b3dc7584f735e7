"""The section `[activations]`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from shardwright.train.config.sections.base import Section


class ActivationConfig(Section):
    """Activations that are kept from forward to backward, and where. The others are computed again, in the same
    precision."""

    checkpoint: Literal["none", "full", "layers", "ops", "half_ops", "budget"] = Field(
        default="none",
        description=(
            "Activation checkpointing. full: keep only the inputs of each block. layers: the same, for every k-th "
            "block. ops: keep also the results of matrix products and attention. half_ops: the same, but only of every "
            "second product, as torchtitan's selective policy. budget: the compiler chooses within activations.budget; "
            "needs train.compile = inductor."
        ),
    )
    every: int = Field(
        default=2,
        ge=1,
        description="For checkpoint = layers: checkpoint every k-th block, beginning with the first.",
    )
    budget: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description=(
            "For checkpoint = budget: the fraction of the activations that may be kept. 0 means full, 1 means none."
        ),
    )
    offload: Literal["none", "blocks", "inputs"] = Field(
        default="none",
        description=(
            "Activations that wait in the host's memory and come back a block ahead. blocks: all that a block keeps. "
            "inputs: the inputs of the blocks that checkpoint computes again. Same numbers."
        ),
    )
