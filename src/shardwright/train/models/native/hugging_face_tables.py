"""Hugging Face's names for the models here: where their checkpoints keep each tensor, and what config.json says.

Pure tables over shapes, one set for each kind of model: no file is read and no tensor made. `hugging_face` chooses
among them. docs/pretrained.md says which of these checkpoints other programs can read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwright.checkpoint import Stacked, TensorSource, Transposed
from shardwright.train.config.shapes.presets import HybridConfig, LlamaConfig, RopeScaling
from shardwright.train.config.shapes.rope_tables import rope_tables
from shardwright.train.errors import UserError, as_user_errors

_ATTENTION = {"wq": "q_proj", "wk": "k_proj", "wv": "v_proj", "wo": "o_proj"}
_MLP = {"up": "up_proj", "down": "down_proj"}
_MAMBA = {
    "in_proj.weight": "in_proj.weight",
    "conv_weight": "conv1d.weight",
    "conv_bias": "conv1d.bias",
    "dt_bias": "dt_bias",
    "a_log": "A_log",
    "skip": "D",
    "norm_weight": "norm.weight",
    "out_proj.weight": "out_proj.weight",
}


def llama_keys(shape: LlamaConfig) -> dict[str, TensorSource | None]:
    names: dict[str, TensorSource | None] = {
        "tok_embeddings.weight": "model.embed_tokens.weight",
        "norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
    block = {
        **{f"attention.{ours}": f"self_attn.{theirs}" for ours, theirs in _ATTENTION.items()},
        "feed_forward.w1": "mlp.gate_proj",
        "feed_forward.w2": "mlp.down_proj",
        "feed_forward.w3": "mlp.up_proj",
        "attention_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
    }
    for number in range(shape.n_layers):
        for ours, theirs in block.items():
            names[f"layers.{number}.{ours}.weight"] = f"model.layers.{number}.{theirs}.weight"
    return names


def hybrid_keys(shape: HybridConfig) -> dict[str, TensorSource | None]:
    names: dict[str, TensorSource | None] = {
        "tok_embeddings.weight": "backbone.embeddings.weight",
        "norm.weight": "backbone.norm_f.weight",
        "output.weight": "lm_head.weight",
    }
    layers = [(f"layers.{i}", f"backbone.layers.{i}", kind) for i, kind in enumerate(shape.pattern)]
    if shape.mtp_pattern:
        for name in ("stream_norm", "token_norm", "proj", "norm"):
            names[f"mtp.{name}.weight"] = f"mtp.{name}.weight"
        layers += [(f"mtp.layers.{i}", f"mtp.layers.{i}", kind) for i, kind in enumerate(shape.mtp_pattern)]
    for ours, theirs, kind in layers:
        names[f"{ours}.norm.weight"] = f"{theirs}.norm.weight"
        for name, source in _mixer(shape, kind, f"{theirs}.mixer").items():
            names[f"{ours}.mixer.{name}"] = source
    return names


def _mixer(shape: HybridConfig, kind: str, prefix: str) -> dict[str, TensorSource]:
    if kind == "M":
        return {ours: f"{prefix}.{theirs}" for ours, theirs in _MAMBA.items()}
    if kind == "*":
        return {f"{ours}.weight": f"{prefix}.{theirs}.weight" for ours, theirs in _ATTENTION.items()}
    if kind == "-":
        return {f"{ours}.weight": f"{prefix}.{theirs}.weight" for ours, theirs in _MLP.items()}
    names: dict[str, TensorSource] = {"router.weight": f"{prefix}.gate.weight"}
    for ours, theirs in _MLP.items():
        # One linear layer for each expert there, whose weights are [outputs, inputs].
        experts = (f"{prefix}.experts.{e}.{theirs}.weight" for e in range(shape.n_experts))
        names[ours] = Stacked(tuple(Transposed(key) for key in experts))
        if shape.shared_dim:
            names[f"shared.{ours}.weight"] = f"{prefix}.shared_experts.{theirs}.weight"
    return names


# -- config.json -------------------------------------------------------------------------------------------------------


#: The keys of config.json by the fields of a shape, for shapes in both directions.
_LLAMA = {
    "dim": "hidden_size",
    "ffn_dim": "intermediate_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "vocab_size": "vocab_size",
    "max_seq_len": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "tied_embeddings": "tie_word_embeddings",
}
_ROPE_SCALING = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_seq_len": "original_max_position_embeddings",
}
_HYBRID = {
    "dim": "hidden_size",
    "pattern": "hybrid_override_pattern",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn_dim": "intermediate_size",
    "vocab_size": "vocab_size",
    "max_seq_len": "max_position_embeddings",
    "mamba_heads": "mamba_num_heads",
    "mamba_head_dim": "mamba_head_dim",
    "mamba_groups": "n_groups",
    "mamba_state": "ssm_state_size",
    "conv_width": "conv_kernel",
    "chunk_size": "chunk_size",
    "norm_eps": "layer_norm_epsilon",
    "tied_embeddings": "tie_word_embeddings",
}
#: Keys of hybrids alone: no other model on the hub has these parts.
_OURS_ALONE = {
    "n_experts": "n_routed_experts",
    "top_k": "num_experts_per_tok",
    "expert_dim": "moe_intermediate_size",
    "shared_dim": "moe_shared_expert_intermediate_size",
    "balance_weight": "balance_weight",
    "mtp_pattern": "mtp_hybrid_override_pattern",
    "mtp_weight": "mtp_weight",
}
#: Values that every Llama here has.
_ONLY_LLAMA = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}


def _keys_of(shape: object, names: Mapping[str, str]) -> dict[str, Any]:
    return {theirs: getattr(shape, ours) for ours, theirs in names.items()}


def _fields_of(config: Mapping[str, Any], names: Mapping[str, str], **defaults: Any) -> dict[str, Any]:
    """Raises KeyError for a key that config.json lacks, unless there is a default for its field."""
    return {
        ours: defaults[ours] if ours in defaults and theirs not in config else config[theirs]
        for ours, theirs in names.items()
    }


def llama_config(shape: LlamaConfig) -> dict[str, Any]:
    rope: dict[str, Any] | None = None
    if shape.rope_scaling is not None:
        rope = {"rope_type": "llama3", **_keys_of(shape.rope_scaling, _ROPE_SCALING)}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **_keys_of(shape, _LLAMA),
        "head_dim": shape.head_dim,
        **_ONLY_LLAMA,
        # Every version of transformers reads these two. A second table in `rope_parameters` could differ after an edit.
        "rope_theta": shape.rope_theta,
        "rope_scaling": rope,
    }


def hybrid_config(shape: HybridConfig) -> dict[str, Any]:
    ours_alone = "E" in shape.pattern or bool(shape.mtp_pattern) or shape.tied_embeddings
    config: dict[str, Any] = {
        "architectures": ["ShardwrightHybrid" if ours_alone else "NemotronHForCausalLM"],
        "model_type": "shardwright_hybrid" if ours_alone else "nemotron_h",
        **_keys_of(shape, _HYBRID),
        "num_hidden_layers": len(shape.pattern),
        "mlp_hidden_act": "relu2",
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_min": 0.0,  # steps are not cut off below
    }
    return config | _keys_of(shape, _OURS_ALONE) if ours_alone else config


def _refuse_others(config: Mapping[str, Any], only: Mapping[str, Any]) -> None:
    for key, value in only.items():
        if config.get(key, value) != value:
            raise UserError(f"config.json: {key}: this model supports only {value!r}, found {config[key]!r}")


_ROPE_KEYS: dict[str, set[str]] = {
    "default": set(),
    "llama3": set(_ROPE_SCALING.values()),
}


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the rotary table that all layers share."""
    with as_user_errors(ValueError, prefix="config.json: "):
        tables = rope_tables(config)
    first = next(iter(tables.values()), {})
    if other := next((name for name, table in tables.items() if table != first), None):
        raise UserError(
            f"config.json: expected one rotary table for all layers, found another one for {other}; this model "
            "supports one"
        )
    return {key: value for key, value in first.items() if (key, value) != ("partial_rotary_factor", 1)}


