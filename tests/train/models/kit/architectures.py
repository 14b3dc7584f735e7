"""Small models of transformers: the arguments of their configurations, and folders with random weights."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn

SIZES: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
_HEADS = {**SIZES, "head_dim": 8}
_LATENT = {
    "first_k_dense_replace": 1, "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_group": 1, "topk_group": 1, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
    "v_head_dim": 4, "num_key_value_heads": 4,
}  # fmt: skip
_MAMBA = {
    "hidden_size": 16, "num_hidden_layers": 3, "vocab_size": 256, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip

#: By model type.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "qwen2": SIZES,
    "qwen3": _HEADS,
    "mistral": {**SIZES, "sliding_window": 8},
    "gemma2": {**_HEADS, "sliding_window": 8},
    "gemma3_text": {**_HEADS, "sliding_window": 8},
    "gpt2": {
        "n_embd": 16, "n_layer": 3, "n_head": 4, "vocab_size": 256, "n_positions": 64, "bos_token_id": 1,
        "eos_token_id": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    },
    "gpt_neox": SIZES,
    "phi3": SIZES,
    "olmo2": SIZES,
    "mixtral": {**SIZES, "num_local_experts": 4},
    "qwen3_moe": {**_HEADS, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {**SIZES, **_LATENT},
    "mamba": {**_MAMBA, "state_size": 4},
    "mamba2": {**_MAMBA, "state_size": 8, "num_heads": 4, "head_dim": 8, "n_groups": 2, "chunk_size": 8},
    "jamba": {
        **SIZES, "num_experts": 4, "mamba_d_state": 4, "attn_layer_period": 2, "attn_layer_offset": 1,
        "expert_layer_period": 2, "expert_layer_offset": 1,
    },
    "bamba": {
        **SIZES, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "attn_layer_indices": [1],
        "mamba_chunk_size": 8,
    },
    "nemotron_h": {
        **SIZES, "mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 8, "chunk_size": 8,
        "layers_block_type": ["mamba", "attention", "mlp"],
    },
    "falcon": {
        "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 256, "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "ernie4_5_moe": {
        **SIZES, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_layer_start_index": 1,
        "moe_num_shared_experts": 1,
    },
    "opt": {
        "hidden_size": 16, "ffn_dim": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 256,
        "word_embed_proj_dim": 16, "max_position_embeddings": 64, "dropout": 0.0,
    },
}  # fmt: skip


def made(kind: str, **changes: Any) -> Any:
    """The model of transformers, in training."""
    import transformers

    logging.getLogger("transformers").setLevel(logging.ERROR)
    config = transformers.AutoConfig.for_model(kind, **{**ARCHITECTURES.get(kind, SIZES), **changes})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():  # norms and biases are not constant, and layers matter
        nn.init.normal_(parameter, std=0.05) if parameter.ndim > 1 else parameter.data.add_(
            0.05 * torch.randn_like(parameter)
        )
    return model


def folder_with(kind: str, folder: Path, **changes: Any) -> Path:
    """A folder with config.json and weights, as transformers saves them."""
    made(kind, **changes).save_pretrained(folder)
    return folder


def reloaded(folder: Path) -> Any:
    """As a user of transformers loads it: every tensor is there, and none is left over."""
    import transformers

    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values()), info
    return model
