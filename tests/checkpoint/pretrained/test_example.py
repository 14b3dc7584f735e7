"""The example of fine-tuning learns, and saves what it has learnt."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import shardwright as sw
from tests.support import multirank
from tests.support.scripts import printed_by

ROOT = Path(__file__).parents[3]


def losses(output: str) -> list[float]:
    return [float(value) for value in re.findall(r"step \d+: loss ([\d.]+)", output)]


@multirank(2)
def test_it_makes_loads_tunes_and_saves(rank: int, world_size: int, tmp_path: Path) -> None:
    pytest.importorskip("pydantic", reason="needs the extra train")
    from shardwright.train.models import hugging_face
    from shardwright.train.models.build import model_of
    from tests.train.kit.text import batch, pydoc, text_of

    script = ROOT / "examples" / "finetune_pretrained.py"
    first = printed_by(script, "--to", tmp_path / "tuned", scratch=tmp_path)
    if rank:
        return
    assert "made a small pretrained Llama in" in first
    parameters, read, whole = (
        int(number.replace(",", ""))
        for number in re.search(r"([\d,]+) parameters.* read ([\d,]+) of ([\d,]+) bytes", first).groups()  # type: ignore[union-attr]
    )
    assert 2 * parameters <= read <= 2 * parameters + 1024 < whole
    assert len(losses(first)) == 20 and losses(first)[-1] < losses(first)[0] - 1
    shape = hugging_face.shape_of(json.loads((tmp_path / "tuned" / "config.json").read_text()))
    model = model_of(shape)
    sw.load_pretrained(model, tmp_path / "tuned", key_map=hugging_face.key_map(shape))
    inputs, targets = batch(text_of(pydoc()), 0, 0, 4, 128)
    loss = torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    assert loss.item() < losses(first)[0] - 1


@multirank(2)
def test_it_refuses_bytes_for_another_vocabulary(rank: int, world_size: int, tmp_path: Path) -> None:
    """It uses the folder's tokenizer.json instead, if this belongs to the model."""
    pytest.importorskip("pydantic", reason="needs the extra train")
    pytest.importorskip("tokenizers", reason="reads tokenizer.json")
    from shardwright.train.commands.hugging_face import byte_tokenizer
    from shardwright.train.config.shapes.presets import LlamaConfig
    from shardwright.train.models import hugging_face
    from shardwright.train.models.build import model_of

    script = ROOT / "examples" / "finetune_pretrained.py"
    for vocab_size in (200, 300):
        shape = LlamaConfig(
            dim=32, n_layers=1, n_heads=2, n_kv_heads=2, ffn_dim=64, vocab_size=vocab_size, max_seq_len=128
        )
        folder = tmp_path / f"{vocab_size}"
        if rank == 0:
            key_map, config = hugging_face.key_map(shape), hugging_face.config_json(shape)
            sw.save_pretrained(model_of(shape), folder, key_map=key_map, config=config)
        dist.barrier()
        with pytest.raises(
            SystemExit, match=f"expected tokenizer.json for a model of {vocab_size} ids, found none"
        ):
            printed_by(script, "--from", folder, "--to", tmp_path / "tuned", scratch=tmp_path)
        dist.barrier()
        (folder / "tokenizer.json").write_text(json.dumps(byte_tokenizer.tokenizer_json()))
        dist.barrier()
    with pytest.raises(
        SystemExit, match="expected ids below the model's 200, found 255; this tokenizer does not"
    ):
        printed_by(script, "--from", tmp_path / "200", "--to", tmp_path / "tuned", scratch=tmp_path)
    text = printed_by(
        script, "--from", tmp_path / "300", "--to", tmp_path / "tuned", "--steps", "3", scratch=tmp_path
    )
    if rank == 0:
        assert len(losses(text)) == 3
        assert (tmp_path / "tuned" / "tokenizer.json").is_file()
