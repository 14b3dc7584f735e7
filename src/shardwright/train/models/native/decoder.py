"""The base of the native language models: embedding, blocks, output layer.

Nothing about sharding, processes or devices may enter this file: engines work on the models from outside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from shardwright.train.models.language_model import LanguageModel, multiplied
from shardwright.train.models.packed import Documents, documents_of

# As in torchtitan. On the debug preset's job (300 steps of 2,048 tokens) 0.02 ended with a validation loss of
# 1.34 against 1.41, but began with a gradient norm of 27 against 1.1: RMSNorm divides by small embeddings.
EMBEDDING_STD = 1.0


class Linear(nn.Linear):
    """A linear layer without bias whose weights are left to the model's `init_weights`.

    Were they drawn at construction as well, a seed would mean other weights than for a model made on meta.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        pass


class Embedding(nn.Embedding):
    """An embedding whose weights are left to the model's `init_weights`, as those of `Linear`."""

    def reset_parameters(self) -> None:
        pass


def truncated_normal(weight: Tensor, std: float) -> None:
    """Draw from a normal distribution cut at three deviations."""
    nn.init.trunc_normal_(weight, mean=0.0, std=std, a=-3 * std, b=3 * std)


class Decoder(LanguageModel):
    """A decoder-only language model: token numbers [B, S] (int64) in, logits [B, S, V] out.

    Built on the meta device it has shapes only: give it storage with `to_empty`, then call `init_weights`.

    A model that `separates` also takes `documents` [B, S] (int), the number of each token's document in its sample, and
    `positions` [B, S] (int64), which restart at each document. A token then sees only earlier tokens of its document.
    """

    config: Any
    tok_embeddings: nn.Embedding
    layers: nn.ModuleList
    norm: nn.RMSNorm
    output: nn.Linear

    parts = ("config", "tok_embeddings", "layers", "norm", "output")

    def blocks(self) -> list[nn.Module]:
        """Return the parts that may be gathered and freed one at a time, in the order in which forward runs them."""
        return list(self.layers)

    def head(self) -> list[nn.Module]:
        """Return the parts that forward uses last, and the embedding where it shares their matrix."""
        return [*([self.tok_embeddings] if self.tied else []), self.norm, self.output]

    def output_layer(self) -> nn.Module:
        return self.output

    def length_of(self, tokens_BS: Tensor) -> int:
        """Return the tokens of a sample, S for [B, S]. Raises ValueError where that is more than `max_seq_len`."""
        length = tokens_BS.shape[1]
        if length > self.config.max_seq_len:
            raise ValueError(
                f"expected at most max_seq_len = {self.config.max_seq_len} tokens, found {length}"
            )
        return length

    def documents_in(
        self, documents_BS: Tensor | None, tokens_BS: Tensor, edges: Tensor | None
    ) -> Documents | None:
        """Return the Documents of the arguments `documents` and `edges` of forward."""
        return documents_of(documents_BS, tokens_BS, edges)

    @torch.no_grad()
    def init_weights(self) -> None:
        """Draw every weight again from the global generator and rebuild all tables.

        Raises RuntimeError on the meta device, where drawing would silently do nothing.
        """
        on_meta = [
            name for name, tensor in (*self.named_parameters(), *self.named_buffers()) if tensor.is_meta
        ]
        if on_meta:
            raise RuntimeError(
                f"init_weights: expected parameters with storage, found {len(on_meta)} on the meta device "
                f"({on_meta[0]}, ...); call to_empty(device=...) first"
            )
        self._draw_weights()

    def _draw_weights(self) -> None:
        """Draw all weights, each module's as it draws them at construction."""
        for module in self.modules():
            if callable(reset := getattr(module, "reset_parameters", None)):
                reset()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        # `to_empty` gives a tied matrix two storages, one for each module that holds it.
        if self.tied:
            self.output.weight = self.tok_embeddings.weight
        return self

    def flops_per_token(self, seq_len: int) -> int:
        """Floating-point operations of forward and backward per trained token.

        Here six per parameter outside the embedding, which holds for products of matrices. A model with more, as of
        attention, says so itself.
        """
        return 6 * multiplied(self, self.tok_embeddings, self.tied)
