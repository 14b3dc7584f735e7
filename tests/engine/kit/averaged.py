"""Gradients of a plain model, averaged over all ranks' data."""

from __future__ import annotations

import torch
from torch import nn

from tests.engine.kit.models import Model, Reference, build, full, loss_of, tokens


def backward(model: nn.Module, rank: int, step: int = 0, micro: int = 0) -> torch.Tensor:
    batch = tokens(step, micro, rank)
    loss = loss_of(model(batch), batch)
    loss.backward()
    return loss


def expected_gradients(world_size: int, micros: int = 1, model: Model | None = None) -> list[torch.Tensor]:
    reference = Reference(model or build(), torch.float32, torch.float32)
    reference.backward(world_size, [[tokens(0, m, r) for r in range(world_size)] for m in range(micros)])
    return [p.grad for p in reference.model.parameters()]


def check_gradients(model: nn.Module, expected: list[torch.Tensor]) -> None:
    for (name, p), q in zip(model.named_parameters(), expected, strict=True):
        torch.testing.assert_close(full(p.grad), q, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
