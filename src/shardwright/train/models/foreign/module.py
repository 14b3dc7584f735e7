"""Models whose code is not of this package, as models of the trainer: what their kinds have in common."""

from __future__ import annotations

from typing import Any

from torch import nn

from shardwright.checkpoint import KeyMap
from shardwright.train.models.foreign.units import Units
from shardwright.train.models.language_model import LanguageModel

#: In the names of parameters: what is before the names that the module itself has.
PREFIX = "model."
ADAPTER_PARAMETERS = ("lora_a", "lora_b", "lora_magnitude")
"""Names of the parameters of an adapter in its layer."""


class ForeignModel(LanguageModel):
    """A module of another package or of a user, in ``model``. Its blocks and its head are found, not declared.

    Attributes:
        model: the module. Its parameters have their own names after "model.".
        units: the parts of ``model`` that may be gathered alone.
    """

    foreign = True

    model: Any  #: an nn.Module, of which more is known than nn.Module declares
    units: Units

    def blocks(self) -> list[nn.Module]:
        return list(self.units.blocks)

    def head(self) -> list[nn.Module]:
        return list(self.units.head)

    def output_layer(self) -> nn.Module | None:
        return self.units.output


def module_names(model: nn.Module) -> KeyMap | None:
    """Return the names that tensors have in the module of another package or of a user. None: the model is that
    module."""
    return (lambda name: name.removeprefix(PREFIX)) if isinstance(model, ForeignModel) else None
