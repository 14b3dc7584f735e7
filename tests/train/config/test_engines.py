"""Facts of engines: one row and one class for each, and no other file that asks for the name of an engine."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from shardwright import train
from shardwright.train.config.catalog.engines import ENGINES, EngineName, engines_that
from shardwright.train.config.sections.parallel import ParallelConfig
from shardwright.train.parallel.engines import CLASSES, engine_of

TRAIN = Path(train.__file__).parent
OWN = {"config/catalog/engines.py", "parallel/engines/__init__.py"}


def test_each_name_has_a_row_and_a_class() -> None:
    assert tuple(ENGINES) == tuple(CLASSES) == get_args(EngineName)
    for name, row in ENGINES.items():
        config = ParallelConfig(engine=name)
        assert (row.name, config.facts) == (name, row)
        assert type(engine_of(config)) is CLASSES[name]
    assert len(set(CLASSES.values())) == len(CLASSES)


def test_each_fact_differs_between_engines() -> None:
    for fact in dataclasses.fields(next(iter(ENGINES.values()))):
        assert len({getattr(row, fact.name) for row in ENGINES.values()}) > 1, fact.name


def test_no_other_file_asks_for_the_name_of_an_engine() -> None:
    """A fact of the row, or a method of the class, says what an engine does."""
    found = []
    for path in sorted(TRAIN.rglob("*.py")):
        name = str(path.relative_to(TRAIN))
        if name not in OWN:
            found += [f"{name}:{line}" for line in _questions(ast.parse(path.read_text()))]
    assert found == []


def _questions(tree: ast.Module) -> Iterator[int]:
    """Lines that compare an engine, match it, look it up, or write a name that only engines have."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare | ast.Match | ast.Dict):
            parts = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
            if any(_is_engine(part) for part in parts):
                yield node.lineno
        if isinstance(node, ast.Constant) and node.value in {"fsdp2", "fsdp1"}:
            yield node.lineno


def _is_engine(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "engine"


def test_engines_in_words() -> None:
    assert engines_that(lambda row: row.has_own_keys) == "shardwright"
    assert engines_that(lambda row: row.divides_layers, style=repr) == "'shardwright' or 'fsdp2'"
    assert engines_that(lambda row: row.is_planned, "and", repr) == "'shardwright', 'fsdp2' and 'none'"
