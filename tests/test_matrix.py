"""The selection of rows: all that is to be seen is seen, by few rows, the same in every run."""

from __future__ import annotations

import itertools

import pytest

from tests.support.matrix import covering, select, together

PRODUCT = list(itertools.product("abcd", range(3), (None, True), "xyz"))


@pytest.mark.parametrize(("strength", "most"), [(1, 4), (2, 15), (3, 45)])
def test_every_combination_of_settings_is_in_few_rows(strength: int, most: int) -> None:
    chosen = covering(PRODUCT, lambda row: together(strength, *row))
    for places in itertools.combinations(range(4), strength):
        seen = {tuple(row[place] for place in places) for row in chosen}
        assert seen == {tuple(row[place] for place in places) for row in PRODUCT}
    assert len(chosen) <= most
    assert chosen == covering(PRODUCT, lambda row: together(strength, *row))
    assert chosen == sorted(chosen, key=PRODUCT.index)


def test_equal_values_of_different_settings_are_not_confused() -> None:
    rows = [(0, 1), (1, 0), (0, 0)]
    assert covering(rows, lambda row: together(2, *row)) == rows


def test_what_no_row_shows_is_not_missed() -> None:
    """Illegal combinations are just not among the rows."""
    legal = [row for row in PRODUCT if row[:2] != ("a", 0)]
    chosen = covering(legal, lambda row: together(2, *row))
    assert {row[:2] for row in chosen} == {row[:2] for row in legal}


def test_more_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {}
    for level in ("values", "pairs", "triples", "all"):
        monkeypatch.setenv("SHARDWRIGHT_MATRIX", level)
        counts[level] = len(select(PRODUCT, lambda row, strength: together(strength, *row)))
    assert counts["values"] < counts["pairs"] < counts["triples"] < counts["all"] == len(PRODUCT)
    monkeypatch.delenv("SHARDWRIGHT_MATRIX")
    assert len(select(PRODUCT, lambda row, strength: together(strength, *row))) == counts["pairs"]
    monkeypatch.setenv("SHARDWRIGHT_MATRIX", "everything")
    with pytest.raises(ValueError, match="expected one of values, pairs, triples, all, found 'everything'"):
        select(PRODUCT, lambda row, strength: together(strength, *row))
