"""Penalties of parameters in the loss of a micro-batch: terms, the way in which they are added, and a rank's weights.

In data-parallel training every rank has the whole parameter. So the reference computes each rank's penalty of the whole
plain model, and gradients are averaged over the ranks as all others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from tests.engine.programs.compare import full
from tests.engine.programs.grammar import Penalty

Term = Callable[[torch.Tensor], torch.Tensor]

TERMS: dict[str, Term] = {
    "L2": lambda p: (p**2).sum(),
    "L1": lambda p: p.abs().sum(),
    "mean": lambda p: p.pow(2).mean(),
    "sum": lambda p: p.sum(),
    "norm": lambda p: p.norm(),
    "norm 1": lambda p: torch.linalg.vector_norm(p, 1),
    "root": lambda p: (p * p).sum().add(0.1).sqrt(),
    "from start": lambda p: (0.5 * (p - 0.9 * p.detach()) ** 2).sum(),
    "weighted": lambda p: (p.detach().square() * p.square()).sum(),
    "over its norm": lambda p: (p / (p.norm() + 1)).square().sum(),
    "two at once": lambda p: p.mean() + (p**2).sum() - p.abs().mean(),
    "whole": lambda p: (full(p) ** 2).sum(),
    "log": lambda p: (p**2).sum().log1p(),
}


def sum_by_python(terms: Sequence[torch.Tensor]) -> torch.Tensor:
    return sum(terms)  # type: ignore[return-value]


def sum_in_place(terms: Sequence[torch.Tensor]) -> torch.Tensor:
    total = 0 + terms[0]  # a copy, of a sum that is not reduced yet
    for term in terms[1:]:
        total += term
    return total


def sum_scaled(terms: Sequence[torch.Tensor]) -> torch.Tensor:
    return sum((0.5 * term for term in terms), torch.zeros(()))


SUMS: dict[str, Callable[[Sequence[torch.Tensor]], torch.Tensor]] = {
    "python": sum_by_python,
    "in place": sum_in_place,
    "scaled": sum_scaled,
    "difference": lambda terms: terms[0] - sum(terms[1:]) if len(terms) > 1 else -terms[0],
}


def own(rank: int) -> float:
    """A factor of this rank alone."""
    return 0.2 * (rank + 1) ** 2


#: The loss and the penalty, weighed.
WEIGHTS: dict[str, Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]] = {
    "equal": lambda loss, penalty, rank: loss + 0.1 * penalty,
    "own": lambda loss, penalty, rank: loss + own(rank) * penalty,
    "own, right": lambda loss, penalty, rank: penalty * own(rank) + loss,
    "own tensor": lambda loss, penalty, rank: loss + torch.tensor(own(rank)) * penalty,
    "total": lambda loss, penalty, rank: (loss + 0.1 * penalty) * own(rank),
    "total divided": lambda loss, penalty, rank: (0.1 * penalty + loss) / (1 + rank),
    "subtracted": lambda loss, penalty, rank: loss - penalty / (2 + rank),
    "product": lambda loss, penalty, rank: loss * (1 + 0.01 * penalty),
    "of loss": lambda loss, penalty, rank: loss + loss.detach() * penalty,
    "zero on some": lambda loss, penalty, rank: loss + (0.1 if rank else 0.0) * penalty,
    "alpha": lambda loss, penalty, rank: torch.add(loss, penalty, alpha=0.1 * (rank + 1)),
    "twice": lambda loss, penalty, rank: loss + 0.1 * penalty + own(rank) * penalty,
    "squared": lambda loss, penalty, rank: loss + own(rank) * penalty**2,
    "alone": lambda loss, penalty, rank: own(rank) * penalty,
}


def penalise(loss: torch.Tensor, model: nn.Module, penalty: Penalty, rank: int) -> torch.Tensor:
    """The loss with the penalty of some of the model's trained parameters."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    chosen = list({i % len(parameters): None for i in penalty.which}) if parameters else []
    terms = [TERMS[penalty.term](parameters[i]) for i in chosen]
    if not terms or any(term.dtype != torch.float32 for term in terms):
        return loss
    return WEIGHTS[penalty.weight](loss, SUMS[penalty.sum](terms), rank)
