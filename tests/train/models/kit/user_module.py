"""A user's module, for `[model] kind = "python"`: blocks that take keywords and return tuples."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Layer(nn.Module):
    """Means over earlier tokens, and a bottleneck."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width, bias=False), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, *, scale: Tensor) -> tuple[Tensor, Tensor]:
        mean = self.norm(x).cumsum(1) / scale
        x = x + self.mix(mean).tanh()
        return x + self.down(self.up(x).relu()), mean.square().mean()


class Module(nn.Module):
    def __init__(self, vocab_size: int, width: int = 24, depth: int = 3) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(vocab_size, width), nn.Linear(width, vocab_size)
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))

    def forward(self, tokens: Tensor) -> Tensor:
        x, penalty = self.embedding(tokens), 0.0
        scale = torch.arange(1, tokens.shape[1] + 1, device=x.device, dtype=x.dtype).view(-1, 1)
        for layer in self.layers:
            x, size = layer(x, scale=scale)
            penalty = penalty + size
        logits: Tensor = self.out(x) + 0 * penalty
        return logits


class EachLoss(Module):
    """With a loss of its own: the square of the cross-entropy of each target."""

    def loss(self, batch: Any) -> Tensor:
        logits, targets = self(batch.inputs).flatten(0, 1), batch.targets.flatten()
        return F.cross_entropy(logits, targets, reduction="none").square().view_as(batch.targets)


class MeanLoss(Module):
    """With the mean of this loss over the targets that count: of none it is not a number, nor is its gradient."""

    def loss(self, batch: Any) -> Tensor:
        counted = batch.targets.flatten() != -100
        logits, targets = self(batch.inputs).flatten(0, 1), batch.targets.flatten().clamp(min=0)
        return (F.cross_entropy(logits, targets, reduction="none").square() * counted).sum() / counted.sum()
