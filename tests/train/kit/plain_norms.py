"""Gradient norms of a plain model, beside which jobs are. Nothing here shards."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from shardwright.train.config import Config
from shardwright.train.finetune.adapters import adapt
from shardwright.train.models.build import build_model
from tests.train.kit.text import batch, random_text


def plain_norms(config: Config) -> dict[str, float]:
    """The gradient norms of the blocks of a plain model in the first step."""
    torch.manual_seed(config.run.seed)
    model, train = build_model(config.model, 256), config.train
    adapt(model, config.finetune, config.run.seed)
    inputs, targets = batch(random_text(), 0, 0, train.global_batch, train.seq_len)
    F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
    norms: dict[str, list[float]] = {}
    for name, p in model.named_parameters():
        if name.startswith("layers.") and p.grad is not None:
            norms.setdefault(".".join(name.split(".")[:2]), []).append(p.grad.norm().item())
    return {unit: math.hypot(*each) for unit, each in norms.items()}
