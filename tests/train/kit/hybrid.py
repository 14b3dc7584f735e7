"""Small hybrid models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from shardwright.train.models.native.hybrid import (
    Hybrid,
    HybridConfig,
)

TINY = HybridConfig(
    dim=16, pattern="M*ME-", n_heads=2, n_kv_heads=1, head_dim=8, ffn_dim=24, vocab_size=50, max_seq_len=64,
    mamba_heads=4, mamba_head_dim=6, mamba_groups=2, mamba_state=5, chunk_size=8, n_experts=5, top_k=2, expert_dim=16,
    shared_dim=12, mtp_pattern="*E", tied_embeddings=True,
)  # fmt: skip


def tiny(seed: int = 0, **changes: object) -> Hybrid:
    torch.manual_seed(seed)
    return Hybrid(replace(TINY, **changes))  # type: ignore[arg-type]


def tokens(batch: int = 2, length: int = 16, seed: int = 1) -> torch.Tensor:
    return torch.randint(TINY.vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))


def whole_loss(model: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean over the tokens of cross-entropy and weighted extras."""
    logits, extras = model(inputs, extras=True)
    loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
    sums = Hybrid.auxiliary_sums(extras, targets)
    return loss + sum(model.auxiliary[name] * value for name, value in sums.items()) / targets.numel()
