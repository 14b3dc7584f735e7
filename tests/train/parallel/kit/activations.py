"""Kinds of models with recomputed activations."""

from __future__ import annotations

from typing import Any

KINDS: dict[str, dict[str, Any]] = {
    "llama": {"n_layers": 4},
    "hybrid": {
        "kind": "hybrid", "n_layers": None, "n_heads": 2, "n_kv_heads": 1, "head_dim": 16, "pattern": "M*E-",
        "mtp_pattern": "*", "mamba_heads": 4, "mamba_head_dim": 16, "mamba_groups": 2, "mamba_state": 8, "n_experts": 4,
        "expert_dim": 32, "shared_dim": 32,
    },
}  # fmt: skip
