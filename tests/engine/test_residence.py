"""States of the memory of full weights: what runs do is what the table allows, and docs/architecture.md shows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.engine.assembly.find import UNIT
from shardwright.engine.weights.residence import ALLOWED, Event, Residence, table
from shardwright.engine.weights.weights import Weights
from tests.support.pool import multirank

MOVES = {(before, after) for (before, _), after in ALLOWED.items()}
ROOT = Path(__file__).parents[2]


class Moves:
    """Records every change of a state; one that the table does not have is an error."""

    def __init__(self) -> None:
        self.seen: set[tuple[Residence, Residence]] = set()
        self._states: dict[int, Residence] = {}

    def __get__(self, weights: Any, owner: Any = None) -> Any:
        return self if weights is None else self._states[id(weights)]

    def __set__(self, weights: Any, state: Residence) -> None:
        before = self._states.get(id(weights))
        if before is not None:
            assert (before, state) in MOVES, f"{before.name} to {state.name}"
            self.seen.add((before, state))
        else:
            assert state is Residence.SHARDED
        self._states[id(weights)] = state


class Boom(Exception):
    """What a test raises."""


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
        again = {(state, state) for state in (Residence.ISSUING, Residence.RESIDENT)}  # after interrupts
        assert moves.seen | again == MOVES


def test_every_state_can_be_left_and_reached() -> None:
    assert {before for before, _ in MOVES} == {after for _, after in MOVES} == set(Residence)
    assert {event for _, event in ALLOWED} == set(Event)


def test_the_page_has_the_table() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    assert table() in page, "print it by: python -m shardwright.engine.weights.residence"
