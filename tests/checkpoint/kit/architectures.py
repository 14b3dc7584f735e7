"""Small models of transformers, of many architectures, and how they are sharded."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import shardwright as sw

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 40,
}
DECODER = dict(SIZES, num_key_value_heads=2)
IMAGES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
EXPERTS = dict(DECODER, moe_intermediate_size=12, num_experts=4, num_experts_per_tok=2, head_dim=8)
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}
GROUPS = {
    "moe_intermediate_size": 12,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}
LINEAR = {
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
}
LAYERS = ["linear_attention", "full_attention"]
MARIAN = {"layers": 1, "ffn_dim": 24, "attention_heads": 4}
CAUSAL, IMAGE = "AutoModelForCausalLM", "AutoModelForImageClassification"

#: transformers' configuration class, its arguments, and what makes the model.
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "gpt_neox": ("GPTNeoXConfig", SIZES, CAUSAL),
    "vit": ("ViTConfig", dict(IMAGES, image_size=8, patch_size=4), IMAGE),
    "swin": (
        "SwinConfig",
        {
            "image_size": 16,
            "patch_size": 2,
            "embed_dim": 8,
            "depths": [1, 1],
            "num_heads": [2, 2],
            "window_size": 2,
        },
        IMAGE,
    ),
    "mixtral": ("MixtralConfig", dict(DECODER, num_local_experts=4), CAUSAL),
    "qwen3_moe": ("Qwen3MoeConfig", EXPERTS, CAUSAL),
    "deepseek_v3": ("DeepseekV3Config", dict(DECODER, first_k_dense_replace=1, **GROUPS, **LATENT), CAUSAL),
    "qwen3_next": (
        "Qwen3NextConfig",
        dict(EXPERTS, shared_expert_intermediate_size=12, layer_types=LAYERS, **LINEAR),
        CAUSAL,
    ),
    "llama": ("LlamaConfig", DECODER, CAUSAL),
    "gpt2": (
        "GPT2Config",
        {"n_embd": 16, "n_layer": 2, "n_head": 4, "vocab_size": 40, "n_positions": 32},
        CAUSAL,
    ),
    "bert": ("BertConfig", SIZES, "AutoModelForMaskedLM"),
    "t5": (
        "T5Config",
        {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4, "vocab_size": 40},
        "AutoModelForSeq2SeqLM",
    ),
    "qwen2": ("Qwen2Config", DECODER, CAUSAL),
    "gemma": ("GemmaConfig", dict(DECODER, head_dim=8), CAUSAL),
}


def make(name: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    kind, arguments, auto = MODELS[name]
    return getattr(transformers, auto).from_config(getattr(transformers, kind)(**arguments))


def shard(model: nn.Module, **options: Any) -> nn.Module:
    for module in reversed(list(model.modules())):
        if type(module).__name__.endswith(("Layer", "Block", "Model")) and any(
            True for _ in module.parameters()
        ):
            sw.fully_shard(module, **options)
    return model if isinstance(model, sw.FSDPModule) else sw.fully_shard(model, **options)
