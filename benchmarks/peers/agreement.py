"""Whether a contender computes the numbers of one process that trains on the data of all ranks.

A contender that does not agree gets no figure: it does other work than its peers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from benchmarks.peers.shapes import Shape, loss_of
from benchmarks.peers.step import CLIP, adamw_options

STEPS = 6
TOLERANCE = 1e-4
"""Relative, for losses and norms. In float32 engines sum gradients in other orders, which changes their last bits (6e-8)
and the coefficient of clipping; AdamW divides by the root of squares, which makes such a change of a small gradient
larger, and six steps add up. An engine that does not average, clip or step rightly is 1e-3 away or more: the plain
model, which averages nothing, shows this in its own row."""


@dataclass(frozen=True)
class Numbers:
    """Of some steps: the loss of every rank [step][rank], and the norm of the averaged gradients [step]."""

    losses: list[list[float]]
    norms: list[float]


def reference(shape: Shape, ranks: int, steps: int = STEPS) -> Numbers:
    """One process, the plain model, the average over the ranks' losses."""
    model = shape.model()
    optimizer = torch.optim.AdamW(model.parameters(), **adamw_options("default"))
    numbers = Numbers([], [])
    for step in range(steps):
        losses = []
        for rank in range(ranks):
            loss = loss_of(model, shape.tokens(step, rank, ranks))
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
