"""Long work of the first rank at the start: the others wait as long as it goes on, and not for ever."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from shardwright.engine.compat import default_store
from shardwright.train.errors import UserError
from shardwright.train.rank import startup_check
from shardwright.train.report import progress
from tests.support import multirank


def run(seconds: float, work: Any, signs_every: float) -> None:
    """`run_on_first` with a wait of `seconds`, in a store of its own."""
    store = dist.PrefixStore(f"{work.__name__}, {signs_every}", default_store())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(startup_check, "PATIENCE", timedelta(seconds=seconds))
        patch.setattr(startup_check, "collective_timeout", lambda: timedelta(seconds=seconds))
        patch.setattr(startup_check, "SECONDS_OF_A_SIGN", 0.0)
        patch.setattr(progress, "EVERY", signs_every)
        startup_check.run_on_first(store, "done", work)


def work() -> None:
    assert dist.get_rank() == 0
    time.sleep(1.0)


def mistake() -> None:
    raise UserError("run.plan: it does not fit")


@multirank(2)
def test_others_wait_as_long_as_the_first_rank_gives_signs(rank: int, world_size: int) -> None:
    began = time.monotonic()
    run(0.3, work, signs_every=0.05)
    assert time.monotonic() - began >= 1.0


@multirank(2)
def test_a_first_rank_without_a_sign_is_given_up(rank: int, world_size: int) -> None:
    with pytest.raises(RuntimeError, match=r"^rank 1: "):
        run(0.3, work, signs_every=60.0)


@multirank(2)
def test_a_mistake_of_the_first_rank_is_one_of_all(rank: int, world_size: int) -> None:
    with pytest.raises(UserError, match=r"^run.plan: it does not fit$"):
        run(5.0, mistake, signs_every=60.0)
