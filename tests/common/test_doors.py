"""Doors of rooms: each name is listed once, and imported when it is first used."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import shardwright

ROOMS = sorted(
    ".".join(path.parent.relative_to(Path(shardwright.__file__).parents[1]).parts)
    for path in Path(shardwright.__file__).parent.rglob("__init__.py")
    if "door(__spec__)" in path.read_text()
)


@pytest.mark.parametrize("room", ROOMS)
def test_each_listed_name_is_there(room: str) -> None:
    module = importlib.import_module(room)
    for name in {*module.__all__, *dir(module)}:
        getattr(module, name)


def test_a_name_that_is_not_listed_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'fully_shared'"):
        shardwright.engine.fully_shared  # noqa: B018


def test_public_names_are_those_that_are_imported_as_themselves() -> None:
    assert {"fully_shard", "describe"} <= {*shardwright.engine.__all__}
    assert "RankGroup" in dir(shardwright.engine) and "RankGroup" not in shardwright.engine.__all__


def test_a_door_imports_what_is_used_and_nothing_else() -> None:
    code = (
        "import sys, shardwright.engine, shardwright.planner, shardwright.checkpoint; print('torch' in sys.modules); "
        "shardwright.planner.in_gib; print('torch' in sys.modules, 'shardwright.planner.verdict' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False", "True"]


def test_no_listed_name_is_that_of_a_module_behind_the_door() -> None:
    """An import of the module would put it in the place of the name."""
    for room in ROOMS:
        module = importlib.import_module(room)
        folder = Path(module.__file__ or "").parent
        behind = {path.stem for path in folder.iterdir() if path.suffix == ".py" or path.is_dir()}
        clashes = [
            name
            for name in {*module.__all__, *dir(module)} & behind
            if not isinstance(getattr(module, name), ModuleType)
        ]
        assert not clashes, f"{room}: {clashes}"
