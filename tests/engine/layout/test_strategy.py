"""Strategies as data: which rows are legal, why others are not, and what a name means on one axis and on two."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

import shardwright as sw
from shardwright.engine.extend.named_strategies import resolve, strategies
from shardwright.engine.layout import Strategy

S, R = "shard", "replicate"
#: (parameters, gradients, optimizer state) of the ZeRO stages.
ROWS = {0: (R, R, R), 1: (R, R, S), 2: (R, S, S), 3: (S, S, S)}


@pytest.mark.parametrize(("stage", "row"), ROWS.items())
def test_a_row_is_a_zero_stage(stage: int, row: tuple[str, str, str]) -> None:
    strategy = Strategy(*row)
    assert strategy.stages == (stage,) and strategy.ndim == 1
    assert strategy == Strategy.of_stages(stage) == Strategy(*((word,) for word in row))
    assert hash(strategy) == hash(Strategy.of_stages(stage))


@pytest.mark.parametrize("stages", list(itertools.product(ROWS, repeat=2)), ids=str)
def test_any_two_rows_make_a_strategy_for_two_axes(stages: tuple[int, int]) -> None:
    outer, inner = (ROWS[stage] for stage in stages)
    strategy = Strategy(*zip(outer, inner, strict=True))
    assert strategy.stages == stages and strategy.ndim == 2
    assert strategy == Strategy.of_stages(*stages) == Strategy(*map(list, zip(outer, inner, strict=True)))


ILLEGAL = {
    (
        S,
        S,
        R,
    ): r"axis {} shards parameters but not the optimizer state\. Shard the optimizer state on this axis, too, or "
    r"replicate parameters\.",
    (S, R, R): r"axis {} shards parameters but not the optimizer state",
    (S, R, S): r"axis {} shards parameters but not gradients\. Shard gradients on this axis, too",
    (R, S, R): r"axis {} shards gradients but not the optimizer state",
}


def test_legal_and_illegal_rows_are_all_there_are() -> None:
    assert {*ROWS.values(), *ILLEGAL} == set(itertools.product((S, R), repeat=3))


@pytest.mark.parametrize(("row", "reason"), ILLEGAL.items(), ids=str)
def test_an_illegal_row_is_refused_with_the_reason(row: tuple[str, str, str], reason: str) -> None:
    with pytest.raises(ValueError, match=reason.format(0)):
        Strategy(*row)
    for stage, axis in itertools.product(ROWS, (0, 1)):
        rows = [ROWS[stage], row] if axis else [row, ROWS[stage]]
        with pytest.raises(ValueError, match=reason.format(axis)):
            Strategy(*zip(*rows, strict=True))


@pytest.mark.parametrize("kind", ["parameters", "gradients", "optimizer"])
@pytest.mark.parametrize("wrong", ["sharded", "", (), ("shard", "split"), (None,)], ids=str)
def test_other_words_are_refused(kind: str, wrong: object) -> None:
    given = {"parameters": S, "gradients": S, "optimizer": S, kind: wrong}
    with pytest.raises(ValueError, match=rf'Strategy\({kind}=.*expected "shard" or "replicate" for each'):
        Strategy(**given)


def test_all_three_name_as_many_axes() -> None:
    with pytest.raises(ValueError, match="the same number of axes"):
        Strategy(S, (S, S), (S, S))


def test_a_strategy_does_not_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Strategy(S, S, S).parameters = R


RESOLVED = {
    1: {None: (3,), "ddp": (0,), "zero1": (1,), "zero2": (2,), "zero3": (3,)},
    2: {
        None: (0, 3),
        "ddp": (0, 0),
        "zero1": (1, 1),
        "zero2": (2, 2),
        "zero3": (3, 3),
        "hsdp": (0, 3),
        "hfsdp": (1, 3),
    },
}


@pytest.mark.parametrize(
    ("ndim", "name", "stages"), [(n, name, s) for n, names in RESOLVED.items() for name, s in names.items()]
)
def test_names_on_one_axis_and_on_two(ndim: int, name: str | None, stages: tuple[int, ...]) -> None:
    found = resolve(name, ndim)
    assert found.stages == stages
    assert resolve(found, ndim) is found


def test_every_name_is_tested_and_public() -> None:
    assert set(strategies.names()) == set(RESOLVED[2]) - {None}
    assert sw.Strategy is Strategy


@pytest.mark.parametrize(
    ("strategy", "ndim", "message"),
    [
        ("hsdp", 1, "strategy 'hsdp' is for a mesh of 2 dimensions, and this mesh has 1. Pass a 2-D mesh"),
        ("hfsdp", 1, "strategy 'hfsdp' is for a mesh of 2 dimensions"),
        (
            Strategy.of_stages(3),
            2,
            "for a mesh of 1 dimensions, and this mesh has 2. Pass a Strategy",
        ),
        (Strategy.of_stages(0, 3), 1, "for a mesh of 2 dimensions, and this mesh has 1"),
        ("zero4", 1, "one of ddp, zero1, zero2, zero3, hsdp, hfsdp, or an import path"),
        ("zero4", 1, "found 'zero4'; did you mean 'zero3'?"),
        ("ZeRO3", 2, "found 'ZeRO3'"),
        ("", 1, "found ''"),
    ],
    ids=str,
)
def test_what_does_not_fit_the_mesh_is_refused(strategy: object, ndim: int, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        resolve(strategy, ndim)
    assert message in str(caught.value)


@pytest.mark.parametrize("wrong", [3, True, ("shard",), ["zero3"]], ids=str)
def test_what_is_no_strategy_is_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match="strategy: expected a Strategy or one of"):
        resolve(wrong, 1)
