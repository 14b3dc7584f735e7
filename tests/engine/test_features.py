"""Every legal pair of features trains as the plain model does, and so does a sample of three together.

`features.py` has the axes and the training. SHARDWRIGHT_MATRIX=triples runs every legal three.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.engine.features import AXES, REFUSED, Row, Rule, excluded, train
from tests.support import CaseFailed, CaseSkipped, WorkerPools
from tests.support.matrix import generate, level

if level() in ("values", "pairs"):
    ROWS = [Row(**row) for row in generate(AXES, excluded, 2, more=2)]
else:
    ROWS = [Row(**row) for row in generate(AXES, excluded, 3, tries=1)]


def run(pools: WorkerPools, body: Any, row: Row, **arguments: Any) -> None:
    try:
        pools.run(body, row.ranks, timeout=90, row=row, **arguments)
    except CaseSkipped as skipped:
        pytest.skip(str(skipped))
    except CaseFailed as failure:
        pytest.fail(str(failure), pytrace=False)


def trained(rank: int, world_size: int, row: Row) -> None:
    train(row)


@pytest.mark.multirank
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_features_together(worker_pools: WorkerPools, row: Row) -> None:
    run(worker_pools, trained, row)


def refused(rank: int, world_size: int, row: Row, told: str) -> None:
    with pytest.raises((ValueError, NotImplementedError, RuntimeError), match=told):
        train(row)


def row_of(rule: Rule) -> Row:
    """The plainest row that the rule refuses and no other does."""
    first = {axis: values[0] for axis, values in AXES.items()}
    for values in itertools.product(*(AXES[axis] for axis in rule.axes)):
        row = {**first, **dict(zip(rule.axes, values, strict=True))}
        others = (pair for pair in itertools.combinations(row, 2) if set(pair) != set(rule.axes))
        if rule.applies(*values) and not any(excluded(a, row[a], b, row[b]) for a, b in others):
            return Row(**row)
    raise AssertionError(f"no row has what {rule.axes} refuse")


@pytest.mark.multirank
@pytest.mark.parametrize("rule", REFUSED, ids=lambda rule: " with ".join(rule.axes))
def test_what_may_not_stand_together_is_refused_by_name(worker_pools: WorkerPools, rule: Rule) -> None:
    run(worker_pools, refused, row_of(rule), told=rule.told)
