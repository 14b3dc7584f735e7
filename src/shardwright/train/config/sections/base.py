"""Base of all sections of CONFIG.toml: strict types, and the types of several keys."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

# No float16: its gradients underflow without loss scaling, which the trainer does not have.
DType = Literal["float32", "bfloat16"]


class Section(BaseModel):
    """A table of the file: strict types, no unknown keys, immutable."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)
