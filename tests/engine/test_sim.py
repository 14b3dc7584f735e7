"""The engine on a simulated accelerator, whose streams run later, in orders drawn from seeds."""

from __future__ import annotations

import pytest

from tests.engine.kit.simulated import EVENTS, Case, On
from tests.support.sim import on_sim


@on_sim(2, timeout=600)
@pytest.mark.parametrize("event", EVENTS)
def test_try(rank: int, world_size: int, event: str) -> None:
    from tests.engine.kit.on_sim import differences, train

    case = Case(event=event)
    base = train(case, 0)
    for seed in range(1, 4):
        assert not differences(base, train(case, seed + 3 * rank)), seed
