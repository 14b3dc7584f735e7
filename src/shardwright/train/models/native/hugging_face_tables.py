"""Hugging Face's names for the models here: where their checkpoints keep each tensor, and what config.json says.

Pure tables over shapes, one set for each kind of model: no file is read and no tensor made. `hugging_face` chooses
among them. docs/pretrained.md says which of these checkpoints other programs can read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwright.checkpoint.pretrained.names import Stacked, TensorSource, Transposed
from shardwright.train.config.catalog.presets import HybridConfig, LlamaConfig, RopeScaling
from shardwright.train.config.catalog.rope_tables import rope_tables
from shardwright.train.errors import UserError

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


def llama_config(shape: LlamaConfig) -> dict[str, Any]:
    rope: dict[str, Any] | None = None
    if shape.rope_scaling is not None:
        scaling = shape.rope_scaling
        rope = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_seq_len,
        }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.dim,
        "intermediate_size": shape.ffn_dim,
        "num_hidden_layers": shape.n_layers,
        "num_attention_heads": shape.n_heads,
        "num_key_value_heads": shape.n_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_seq_len,
        "rms_norm_eps": shape.norm_eps,
        "tie_word_embeddings": shape.tied_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        # Every version of transformers reads these two. A second table in `rope_parameters` could differ after an edit.
        "rope_theta": shape.rope_theta,
        "rope_scaling": rope,
    }


def hybrid_config(shape: HybridConfig) -> dict[str, Any]:
    ours_alone = "E" in shape.pattern or bool(shape.mtp_pattern) or shape.tied_embeddings
    config: dict[str, Any] = {
        "architectures": ["ShardwrightHybrid" if ours_alone else "NemotronHForCausalLM"],
        "model_type": "shardwright_hybrid" if ours_alone else "nemotron_h",
        "hidden_size": shape.dim,
        "hybrid_override_pattern": shape.pattern,
        "num_hidden_layers": len(shape.pattern),
        "num_attention_heads": shape.n_heads,
        "num_key_value_heads": shape.n_kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.ffn_dim,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_seq_len,
        "mamba_num_heads": shape.mamba_heads,
        "mamba_head_dim": shape.mamba_head_dim,
        "n_groups": shape.mamba_groups,
        "ssm_state_size": shape.mamba_state,
        "conv_kernel": shape.conv_width,
        "chunk_size": shape.chunk_size,
        "layer_norm_epsilon": shape.norm_eps,
        "tie_word_embeddings": shape.tied_embeddings,
        "mlp_hidden_act": "relu2",
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_min": 0.0,  # steps are not cut off below
    }
    if ours_alone:
        config |= {
            "n_routed_experts": shape.n_experts,
            "num_experts_per_tok": shape.top_k,
            "moe_intermediate_size": shape.expert_dim,
            "moe_shared_expert_intermediate_size": shape.shared_dim,
            "balance_weight": shape.balance_weight,
            "mtp_hybrid_override_pattern": shape.mtp_pattern,
            "mtp_weight": shape.mtp_weight,
        }
    return config


def _refuse_others(config: Mapping[str, Any], only: Mapping[str, Any]) -> None:
    for key, value in only.items():
        if config.get(key, value) != value:
            raise UserError(f"config.json: {key}: this model supports only {value!r}, found {config[key]!r}")


_ROPE_KEYS: dict[str, set[str]] = {
    "default": set(),
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
}


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The rotary table that all layers share."""
    try:
        tables = rope_tables(config)
    except ValueError as error:
        raise UserError(f"config.json: {error}") from error
    first = next(iter(tables.values()), {})
    if other := next((name for name, table in tables.items() if table != first), None):
        raise UserError(
            f"config.json: expected one rotary table for all layers, found another one for {other}; this model "
            "supports one"
        )
    return {key: value for key, value in first.items() if (key, value) != ("partial_rotary_factor", 1)}


def llama_shape(config: Mapping[str, Any]) -> LlamaConfig:
    _refuse_others(config, {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False})
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
    scaling = None
    if kind == "llama3":
        scaling = RopeScaling(
            rope["factor"],
            rope["low_freq_factor"],
            rope["high_freq_factor"],
            rope["original_max_position_embeddings"],
        )
    return LlamaConfig(
        dim=dim,
        n_layers=config["num_hidden_layers"],
        n_heads=heads,
        n_kv_heads=config.get("num_key_value_heads") or heads,
        ffn_dim=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        max_seq_len=config["max_position_embeddings"],
        # 10,000 is what transformers takes where nothing is said.
        rope_theta=rope.get("rope_theta") or 10_000.0,
        rope_scaling=scaling,
        tied_embeddings=config.get("tie_word_embeddings", False),
        norm_eps=config.get("rms_norm_eps", 1e-6),
    )


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
    more: dict[str, Any] = {}
    if ours:
        more = {
            "n_experts": config["n_routed_experts"],
            "top_k": config["num_experts_per_tok"],
            "expert_dim": config["moe_intermediate_size"],
            "shared_dim": config["moe_shared_expert_intermediate_size"],
            "balance_weight": config["balance_weight"],
            "mtp_pattern": config["mtp_hybrid_override_pattern"],
            "mtp_weight": config["mtp_weight"],
        }
    return HybridConfig(
        dim=config["hidden_size"],
        pattern=pattern,
        n_heads=config["num_attention_heads"],
        n_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        ffn_dim=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        max_seq_len=config["max_position_embeddings"],
        mamba_heads=config["mamba_num_heads"],
        mamba_head_dim=config["mamba_head_dim"],
        mamba_groups=config["n_groups"],
        mamba_state=config["ssm_state_size"],
        conv_width=config["conv_kernel"],
        chunk_size=config["chunk_size"],
        tied_embeddings=config.get("tie_word_embeddings", False),
        norm_eps=config.get("layer_norm_epsilon", 1e-5),
        **more,
    )
