"""Models that compute their loss in forward, with all logits or without, and the plain model's losses and gradients."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwright as sw
from tests.engine.kit.models import Model

IGNORED = -100
#: The length of a sample. A quarter of two samples has enough rows for the kernel that all rows have.
LENGTH = 32


class LossModel(Model):
    """A model whose forward returns the sum of the losses, and the loss of each token.

    Attributes:
        chunks: of the loss; None: the plain loss of all logits.
        cap: a soft cap of the logits.
    """

    def __init__(self, tied: bool = False, chunks: int | str | None = None, cap: float | None = None) -> None:
        super().__init__()
        self.head = nn.Linear(7, 11, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight
        self.chunks, self.cap = chunks, cap

    def capped(self, logits: Tensor) -> Tensor:
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap

    def hidden(self, tokens: Tensor) -> Tensor:
        h = self.embed(tokens)
        for block in self.blocks:
            h = block(h)
        return self.norm(h)

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        hidden = self.hidden(tokens)
        if self.chunks is not None:
            return sw.chunked_cross_entropy(
                hidden, self.head, targets, chunks=self.chunks, logits=self.capped, ignore_index=IGNORED
            )
        return plain_loss(self.capped(self.head(hidden)), targets)


def plain_loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of the losses, and the loss of each token."""
    losses = F.cross_entropy(
        logits.float().flatten(0, 1), targets.flatten(), reduction="none", ignore_index=IGNORED
    )
    return losses.sum(), losses.detach().view(targets.shape)


def built(**options: Any) -> LossModel:
    torch.manual_seed(0)
    return LossModel(**options)


def batch(number: int, ignores: bool) -> tuple[Tensor, Tensor]:
    """Tokens and targets, other ones for every number."""
    generator = torch.Generator().manual_seed(number)
    tokens, targets = torch.randint(0, 11, (2, 2, LENGTH), generator=generator)
    if ignores:
        targets[0, : 1 + number % 3] = IGNORED
    return tokens, targets


class Plain:
    """The plain model on the data of every rank: losses of one of them, and gradients averaged over all."""

    def __init__(self, model: LossModel, dtype: torch.dtype, factor: float) -> None:
        self.model = copy.deepcopy(model)
        self.model.chunks = None
        self.dtype, self.factor = dtype, factor

    def losses(self, number: int, ignores: bool) -> Tensor:
        with torch.no_grad():
            return copy.deepcopy(self.model).to(self.dtype)(*batch(number, ignores))[1]

    def gradients(self, numbers: list[int], ranks: int, ignores: bool) -> dict[str, Tensor]:
        """Gradients of these batches by the names of parameters, float32, averaged over so many ranks."""
        work = copy.deepcopy(self.model).to(self.dtype)
        sums: dict[str, Tensor] = {}
        for number in numbers:
            work.zero_grad()
            (work(*batch(number, ignores))[0] * self.factor).backward()
            for name, p in work.named_parameters():
                if p.grad is not None:
                    sums[name] = sums.get(name, torch.zeros_like(p, dtype=torch.float32)) + p.grad.float()
        return {name: total / ranks for name, total in sums.items()}
