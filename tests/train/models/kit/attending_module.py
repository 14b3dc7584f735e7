"""A user's modules with attention, for `[model] kind = "python"` and samples that ranks divide."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwright as sw


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.out, self.mlp = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(x).tanh()


class Model(nn.Module):
    """It takes the positions of its tokens."""

    def __init__(self, vocab_size: int, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab_size, width), nn.Embedding(64, width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(2))
        self.out = nn.Linear(width, vocab_size)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.places(positions)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.out(x)
        return logits


class Asking(Model):
    """It asks for the positions, has a sliding window, and computes its own loss."""

    def forward(self, tokens: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(tokens, sw.context.positions(tokens.shape[1], tokens.device))

    def loss(self, batch: Any) -> Tensor:
        logits, targets = self(batch.inputs).flatten(0, 1), batch.targets.flatten()
        return (
            F.cross_entropy(logits, targets, reduction="none", ignore_index=-100)
            .square()
            .view_as(batch.targets)
        )


class Counting(Model):
    """It counts positions from its first token, whatever rank has it."""

    def forward(self, tokens: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(tokens)


class CountingBehindZeros(Counting):
    """Its logits are 0 at first, whatever its layers compute."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        for layer in (self.out, *(block.out for block in self.layers)):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
