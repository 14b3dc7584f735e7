"""Notes of a step: leases and releases as blocks, collectives as spans, and damage as an error."""

from __future__ import annotations

from typing import Any

import pytest

from shardwright.train.report.page.notes import notes_picture
from tests.train.report.page.kit import noted, totals


def test_leases_are_blocks_and_collectives_are_spans() -> None:
    picture = notes_picture(noted())
    assert picture["groups"] == ["parameters", "reduction"]
    assert totals(picture) == [50 + 100, 50 + 300, 300, 200, 600, 400]
    assert [name for name, _ in picture["phases"]] == ["forward", "backward"]
    spans = {each["name"]: each for each in picture["streams"]}
    assert {name: len(each["kernels"]) for name, each in spans.items()} == {
        "phase": 3,
        "begins": 2,
        "waits": 1,
    }
    assert spans["begins"]["lengths"] == [5, 10] and spans["waits"]["gaps"] == [30]
    words = [picture["kernels"][number] for number in spans["begins"]["kernels"]]
    assert words == [["all-gather of layers.0", "communication"], ["all-gather of layers.1", "communication"]]
    assert sum(picture["times"]) < picture["length"]


@pytest.mark.parametrize(
    "damage",
    [
        {"names": 3},
        {"notes": [[1, 2]]},
        {"notes": [[1, 99, 0, 0, 0]]},
        {"notes": [["x", 0, 0, 0, 0]]},
        {"step": None},
    ],
)
def test_damaged_notes_are_an_error(damage: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected the notes of a step"):
        notes_picture({**noted(), **damage})
