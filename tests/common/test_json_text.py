"""JSON as the package writes it: any value becomes text that a strict reader takes, and one function writes it."""

from __future__ import annotations

import ast
import math
import random
from pathlib import Path
from typing import Any

import pytest

from shardwright.common.json_text import not_finite, strict_json
from tests.support.strict_json import WRONG, strict

SOURCE = Path(__file__).parents[2] / "src" / "shardwright"


def tree(draw: random.Random, depth: int = 3) -> Any:
    kind = draw.randrange(8 if depth else 5)
    if kind >= 5:
        inner = [tree(draw, depth - 1) for _ in range(draw.randrange(4))]
        return (
            {f"key {i}": each for i, each in enumerate(inner)}
            if kind == 5
            else [inner, tuple(inner)][kind - 6]
        )
    return [draw.choice(WRONG), draw.uniform(-1e300, 1e300), draw.randrange(9), None, "NaN"][kind]


def with_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: with_nulls(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [with_nulls(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@pytest.mark.parametrize("seed", range(20))
def test_what_is_not_finite_is_null_and_all_else_stays(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(50):
        value = tree(draw)
        assert strict(strict_json(value)) == strict(strict_json(value, indent=2)) == with_nulls(value)


def test_figures_that_are_not_finite_are_named() -> None:
    figures = {
        "a": math.nan,
        "b": 1.0,
        "c": {"d": math.inf, "e": -math.inf, "f": 2},
        "g": {"h": 0.5},
        "i": None,
    }
    assert not_finite(figures) == {"a": "nan", "c": {"d": "inf", "e": "-inf"}}


def test_one_function_writes_the_files_of_runs() -> None:
    """Other uses of `json.dumps` are messages between processes, digests, and formats with rules of their own."""
    rooms = (
        "train/run",
        "train/report",
        "train/commands",
        "train/step",
        "train/launch",
        "cli",
        "planner",
    )
    #: Read by this package alone; the last writes from a process without the package.
    messages = {"planner/cache.py", "cli/doctor/links.py", "train/commands/hugging_face/harness.py"}
    for room in rooms:
        for file in (SOURCE / room).rglob("*.py"):
            name = file.relative_to(SOURCE).as_posix()
            calls = [
                node.attr
                for node in ast.walk(ast.parse(file.read_text()))
                if isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and (node.value.id, node.attr) in (("json", "dump"), ("json", "dumps"))
            ]
            assert not calls or name in messages, name
