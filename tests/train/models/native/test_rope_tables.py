"""Rotary tables in config.json: one of two places, or both if they are equal; else an error.

What counts is compared with transformers, which builds its frequencies from the same file.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from shardwright.train.config.shapes.foreign import HuggingFaceShape
from shardwright.train.config.shapes.presets import LlamaConfig, RopeScaling
from shardwright.train.config.shapes.rope_tables import one_place, rope_tables
from shardwright.train.errors import UserError
from shardwright.train.models import hugging_face
from shardwright.train.models.hf import transformers_model

SHAPE = LlamaConfig(
    dim=32, n_layers=1, n_heads=4, n_kv_heads=2, ffn_dim=64, vocab_size=64, max_seq_len=128, norm_eps=1e-6
)
PLAIN = {
    key: value
    for key, value in hugging_face.config_json(SHAPE).items()
    if key not in ("rope_theta", "rope_scaling")
}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
TABLES: list[dict[str, Any] | None] = [
    None,
    {"rope_type": "default"},
    LLAMA3,
    {**LLAMA3, "factor": 2.0},
    {**LLAMA3, "original_max_position_embeddings": 64},
    {("type" if key == "rope_type" else key): value for key, value in LLAMA3.items()},
]
THETAS = [None, 10_000.0, 5000.0]


def frequencies(config: dict[str, Any]) -> list[float]:
    """The frequencies of transformers' own Llama with that config.json."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    content = json.loads(json.dumps(config))
    return LlamaRotaryEmbedding(transformers.LlamaConfig.from_dict(content)).inv_freq.tolist()  # type: ignore[no-any-return]


def crossings() -> list[dict[str, Any]]:
    """Every pair of tables in both places, with bases inside them and beside them."""
    result = []
    for old, new, beside, inside in itertools.product(TABLES, TABLES, THETAS, THETAS):
        config = dict(PLAIN)
        if old is not None:
            config["rope_scaling"] = old
        if new is not None:
            config["rope_parameters"] = new if inside is None else {**new, "rope_theta": inside}
        if beside is not None:
            config["rope_theta"] = beside
        result.append(config)
    return result


def sole(config: dict[str, Any], key: str) -> dict[str, Any]:
    """The same file without the other place."""
    other = {"rope_scaling": ("rope_parameters",), "rope_parameters": ("rope_scaling", "rope_theta")}[key]
    return {name: value for name, value in config.items() if name not in other}


@pytest.mark.extensive("every kind of table")
def test_tables_that_differ_raise_and_others_are_read_as_transformers_reads_them() -> None:
    read = raised = 0
    for config in crossings():
        theirs = frequencies(config)
        try:
            ours = hugging_face.shape_of(config)
        except UserError as error:
            raised += 1
            assert "remove the wrong one of the two" in str(error), config
            # It is right to raise: each place alone gives other frequencies, or one leaves the base to the class.
            if "rope_theta = 'nothing'" in str(error):
                continue
            places = [sole(config, key) for key in ("rope_scaling", "rope_parameters") if key in config]
            if "rope_theta" in config and "rope_scaling" not in config:
                places.append({**PLAIN, "rope_theta": config["rope_theta"]})
            assert len({str(frequencies(each)) for each in places}) > 1, config
        else:
            read += 1
            exported = hugging_face.config_json(ours)
            assert frequencies(exported) == theirs, config
            assert "rope_parameters" not in exported
            assert frequencies(one_place(config)) == theirs, config
            assert not {"rope_scaling", "rope_parameters"} <= one_place(config).keys(), config
    assert read > 100 and raised > 150, (read, raised)


def test_a_model_of_transformers_with_two_tables_is_refused(tmp_path: Path) -> None:
    for number, scaling in enumerate([LLAMA3, {**LLAMA3, "factor": 2.0}]):
        folder = tmp_path / str(number)
        folder.mkdir()
        content = {**PLAIN, "rope_scaling": scaling, "rope_parameters": {**LLAMA3, "rope_theta": 5000.0}}
        content["rope_theta"] = 5000.0
        (folder / "config.json").write_text(json.dumps(content))
        if number:
            with pytest.raises(
                ValueError, match=r"path: the config.json of .*factor = 2.0 there and 8.0 here"
            ):
                HuggingFaceShape(str(folder))
            continue
        pytest.importorskip("transformers")
        exported = transformers_model.config_json(HuggingFaceShape(str(folder), "random"))
        assert "rope_parameters" not in exported and exported["rope_scaling"] == LLAMA3


LAYERS = {
    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"rope_parameters": LAYERS}, ""),
        ({"rope_parameters": LAYERS, "rope_theta": 1e6}, ""),
        ({"rope_parameters": LAYERS, "rope_theta": 2e6}, "rope_theta: expected 1000000.0 or 10000.0"),
        ({"rope_parameters": LAYERS, "rope_scaling": LAYERS}, ""),
        ({"rope_parameters": LAYERS, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}, "in one of the two"),
        (
            {"rope_parameters": LAYERS, "rope_scaling": {**LAYERS, "sliding_attention": LAYERS["full_attention"]}},
            "rotary table of sliding_attention",
        ),
        ({"rope_scaling": {"rope_type": "llama3", "type": "linear", "factor": 8.0}}, "expected one type"),
        ({"rope_scaling": LLAMA3, "original_max_position_embeddings": 99}, "the value beside the table"),
        ({"rope_scaling": None, "rope_parameters": {**LLAMA3, "rope_theta": 3.0}}, ""),
    ],
)  # fmt: skip
def test_tables_of_types_of_layers(content: dict[str, Any], said: str) -> None:
    if said:
        with pytest.raises(ValueError, match=said):
            rope_tables(content)
    else:
        rope_tables(content)
        single = one_place(content)
        assert len({"rope_scaling", "rope_parameters"} & single.keys()) == 1
        assert rope_tables(single) == rope_tables(content)


def test_a_llama_has_one_table_for_all_layers() -> None:
    with pytest.raises(
        UserError, match="one rotary table for all layers, found another one for sliding_attention"
    ):
        hugging_face.shape_of({**PLAIN, "rope_parameters": LAYERS})
    with pytest.raises(UserError, match="without partial_rotary_factor"):
        hugging_face.shape_of({**PLAIN, "rope_theta": 1e4, "partial_rotary_factor": 0.5})
    scaled = hugging_face.shape_of({**PLAIN, "rope_theta": 1e4, "rope_scaling": LLAMA3})
    assert scaled.rope_scaling == RopeScaling(8.0, 1.0, 4.0, 32)  # type: ignore[union-attr]
