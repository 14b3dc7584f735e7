"""`[parallel] tensor` and `expert` of the hybrid model, against plain PyTorch on the whole global batch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from shardwright.train import checkpoint, parallel
from shardwright.train.config import Config
from shardwright.train.data import batch
from shardwright.train.errors import UserError
from shardwright.train.loop import Trainer
from shardwright.train.models.build import build_model
from shardwright.train.models.hybrid import Hybrid
from tests.support.pool import multirank
from tests.train.jobs import tiny
from tests.train.test_hybrid import whole_loss
from tests.train.test_parallel import corpus, take_steps
from tests.train.test_tensor_parallel import trainer

MODEL: dict[str, Any] = {
    "kind": "hybrid", "pattern": "ME*-", "mtp_pattern": "ME", "dim": 32, "n_layers": None, "n_heads": 4,
    "n_kv_heads": 4, "head_dim": 8, "ffn_dim": 64, "mamba_heads": 4, "mamba_head_dim": 8, "mamba_groups": 2,
    "mamba_state": 6, "chunk_size": 16, "n_experts": 4, "top_k": 2, "expert_dim": 32, "shared_dim": 24,
    "max_seq_len": 64, "tied_embeddings": True, "balance_weight": 0.1,
}  # fmt: skip


def job(model: dict[str, Any] | None = None, train: dict[str, Any] | None = None, **options: Any) -> Config:
    return tiny(
        model={**MODEL, **(model or {})},
        train={"micro_batch": 1, "global_batch": 8, "max_norm": 0.2, **(train or {})},
        parallel={"engine": "shardwright", **options},
    )


def plain_model(config: Config) -> Hybrid:
    torch.manual_seed(config.run.seed)
    model = build_model(config.model, 256)
    assert isinstance(model, Hybrid)
    return model


def gradients(mine: Trainer) -> dict[str, torch.Tensor]:
    """Whole ones of the job's next step, which is not taken."""
    batches = [tensor for number in range(mine.micro_batches) for tensor in mine._micro_batch(number)]
    with parallel.parallel_loss(mine.config.parallel):
        mine.work(*batches)
    found = {}
    for name, p in mine.model.named_parameters():
        assert p.grad is not None, name
        found[name] = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad.clone()
    mine.optimizer.zero_grad()
    return found


@multirank(4)
@pytest.mark.parametrize(
    "options",
    [{"tensor": 2}, {"tensor": 4}, {"expert": 2}, {"expert": 4}, {"tensor": 2, "model": {"mamba_groups": 1}}],
    ids=lambda options: "-".join(f"{key} {value}" for key, value in options.items()),
)
def test_steps_equal_plain_ones(rank: int, world_size: int, options: dict[str, Any]) -> None:
    config = job(**options)
    plain = plain_model(config)
    mine = trainer(config, rank, world_size)
    whole_loss(plain, *batch(mine.corpus, 0, 0, 8, 32)).backward()
    found = gradients(mine)
    for name, p in plain.named_parameters():
        assert p.grad is not None
        error = (found[name] - p.grad).norm() / p.grad.norm()
        if rank==0: print(name, float(error), float(p.grad.norm()))
        assert error < 1e-4, name
