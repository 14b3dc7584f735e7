"""Facts of engines and kinds of models: one row for each, and no other file that asks for the name of one."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

from shardwright import train
from shardwright.train.config import ParallelConfig
from shardwright.train.config.catalog.engines import ENGINES, EngineName, engines_that
from shardwright.train.config.catalog.kinds import kinds_that
from shardwright.train.extend import kinds
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
    assert _places(_questions) == []


def test_no_file_compares_the_name_of_a_kind_of_model() -> None:
    assert _places(_questions_of_kinds) == []
    tree = ast.parse('if config.model.kind in ("hf", "python") and c.model.kind == d.model.kind:\n    pass')
    assert [*_questions_of_kinds(tree)] == [1]


def test_no_file_asks_for_the_class_of_a_shape() -> None:
    """But those of the shapes, of the kinds and of their models."""
    shapes = {kind.shape.__name__ for kind in kinds.known()}
    asked = [
        str(path.relative_to(TRAIN))
        for path in sorted(TRAIN.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance")
        or (isinstance(node, ast.Compare) and ast.unparse(node.left).startswith("type("))
        if shapes & {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    ]
    own = ("config/shapes/", "config/catalog/kinds.py", "models/native/", "models/hf/", "models/foreign/")
    assert [name for name in asked if not name.startswith(own)] == []


def test_facts_of_kinds() -> None:
    for fact in ("divides_layers", "no_cuda_graph", "is_users_code", "experts", "predicts_further", "base"):
        assert len({getattr(kind, fact) for kind in kinds.known()}) > 1, fact
    assert kinds_that(lambda kind: kind.divides_layers) == "llama and hybrid"


def _places(questions: Callable[[ast.Module], Iterator[int]]) -> list[str]:
    """File and line of each question in the trainer."""
    files = {str(path.relative_to(TRAIN)): path for path in sorted(TRAIN.rglob("*.py"))}
    return [
        f"{name}:{line}"
        for name, path in files.items()
        if name not in OWN
        for line in questions(ast.parse(path.read_text()))
    ]


def _questions_of_kinds(tree: ast.Module) -> Iterator[int]:
    """Lines that compare `model.kind` with a text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare | ast.Match):
            parts = [*ast.walk(node)]
            asks = any(
                isinstance(part, ast.Attribute) and ast.unparse(part).endswith("model.kind") for part in parts
            )
            if asks and any(isinstance(part, ast.Constant) and isinstance(part.value, str) for part in parts):
                yield node.lineno


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
