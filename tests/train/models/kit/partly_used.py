"""A user's module with a layer that no step uses, and one that the first steps leave out."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Module(nn.Module):
    """``sometimes`` takes part in forwards 5 to 8 of each eight, on all ranks. A checkpoint has their number."""

    calls: Tensor

    def __init__(self, vocab_size: int, width: int = 24) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(vocab_size, width), nn.Linear(width, vocab_size)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.unused, self.sometimes = nn.Linear(width, width), nn.Linear(width, width)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x).tanh()
        if self.training:
            if int(self.calls) % 8 >= 4:
                x = x + self.sometimes(x).tanh()
            self.calls += 1
        logits: Tensor = self.out(x)
        return logits
