"""The cut of a model into units, for engines that shard each unit by a call of `fully_shard`.

The units are: each embedding, each block, the head with the final norm (and the embedding, where it is the same
matrix), and the root with what is left. The model itself knows nothing of it.
"""

from __future__ import annotations

from abc import abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

from torch import nn

from shardwright.train.models.language_model import LanguageModel
from shardwright.train.parallel.engines.base import Engine, Ranks


class UnitEngine(Engine):
    """An engine whose units have the methods of FSDP2's."""

    @abstractmethod
    def shard(self, module: Any, reshard: bool | int, options: dict[str, Any]) -> None:
        """Make a unit of a module, or of a list of them."""

    @abstractmethod
    def options(self, model: LanguageModel, ranks: Ranks) -> dict[str, Any]:
        """Arguments of `fully_shard` for every unit."""

    def shard_root(self, model: LanguageModel, reshard: bool, options: dict[str, Any]) -> None:
        """Make the last unit, of what the other ones leave."""
        self.shard(model, reshard, options)

    def spread(self, model: LanguageModel, ranks: Ranks) -> nn.Module:
        options = self.options(model, ranks)
        # Backward first needs the unit that forward used last: by default it stays gathered.
        reshard = self.config.reshard_after_forward
        reshard_blocks: bool | int = reshard if isinstance(reshard, int) else not self.config.keeps_parameters
        reshard_last = reshard == "always"

        for embedding in lookups_of(model):
            self.shard(embedding, self.frees_embeddings and reshard_blocks is not False, options)
            if not model.foreign:  # code of others may also read the matrix otherwise than by a lookup
                cast(Any, embedding).set_unshard_in_backward(False)
        *blocks, last_block = model.blocks()
        for block in blocks:
            self.shard(block, reshard_blocks, options)
        self.shard(last_block, reshard_last, options)
        if head := model.head():
            self.shard(head, reshard_last, options)
        if ranks.same_experts is not None:
            for block in model.blocks():
                # The gradient of an expert is the sum over the ranks whose tokens reach it before anything is reduced.
                # So all units divide by the ranks that have data of their own.
                cast(Any, block).set_gradient_divide_factor(ranks.data.size())
        self.shard_root(model, reshard_last, options)
        return model

    @property
    def frees_embeddings(self) -> bool:
        """Whether the full matrix of an embedding is freed after its lookups, which is all that a step needs it for."""
        return True

    def gradient_sync(
        self, model: nn.Module, synchronise: bool, last: bool
    ) -> AbstractContextManager[object]:
        root = cast(Any, model)
        root.set_requires_gradient_sync(synchronise)
        root.set_is_last_backward(last)
        return nullcontext()

    def free_gathered(self, model: nn.Module) -> None:
        for module in model.modules():
            if hasattr(module, "set_requires_gradient_sync"):
                cast(Any, module).reshard()


def lookups_of(model: LanguageModel) -> list[nn.Embedding]:
    """Return the embeddings outside of the blocks and the head. Their gradients need the numbers of tokens, and no
    weights."""
    others = {p for part in (*model.blocks(), *model.head()) for p in part.parameters()}
    found = [m for m in model.modules() if isinstance(m, nn.Embedding) and m.weight not in others]
    return [m for m in found if m.max_norm is None and not m.sparse]
