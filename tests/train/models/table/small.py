"""Small configurations of every causal language model of transformers, made from the default one of each type.

A type whose sizes depend on one another has its numbers in `OWN`. Nothing here trains.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwright.train.models.hf.documents import unnoticed
from tests.train.models.kit.architectures import ARCHITECTURES, SIZES

#: The most that a number of a default configuration may be, by its key.
MOST: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embed_dim", "word_embed_proj_dim", "dim_model"), 32),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "n_inner", "d_ff", "ffn_hidden_size", "moe_intermediate_size",
         "intermediate_size_mlp", "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size",
         "block_ff_dim", "shared_intermediate_size", "expert_ffn_hidden_size", "lru_width", "decoder_ffn_dim"), 32,
    ),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "n_layer", "n_layers", "num_hidden_layers",
         "num_layers", "decoder_layers", "decoder_attention_heads"), 4,
    ),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "multi_query_group_num"), 2),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token", "moe_top_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts", "num_shared_experts"), 1),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "head_dim", "v_head_dim", "index_head_dim"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "index_n_heads"), 4),
    **dict.fromkeys(("sliding_window", "attention_window_size", "attention_chunk_size", "index_topk", "chunk_size"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 64),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size"), 256),
}  # fmt: skip
#: Keys of a type beside those of `MOST`.
OWN: dict[str, dict[str, Any]] = {
    **ARCHITECTURES,
    "gpt_oss": {**SIZES, "head_dim": 8, "sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "llama4_text": {
        **SIZES, "head_dim": 8, "num_local_experts": 2, "intermediate_size_mlp": 32, "attention_chunk_size": 8,
    },
    "gpt_neo": {
        "hidden_size": 16, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]],
        "window_size": 8,
    },
    "lfm2_moe": {"num_dense_layers": 1, "layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "topk_method": "greedy"},
    "granitemoehybrid": {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_chunk_size": 8},
    "gemma3n_text": {
        "hidden_size": 32, "num_hidden_layers": 4, "intermediate_size": [32] * 4, "num_kv_shared_layers": 0,
        "activation_sparsity_pattern": [0.0] * 4, "hidden_size_per_layer_input": 8, "laurel_rank": 4,
    },
    "gemma4_text": {"hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "ministral": {"head_dim": 8},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "codegen": {"rotary_dim": 4, "n_embd": 64},
    "gptj": {"rotary_dim": 4, "n_embd": 64},
    "axk1": {"head_dim": 4},
    "bailing_hybrid": {"n_group": 1, "topk_group": 1},
    "cohere_compass_text": {
        "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in ("sliding_attention", "full_attention")
        },
    },
    "dbrx": {
        "d_model": 32, "n_heads": 4, "n_layers": 2, "ffn_config": {
            "ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2,
        }, "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
    },
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "dots3_note_text": {"per_layer_config": {}, "shared_experts_intermediate_size": 32},
    "longcat_flash": {
        "ffn_hidden_size": 32, "expert_ffn_hidden_size": 32, "num_layers": 2, "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4, "head_dim": 4,
    },
    "reformer": {"is_decoder": True},
    "zamba2": {"layer_types": ["mamba", "mamba", "hybrid", "mamba"]},
}  # fmt: skip
#: Words of keys whose numbers above 0 draw random numbers in training.
_DRAWS = ("drop", "jitter", "noise")


def causal_types() -> list[str]:
    """The types of which transformers has a causal language model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))


def small_config(kind: str) -> Any:
    """A configuration of a type with a model of some ten thousand parameters.

    Raises:
        ValueError: none of the ways to make one ends in such a model; with the reason of the last.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    of = CONFIG_MAPPING[kind]
    failure: Exception = ValueError("no configuration")
    for own in ([OWN[kind]] if kind in OWN else []) + [{}]:
        for complete in (False, True):
            try:
                config = of(**_small(of, own, complete))
                _check(config)
            except Exception as error:  # of code that is not ours: no model has these sizes
                failure = error
            else:
                return config
    raise ValueError(" ".join(f"{type(failure).__name__}: {failure}".split())) from failure


def _small(of: Any, own: dict[str, Any], complete: bool) -> dict[str, Any]:
    """The keys of a small configuration. `complete`: also those that the default one has from its constructor alone."""
    try:
        values = of().to_dict()
    except Exception:  # of code that is not ours: this type has no default
        values = {name: p.default for name, p in inspect.signature(of).parameters.items()}
    if own is OWN.get(getattr(of, "model_type", "")) and {"vocab_size"} <= own.keys():
        small = dict(own)
    else:
        small = _less(values) | own
    for key, value in values.items():
        if (
            any(word in key for word in _DRAWS)
            and isinstance(value, float)
            and not key.startswith("classifier")
        ):
            small.setdefault(key, 0.0)
    if complete:
        small = {**_plain(values), **small}
    return small


def _less(values: dict[str, Any]) -> dict[str, Any]:
    small: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and "model_type" in value:
            small[key] = {**_less(value), "model_type": value["model_type"]}
        elif key.endswith("_token_id") and isinstance(value, int):
            small[key] = min(value, 2)
        elif isinstance(value, int) and not isinstance(value, bool) and key in MOST:
            small[key] = min(value, MOST[key])
        elif value is None and key in ("head_dim", "sliding_window"):
            continue
    if "kv_lora_rank" in values and "num_attention_heads" in small:  # latent attention has keys for each head
        small["num_key_value_heads"] = small["num_attention_heads"]
    if "index_head_dim" in values:
        small |= {"index_head_dim": 8, "qk_rope_head_dim": 4}
    return small


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """Return the keys that a constructor takes: no lists by layer, which follow from the number of layers."""
    left_out = ("model_type", "dtype", "transformers_version", "per_layer_config")
    return {k: v for k, v in values.items() if k not in left_out and not isinstance(v, list)}


def _check(config: Any) -> None:
    """Raise an error unless there is such a model, it is small, and its forward runs."""
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in model_of_config(config).parameters())
    if count > 15_000_000:
        raise ValueError(f"it would have {count:,} parameters")
    with torch.no_grad():
        logits = model_of_config(config)(input_ids=torch.arange(3, 19)[None], use_cache=False).logits
    if not logits.isfinite().all():
        raise ValueError("its logits are not finite")


def model_of_config(config: Any) -> Any:
    """Make the model of a configuration."""
    import transformers

    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def save_config(config: Any, folder: Path) -> None:
    """Write the config.json of a model, as transformers does beside weights."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    classes = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    config.architectures = [(classes[0] if isinstance(classes, tuple) else classes).__name__]
    config.save_pretrained(folder)


def save_small(kind: str, folder: Path) -> None:
    """Write the config.json and random weights of a small model of a type, as transformers does.

    Raises:
        ValueError: there is none.
    """
    with unnoticed():
        config = small_config(kind)
        torch.manual_seed(0)
        model = model_of_config(config)
        for parameter in model.parameters():  # norms and biases are not constant, and layers matter
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.05)
            elif parameter.is_floating_point():
                parameter.data.add_(0.05 * torch.randn_like(parameter))
        model.save_pretrained(folder)
