"""The part of the data that no step trains on."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.train.data.validation import part_of, training_and_validation
from tests.train.kit.tokens import tokens_of


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 30), max_size=30),
    fraction=st.floats(0, 0.99),
    masked=st.booleans(),
)
def test_the_parts_share_nothing_and_are_everything(
    lengths: list[int], fraction: float, masked: bool
) -> None:
    tokens = tokens_of(lengths, [n % 2 for n in range(sum(lengths))] if masked else None)
    train, validation = training_and_validation(tokens, fraction)
    assert np.concatenate([train.ids, validation.ids]).tolist() == tokens.ids.tolist()
    for part in (train, validation):
        assert (part.ends[-1] if len(part.ends) else 0) == len(part.ids)
        assert (np.diff(part.ends, prepend=0) >= 0).all()
    if masked:
        assert train.trained is not None and validation.trained is not None and tokens.trained is not None
        assert np.concatenate([train.trained, validation.trained]).tolist() == tokens.trained.tolist()
    wanted = int(len(tokens.ids) * fraction)
    assert wanted <= len(validation.ids) <= max(2 * wanted - 1, wanted)
    boundaries = {0, *tokens.ends.tolist()}
    joined = {*train.ends.tolist(), *(validation.ends + len(train.ids)).tolist()}
    if len(train.ids) not in boundaries:  # a document is cut: it is longer than the validation part
        before = max(b for b in boundaries if b < len(train.ids))
        after = min(b for b in boundaries if b > len(train.ids))
        assert (after - before > wanted or before == 0) and len(validation.ids) == wanted
        joined.remove(len(train.ids))
    assert joined | {0} == boundaries


@pytest.mark.parametrize("fraction", [0, 0.05, 0.25, 0.999])
def test_one_text_is_cut_where_it_always_was(fraction: float) -> None:
    train, validation = training_and_validation(tokens_of([1001]), fraction)
    assert len(validation.ids) == int(1001 * fraction)
    assert train.ends.tolist() == [len(train.ids)]


def test_parts_have_fingerprints_of_their_own() -> None:
    tokens = tokens_of([10, 10], fingerprint="abc")
    assert part_of(tokens, 0, 10).fingerprint == "abc[0:10]"
    assert part_of(tokens, 10, 20).ends.tolist() == [10]
    assert part_of(tokens, 5, 15).ends.tolist() == [5, 10]
    assert np.shares_memory(part_of(tokens, 5, 15).ids, tokens.ids)
