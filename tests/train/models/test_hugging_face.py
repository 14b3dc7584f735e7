"""Hugging Face names: transformers reads what is written here, with the same logits, and the other way round."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwright as sw
from shardwright.checkpoint import open_stored
from shardwright.train.config.shapes.presets import (
    HYBRID_PRESETS,
    PRESETS,
    HybridConfig,
    LlamaConfig,
    RopeScaling,
)
from shardwright.train.errors import UserError
from shardwright.train.models import hugging_face
from shardwright.train.models.build import model_of
from tests.support import multirank, world_mesh

LLAMA = LlamaConfig(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=48, vocab_size=64, max_seq_len=64)
HYBRID = HybridConfig(
    dim=32, pattern="M*-M", n_heads=4, n_kv_heads=2, head_dim=16, ffn_dim=48, vocab_size=64, max_seq_len=64,
    mamba_heads=4, mamba_head_dim=16, mamba_groups=2, mamba_state=16, chunk_size=16,
)  # fmt: skip
#: With what Nemotron-H does not have.
OURS = replace(
    HYBRID,
    pattern="ME*-",
    mtp_pattern="*E",
    tied_embeddings=True,
    n_experts=4,
    expert_dim=24,
    shared_dim=16,
)
KNOWN_ELSEWHERE = {
    "llama": LLAMA,
    "tied": replace(LLAMA, tied_embeddings=True),
    "scaled": replace(LLAMA, rope_scaling=RopeScaling(factor=4.0, original_max_seq_len=16), rope_theta=100.0),
    "hybrid": HYBRID,
}


def drawn(shape: LlamaConfig | HybridConfig, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return model_of(shape)


def saved(model: Any, path: Path, **options: Any) -> Path:
    shape = model.config
    sw.save_pretrained(
        model, path, key_map=hugging_face.key_map(shape), config=hugging_face.config_json(shape), **options
    )
    return path


@pytest.mark.parametrize("name", list(KNOWN_ELSEWHERE))
def test_transformers_reads_it_and_is_read(tmp_path: Path, name: str) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers, to compare with")
    model = drawn(KNOWN_ELSEWHERE[name])
    tokens = torch.randint(0, 64, (2, 40))
    logits = model(tokens)
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
        saved(model, tmp_path / "ours", max_shard_size="8 KB"), output_loading_info=True, dtype=torch.float32
    )
    assert not any(info.values()), info
    # The scan's sums are in another order there.
    close = {"rtol": 0, "atol": 1e-5} if name == "hybrid" else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(theirs(tokens).logits, logits, **close)
    theirs.save_pretrained(tmp_path / "theirs")
    shape = hugging_face.shape_of(json.loads((tmp_path / "theirs" / "config.json").read_text()))
    assert shape == KNOWN_ELSEWHERE[name]
    other = drawn(shape, seed=1)
    sw.load_pretrained(other, tmp_path / "theirs", key_map=hugging_face.key_map(shape))
    assert torch.equal(other(tokens), logits)


@multirank(3)
@pytest.mark.parametrize("name", ["tied", "ours"])
def test_sharded_models_write_and_read_the_same_names(
    rank: int, world_size: int, name: str, tmp_path: Path
) -> None:
    shape = {**KNOWN_ELSEWHERE, "ours": OURS}[name]
    options = {"mesh": world_mesh(3), "layout": "ragged" if name == "ours" else "per_parameter"}

    def sharded(model: Any) -> Any:
        for block in model.blocks():
            sw.fully_shard(block, **options)
        sw.fully_shard(model.head(), **options)
        return sw.fully_shard(model, **options)

    plain = drawn(shape)
    saved(sharded(drawn(shape)), tmp_path / "saved")
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert hugging_face.shape_of(config) == shape
    with sw.deferred_init():
        torch.manual_seed(7)
        model = model_of(shape)
    sw.load_pretrained(sharded(model), tmp_path / "saved", key_map=hugging_face.key_map(shape))
    sw.materialize(model)  # rotary tables
    for (key, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.full_tensor(), q), key
    tokens = torch.randint(0, 64, (1, 9), generator=torch.Generator().manual_seed(rank))
    torch.testing.assert_close(model(tokens), plain(tokens))
    if name == "ours":
        stored = open_stored(tmp_path / "saved")
        expert = stored["backbone.layers.1.mixer.experts.3.up_proj.weight"].view()
        assert torch.equal(expert, plain.layers[1].mixer.up[3].T)
        assert "lm_head.weight" not in stored and "mtp.proj.weight" in stored


@pytest.mark.parametrize("shape", [*PRESETS.values(), *HYBRID_PRESETS.values(), OURS])
def test_every_preset_has_names_for_all_its_tensors(shape: LlamaConfig | HybridConfig) -> None:
    with torch.device("meta"):
        names = {name for name, _ in model_of(shape).named_parameters(remove_duplicate=False)}
    assert set(hugging_face.key_map(shape)) == names
    assert hugging_face.shape_of(json.loads(json.dumps(hugging_face.config_json(shape)))) == shape


def test_configs_of_other_models_are_refused_by_name() -> None:
    llama, hybrid = hugging_face.config_json(LLAMA), hugging_face.config_json(HYBRID)
    for config, said in (
        ({"model_type": "bert"}, "found 'bert'"),
        ({"model_type": "llama"}, "expected a value for 'num_attention_heads'"),
        (llama | {"hidden_act": "gelu"}, "hidden_act: this model supports only 'silu', found 'gelu'"),
        (llama | {"attention_bias": True}, "attention_bias"),
        (llama | {"head_dim": 16}, "hidden_size / num_attention_heads = 8, found 16"),
        (llama | {"rope_parameters": {"rope_type": "yarn"}}, "expected default or llama3, found 'yarn'"),
        (hybrid | {"hybrid_override_pattern": "ME"}, "routes to experts by sigmoid"),
        (hybrid | {"use_bias": True}, "use_bias"),
    ):
        with pytest.raises(UserError, match=said):
            hugging_face.shape_of(config)
    newer = {key: value for key, value in hybrid.items() if key != "hybrid_override_pattern"}
    words = {"M": "linear_attention", "*": "full_attention", "-": "mlp"}
    newer["layers_block_type"] = [words[kind] for kind in HYBRID.pattern]
    assert hugging_face.shape_of(newer) == HYBRID
