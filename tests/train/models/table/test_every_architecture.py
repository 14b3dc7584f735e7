"""One training step of every architecture of transformers for each way to save memory: it equals that of the plain
model, or is refused. ``python -m tests.train.models.table`` prints the table."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import multirank
from tests.train.models.table.cells import CELLS, CRASH, WRONG, Cell, outcomes
from tests.train.models.table.small import causal_types, small_config, unnoticed

pytest.importorskip("transformers", reason="needs transformers")

PARTS = 24


def check(kinds: list[str], folder: Path, cells: list[Cell]) -> None:
    failures = []
    for kind in kinds:
        try:
            with unnoticed():
                small_config(kind)
        except ValueError:
            continue  # no small model of this type
        failures += [
            f"{kind} {cell}: {outcome}"
            for cell, outcome in outcomes(kind, folder, cells)
            if outcome.word in (WRONG, CRASH)
        ]
    assert not failures, "\n".join(failures)


@multirank(2)
def test_a_model_that_changes_results_in_place(rank: int, world_size: int, tmp_path: Path) -> None:
    check(["gpt_oss"], tmp_path, CELLS[1:3])


@pytest.mark.extensive("architectures of transformers")
@multirank(2, timeout=900)
@pytest.mark.parametrize("part", range(PARTS))
def test_a_step_equals_that_of_the_plain_model(rank: int, world_size: int, part: int, tmp_path: Path) -> None:
    check(causal_types()[part::PARTS], tmp_path, CELLS)
