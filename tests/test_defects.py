"""The table of deliberate defects fits the source. ``make defects`` runs the tests that find them."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

import shardwright
from tests.defects.table import DEFECTS, Defect

PACKAGE, TESTS = Path(shardwright.__file__).parent, Path(__file__).parent


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda d: d.what)
def test_each_defect_can_be_made(defect: Defect) -> None:
    text = (PACKAGE / defect.path).read_text()
    assert text.count(defect.source) == 1
    assert defect.source != defect.wrong
    compile(text.replace(defect.source, defect.wrong), defect.path, "exec")


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda d: d.what)
def test_the_tests_of_each_defect_are_there(defect: Defect) -> None:
    files = [each for each in defect.tests if each.endswith(".py") or "/" in each or each.isidentifier()]
    words = [word for option, word in itertools.pairwise(defect.tests) if option == "-k"]
    assert files and all((TESTS / file).exists() for file in files if file not in words), files
