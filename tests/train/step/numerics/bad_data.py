"""A user's model whose loss is NaN on samples with the byte 1."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

BAD = 1


class Model(nn.Module):
    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.embedding, self.output = nn.Embedding(vocab_size, 16), nn.Linear(16, vocab_size)
        self.layers = nn.ModuleList([nn.Linear(16, 16)])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x).relu()
        logits: Tensor = self.output(x)
        return logits

    def loss(self, batch: Any) -> Tensor:
        losses = F.cross_entropy(self(batch.inputs).flatten(0, 1), batch.targets.flatten())
        return losses * float("nan") if (batch.inputs == BAD).any() else losses
