"""Models whose code is not of this package, as models of the trainer: what their kinds have in common."""

from __future__ import annotations

from typing import Any

from torch import nn

from shardwright.train.models.language_model import LanguageModel
from shardwright.train.models.units import Units


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
