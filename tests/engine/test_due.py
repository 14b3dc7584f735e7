"""The fate of gradients, by every input of the rule."""

from __future__ import annotations

import itertools

import pytest

from shardwright.engine.gradients.due import Due, Held, due

#: (sync, completes, finishes late, held, needed): what is due.
TABLE = {
    (False, True, True, Held.NOTHING, False): Due.HOLD,
    (False, False, False, Held.SUMS, False): Due.HOLD,
    (True, True, True, Held.WHOLE, False): Due.FINISH,
    (True, True, False, Held.NOTHING, False): Due.FINISH,
    (True, False, True, Held.NOTHING, False): Due.SCATTER,
    (True, False, True, Held.WHOLE, False): Due.SCATTER,
    (True, False, False, Held.NOTHING, False): Due.HOLD,
    (True, False, True, Held.SUMS, True): Due.FINISH_SUMS,
    (False, False, True, Held.WHOLE, True): Due.FINISH,
    (True, True, False, Held.SUMS, True): Due.FINISH,
}


@pytest.mark.parametrize(("given", "expected"), TABLE.items(), ids=str)
def test_table(given: tuple[bool, bool, bool, Held, bool], expected: Due) -> None:
    sync, completes, late, held, needed = given
    assert due(sync=sync, completes=completes, finishes_late=late, held=held, needed=needed) is expected


def test_rules() -> None:
    """Needed gradients are finished; held ones are never forgotten; without sync nothing is communicated."""
    flags = (False, True)
    for sync, completes, late, held, needed in itertools.product(flags, flags, flags, Held, flags):
        result = due(sync=sync, completes=completes, finishes_late=late, held=held, needed=needed)
        assert (result.leaves is Held.NOTHING) >= needed
        assert (result is Due.HOLD) >= (not sync and not needed)
        assert late or result in (Due.HOLD, Due.FINISH)
        assert not (held is Held.WHOLE and result is Due.FINISH_SUMS)
