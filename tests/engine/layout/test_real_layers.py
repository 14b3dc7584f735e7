"""Padding of one layer of well-known models: what DESIGN.md promises at 1,024 ranks, in at most 6 segments anywhere."""

from __future__ import annotations

import pytest

from shardwright.engine.layout import Ragged, plan
from tests.engine.layout.shapes import LAYERS

# Padding of Shard(0) in percent, the most that rows may have (what DESIGN.md states, to its last digit), segments.
# It gives 205% for 3x3 convolutions without their shapes: the whole ResNet-34 has that, its 3x3 ones alone 210%.
STATED = {
    "Llama-3-8B": (0, 0.05, 3),
    "Qwen3-32B": (0, 0.05, 4),
    "DeepSeek-V3 dense": (1.2, 1.25, 5),
    "DeepSeek 4 experts": (25_500, 0, 2),
    "Mamba-2": (3.3, 3.35, 2),
    "ResNet-34": (205, 0.2, 4),
    "3x3 convolutions": (210, 0.2, 1),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_padding_at_1024_ranks(layer: str) -> None:
    per_parameter, most, segments = STATED[layer]
    assert 100 * plan(LAYERS[layer], 1024).padding == pytest.approx(per_parameter, rel=5e-3, abs=0.05)
    rows = plan(LAYERS[layer], 1024, "ragged")
    assert 100 * rows.padding <= most
    assert len(rows.segments) == segments
    assert 100 * plan(LAYERS[layer], 1024, Ragged("element")).padding < 0.05


@pytest.mark.parametrize("layer", LAYERS)
def test_at_most_six_segments_and_no_more_padding_than_per_parameter(layer: str) -> None:
    shapes = LAYERS[layer]
    for ranks in (1, 2, 8, 64, 96, 256, 1000, 1024, 4096):
        rows = plan(shapes, ranks, "ragged")
        assert len(rows.segments) <= 6
        assert rows.padding <= plan(shapes, ranks).padding + 1e-3
        assert len(plan(shapes, ranks, Ragged(32)).segments) <= 6
        assert len(plan(shapes, ranks, Ragged("element")).segments) == 1
