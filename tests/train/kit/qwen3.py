"""A model of transformers as a config.json alone, in its real size and in a small one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

#: Sizes of Qwen3 8B, from the config.json of its publisher.
QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12_288,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 151_936, "max_position_embeddings": 40_960, "rope_theta": 1_000_000, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False, "attention_bias": False, "hidden_act": "silu",
}  # fmt: skip
SMALL_QWEN3 = QWEN3_8B | {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 259, "max_position_embeddings": 128,
}  # fmt: skip


def folder_of_model(values: dict[str, Any], folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    return folder
