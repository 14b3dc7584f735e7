"""The examples of docs/activations.md run, one after another, as a reader would paste them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support import multirank

PAGE = Path(__file__).parents[2] / "docs" / "activations.md"


@pytest.mark.extensive("imports transformers on every rank")
@multirank(2)
def test_the_examples_run(rank: int, world_size: int) -> None:
    pytest.importorskip("transformers")
    examples = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(examples) == 2
    names: dict[str, object] = {}
    for example in examples:
        exec(compile(example, PAGE.name, "exec"), names)
    model = names["model"]
    assert all(p.grad is not None for p in model.parameters())  # type: ignore[attr-defined]
