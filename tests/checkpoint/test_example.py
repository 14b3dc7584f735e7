"""The example of fine-tuning learns, and saves what it has learnt."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

import shardwright as sw
from tests.support import multirank
from tests.support.scripts import printed_by

ROOT = Path(__file__).parents[2]


def losses(output: str) -> list[float]:
    return [float(value) for value in re.findall(r"step \d+: loss ([\d.]+)", output)]


@multirank(2)
def test_it_makes_loads_tunes_and_saves(rank: int, world_size: int, tmp_path: Path) -> None:
    pytest.importorskip("pydantic", reason="needs the extra train")
    from shardwright.train.config import DataConfig
    from shardwright.train.data.corpus import batch, load_corpus
    from shardwright.train.models import hugging_face
    from shardwright.train.models.build import model_of

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
    inputs, targets = batch(load_corpus(DataConfig(source="pydoc")), 0, 0, 4, 128)
    loss = torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    assert loss.item() < losses(first)[0] - 1
