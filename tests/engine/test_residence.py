"""States of the memory of full weights: runs reach all changes of the table and no other. The docs show the table."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.engine import UNIT
from shardwright.engine.memory import Owner
from shardwright.engine.weights.residence import ALLOWED, Event, Residence, change, table
from shardwright.engine.weights.weights import Weights
from tests.support.pool import multirank

MOVES = {(before, after) for (before, _), after in ALLOWED.items()}
#: Only after an exception of the interpreter at a place that no test reaches.
INTERRUPTED = {
    (Residence.ISSUING, Residence.ISSUING),
    (Residence.ISSUING, Residence.RESIDENT),
    (Residence.RESIDENT, Residence.RESIDENT),
    (Residence.SHARDED, Residence.SHARDED),
}
ROOT = Path(__file__).parents[2]


class Moves:
    """Records every change of a state."""

    def __init__(self) -> None:
        self.seen: set[tuple[Residence, Residence]] = set()
        self._states: dict[int, Residence] = {}

    def __get__(self, weights: Any, owner: Any = None) -> Any:
        return self if weights is None else self._states[id(weights)]

    def __set__(self, weights: Any, state: Residence) -> None:
        before = self._states.get(id(weights))
        if before is not None:
            self.seen.add((before, state))
        else:
            assert state is Residence.SHARDED
        self._states[id(weights)] = state


class Boom(Exception):
    """The exception that a test raises."""


@multirank(2)
def test_runs_move_as_the_table_says(rank: int, world_size: int) -> None:
    """Training, prefetches, evaluation with kept weights, a gather that fails and one that is interrupted."""
    moves = Moves()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Weights, "residence", moves, raising=False)
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
        for layer in model:
            sw.fully_shard(layer)
        sw.fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model(torch.ones(2, 8) * (rank + 1)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        model[1].set_reshard_after_forward(False)
        with torch.no_grad():
            model(torch.ones(2, 8))
            model[1].weight.mul_(2)  # what was kept is gathered again
            model(torch.ones(2, 8))
        model.unshard()
        model.reshard()
        gather = getattr(model[0], UNIT).weights.copy.gather
        begin = gather.begin
        for error in (Boom, KeyboardInterrupt):

            def fail(*given: Any, error: type[BaseException] = error) -> Any:
                if error is KeyboardInterrupt:
                    begin(*given)
                raise error

            gather.begin = fail
            with pytest.raises(error):
                model(torch.ones(2, 8))
            if error is Boom:
                with pytest.raises(error):
                    model[0].unshard()
            gather.begin = begin
            model(torch.ones(2, 8)).sum().backward()
        assert moves.seen | INTERRUPTED == MOVES


@pytest.mark.parametrize("after", Residence)
@pytest.mark.parametrize("state", Residence)
def test_a_change_that_the_table_does_not_have_is_an_error(state: Residence, after: Residence) -> None:
    owner = Owner("blocks.3")
    if (state, after) in MOVES:
        assert change(state, after, owner) is after
    else:
        with pytest.raises(
            RuntimeError, match=rf"unit 'blocks\.3' cannot become {after.name} .* it is {state.name} "
        ):
            change(state, after, owner)


@multirank(1)
def test_an_engine_that_loses_its_place_stops(rank: int, world_size: int) -> None:
    """The states of a unit change through the table alone."""
    model = nn.Sequential(nn.Linear(8, 8))
    sw.fully_shard(model[0])
    sw.fully_shard(model)
    model(torch.ones(2, 8)).sum().backward()
    model[0].unshard(async_op=True)
    getattr(model[0], UNIT).weights.residence = Residence.EMPTY
    with pytest.raises(RuntimeError, match=r"unit '0' cannot become RESIDENT .* it is EMPTY "):
        model(torch.ones(2, 8))


def test_only_one_function_changes_a_state() -> None:
    """Every assignment to a residence is one of its first value, or of what ``change`` returns."""
    source = ROOT / "src/shardwright"
    lines = [line for path in source.rglob("*.py") for line in path.read_text().splitlines()]
    written = {line.split(" = ")[1].split("(")[0] for line in lines if re.search(r"\.residence = ", line)}
    assert written == {"SHARDED", "change"}


def test_every_state_can_be_left_and_reached() -> None:
    assert {before for before, _ in MOVES} == {after for _, after in MOVES} == set(Residence)
    assert {event for _, event in ALLOWED} == set(Event)


def test_the_page_has_the_table() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    assert table() in page, "print it by: python -m shardwright.engine.weights.residence"
