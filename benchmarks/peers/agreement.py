"""Whether a contender computes the numbers of one process that trains on the data of all ranks.

A contender that does not agree gets no figure: it does other work than its peers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from benchmarks.peers.shapes import Shape, loss_of
from benchmarks.peers.step import CLIP, adamw_options

WEIGHTS = (1.0, 30.0, 0.1, 3.0, 100.0, 1.0)
"""Factors of the loss, step by step. AdamW forgets a constant factor of all gradients. Where the norms jump, it does
not, so an engine that does not clip, or clips by another norm, is far away."""
TOLERANCE = 2e-5
"""Relative, for losses and norms. In float32 engines sum gradients in other orders. This changes the last bits (6e-8)
of gradients and of the coefficient of clipping. AdamW divides by the root of squares, which makes such a change of a
small gradient larger, and six steps add up. A rate that is 1% too large is three times the tolerance away, or more."""


@dataclass(frozen=True)
class Numbers:
    """Numbers of some steps: the loss of every rank [step][rank], and the norm of the averaged gradients [step]."""

    losses: list[list[float]]
    norms: list[float]


def reference(shape: Shape, ranks: int) -> Numbers:
    """One process, the plain model, the average over the ranks' losses."""
    model = shape.model()
    optimizer = torch.optim.AdamW(model.parameters(), **adamw_options("default"))
    numbers = Numbers([], [])
    for step, weight in enumerate(WEIGHTS):
        losses = []
        for rank in range(ranks):
            loss = loss_of(model, shape.tokens(step, rank, ranks)) * weight
            (loss / ranks).backward()
            losses.append(float(loss.detach()))
        numbers.losses.append(losses)
        numbers.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    return numbers


def difference(found: Numbers, expected: Numbers) -> float:
    """The largest relative difference of a loss or a norm; infinite if a number is not finite."""
    pairs = list(zip(found.norms, expected.norms, strict=True))
    for ours, theirs in zip(found.losses, expected.losses, strict=True):
        pairs += zip(ours, theirs, strict=True)
    differences = [abs(a - b) / abs(b) for a, b in pairs]
    return max(d if d == d else float("inf") for d in differences)
