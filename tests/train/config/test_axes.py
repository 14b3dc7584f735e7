"""The table of parallel axes: every row is whole, and no other file asks for an axis by its key."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

import pytest

from shardwright import train
from shardwright.train.config import Config, ParallelConfig, axes
from shardwright.train.config.axes import AXES, ParallelAxis, ParallelDims
from shardwright.train.config.catalog.engines import EngineFacts
from shardwright.train.config.catalog.kinds import Offers
from shardwright.train.errors import UserError

TRAIN = Path(train.__file__).parent
#: The table and the keys.
OWN = {"config/axes.py", "config/sections/parallel.py"}


@pytest.mark.parametrize("axis", AXES, ids=lambda axis: axis.name)
def test_each_row_is_whole(axis: ParallelAxis) -> None:
    field = ParallelConfig.model_fields[axis.name]
    assert (field.default, field.description) == (1, axis.description)
    assert axis.offer in {each.name for each in dataclasses.fields(Offers)}
    assert axis.fact in {"", *(each.name for each in dataclasses.fields(EngineFacts))}
    for key in (*axis.needs, *axis.excludes):
        assert not Config().changes(key)


@pytest.mark.parametrize("axis", AXES, ids=lambda axis: axis.name)
def test_ranks_follow_from_what_an_axis_divides(axis: ParallelAxis) -> None:
    dims = ParallelDims.of(2, {each.name: 2 if each is axis else 1 for each in AXES}, 16)
    own = axis.divides == "layers"
    assert (dims.ranks, dims.replicate, dims.shard) == (16, 2, 4 if own else 8)
    assert dims.data == {"layers": 8, "samples": 8, "experts": 16}[axis.divides]
    assert dims.with_same_loss == (2 if own else 1)
    assert (axis.name in dims.axes) is own
    assert (axis.name in dims.context_axes) is (axis.divides in ("layers", "samples"))
    assert (axis.name in dims.spread_axes) is (axis.divides in ("layers", "experts"))
    samples = [dims.data_rank(rank) for rank in range(4)]
    assert samples == ([0, 1, 2, 3] if axis.divides == "experts" else [0, 0, 1, 1])


def test_a_further_axis_counts_with_those_that_divide_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    further = dataclasses.replace(AXES[0], name="columns")
    monkeypatch.setattr(axes, "AXES", (*AXES, further))
    sizes = {"tensor": 2, "expert": 1, "context": 2, "columns": 2}
    dims = ParallelDims.of(1, sizes, 16)
    assert (dims.ranks, dims.data, dims.sharing_data, dims.with_same_loss) == (16, 2, 8, 4)
    assert dims.axes == {"data": 4, "tensor": 2, "columns": 2}
    assert dims.context_axes == {"samples": 2, "context": 2, "tensor": 2, "columns": 2}
    with pytest.raises(
        UserError, match=r"parallel.columns: expected a divisor of the number of ranks, 6, found 4"
    ):
        ParallelDims.of(1, {**sizes, "columns": 4}, 12)


def test_no_other_file_reads_the_size_of_one_axis() -> None:
    """They ask into how many parts something is divided, so that another axis that divides it counts, too."""
    names = {axis.name for axis in AXES}
    read = [
        f"{path.relative_to(TRAIN)}:{node.lineno}"
        for path in sorted(TRAIN.rglob("*.py"))
        if str(path.relative_to(TRAIN)) not in OWN
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.Attribute) and node.attr in names and "parallel" in ast.unparse(node.value))
        or (isinstance(node, ast.Constant) and node.value in {axis.key for axis in AXES})
    ]
    assert read == []
