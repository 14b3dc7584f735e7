"""Optimizers."""

from __future__ import annotations

from typing import Any

import torch

import shardwright as sw

OPTIMIZERS: dict[str, Any] = {
    "torch-Muon": lambda model: torch.optim.Muon(model.parameters(), lr=0.1),
    "Muon": lambda model: sw.Muon(model.named_parameters(), lr=0.1, adamw={"lr": 0.01}),
    "Adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=0.1),
}
