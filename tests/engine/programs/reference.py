"""The expected results of a program: the plain model with every rank's data, its gradients averaged over the ranks."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import nn

from tests.engine.programs.compare import note_terms
from tests.engine.programs.grammar import Model
from tests.engine.programs.model import DIM, Net


class Mismatch(Exception):
    """The sharded model is not what the plain one is. Raised on every rank alike."""


@dataclass(frozen=True)
class Place:
    """Where data belongs: no two places have the same."""

    step: int
    micro: int
    rank: int

    def x(self, slot: int = 0) -> torch.Tensor:
        """Values that bfloat16 holds exactly, so that casting early or late makes no difference."""
        seed = ((self.step * 16 + self.micro) * 16 + self.rank) * 16 + slot
        return torch.randn(3, DIM, generator=torch.Generator().manual_seed(seed)).bfloat16().float()


Gradients = list[torch.Tensor | None]


class Reference:
    """The plain model with every rank's data, its gradients averaged, those that are held kept apart."""

    def __init__(self, model: Net, spec: Model, world_size: int) -> None:
        self.model = model
        self.world_size = world_size
        self.compute = torch.bfloat16 if spec.precision == "bf16" else None
        self.held: Gradients = []
        self._work: Net | None = None

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def renew(self) -> None:
        """After parameters were replaced by others."""
        self._work = None
        self.held = []

    def work(self) -> Net:
        """A model to compute one rank's micro-batch on, with the weights in the compute dtype and no gradients."""
        if self._work is None:
            self._work = copy.deepcopy(self.model)
        for mine, q in zip(self._work.parameters(), self.model.parameters(), strict=True):
            mine.data = q.data.to(self.compute) if self.compute is not None else q.data
            mine.requires_grad_(q.requires_grad)
            mine.grad = None
        for mine_, theirs in zip(self._work.blocks, self.model.blocks, strict=True):
            mine_.bomb = theirs.bomb
        return self._work

    def x(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.compute is None else x.to(self.compute)

    def take_held(self) -> None:
        """Held gradients become part of the gradients: at the latest when an optimizer steps."""
        for q, g in zip(self.parameters, self.held, strict=bool(self.held)):
            if g is not None:
                q.grad = g if q.grad is None else q.grad + g
        self.held = []

    def add(self, harvests: list[Gradients], shown: list[bool]) -> None:
        """Take over one backward of every rank; of parameters that are not ``shown``, what is held grows by it."""
        parameters = self.parameters
        held = self.held or [None] * len(parameters)
        self.held = []
        for i, q in enumerate(parameters):
            there = [g for harvest in harvests if (g := harvest[i]) is not None]
            mean = sum(g.to(torch.float64) for g in there) / self.world_size if there else None
            total = held[i]
            note_terms(q, [g / self.world_size for g in there], fresh=q.grad is None and total is None)
            if mean is not None:
                mean = mean.to(q.dtype)
                total = mean if total is None else total + mean
            if shown[i] and total is not None:
                q.grad = total if q.grad is None else q.grad + total
                total = None
            self.held.append(total)