def llama_shape(config: Mapping[str, Any]) -> LlamaConfig:
    _refuse_others(config, _ONLY_LLAMA)
    heads, dim = config["num_attention_heads"], config["hidden_size"]
    if (config.get("head_dim") or dim // heads) != dim // heads:
        raise UserError(
            f"config.json: head_dim: this model supports only hidden_size / num_attention_heads = {dim // heads}, "
            f"found {config['head_dim']}"
        )
    rope = _rope(config)
    kind = rope.get("rope_type", "default")
    if kind not in _ROPE_KEYS:
        raise UserError(f"config.json: rope_type: expected default or llama3, found {kind!r}")
    if more := sorted(rope.keys() - _ROPE_KEYS[kind] - {"rope_type", "rope_theta"}):
        raise UserError(
            f"config.json: expected a rotary table of rope_type {kind!r} without {more[0]}, which this model does not "
            f"support, found {more[0]} = {rope[more[0]]!r}"
        )
    return LlamaConfig(
        **_fields_of({**config, "num_key_value_heads": config.get("num_key_value_heads") or heads}, _LLAMA,
                     tied_embeddings=False, norm_eps=1e-6),
        # 10,000 is what transformers takes where nothing is said.
        rope_theta=rope.get("rope_theta") or 10_000.0,
        rope_scaling=RopeScaling(**_fields_of(rope, _ROPE_SCALING)) if kind == "llama3" else None,
    )  # fmt: skip


#: Letters for transformers' ``layers_block_type``, in its older and newer words.
_KINDS = {
    "mamba": "M",
    "linear_attention": "M",
    "attention": "*",
    "full_attention": "*",
    "moe": "E",
    "mlp": "-",
}


def _pattern(config: Mapping[str, Any]) -> str:
    if "hybrid_override_pattern" in config:
        return str(config["hybrid_override_pattern"])
    return "".join(_KINDS[kind] for kind in config["layers_block_type"])


def hybrid_shape(config: Mapping[str, Any]) -> HybridConfig:
    only = {
        "mlp_hidden_act": "relu2",
        "mamba_hidden_act": "silu",
        "use_bias": False,
        "use_conv_bias": True,
        "mlp_bias": False,
        "attention_bias": False,
        "mamba_proj_bias": False,
    }
    _refuse_others(config, only)
    pattern, ours = _pattern(config), config["model_type"] == "shardwright_hybrid"
    if not ours and ("E" in pattern or config.get("num_nextn_predict_layers")):
        raise UserError(
            "config.json: Nemotron-H routes to experts by sigmoid scores with a bias, and has a different head for "
            f"further tokens; this model supports neither. Expected a pattern of only M, * and -, found {pattern!r} "
            f"with num_nextn_predict_layers {config.get('num_nextn_predict_layers', 0)}"
        )
    names = _HYBRID | _OURS_ALONE if ours else _HYBRID
    values = {**config, "hybrid_override_pattern": pattern}
    return HybridConfig(**_fields_of(values, names, tied_embeddings=False, norm_eps=1e-5))
