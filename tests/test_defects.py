"""The table of deliberate defects fits the source. ``make defects`` runs the tests that find them."""

from __future__ import annotations

from pathlib import Path

import pytest

import shardwright
from tests.defects.table import DEFECTS, Defect

PACKAGE = Path(shardwright.__file__).parent


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda d: d.what)
def test_each_defect_can_be_made(defect: Defect) -> None:
    text = (PACKAGE / defect.path).read_text()
    assert text.count(defect.source) == 1
    assert defect.source != defect.wrong
    compile(text.replace(defect.source, defect.wrong), defect.path, "exec")
