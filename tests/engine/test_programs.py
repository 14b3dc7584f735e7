"""Random programs, each on 2, 3 or 4 ranks, against the plain model; see programs/ for what a program is.

``SHARDWRIGHT_PROGRAMS`` is the number of programs, ``SHARDWRIGHT_PROGRAMS_SEED`` makes them others than those of every
run.
"""

from __future__ import annotations

import os

import hypothesis
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from tests.engine.programs import Program, failure_of, programs, run_plain, show_program
from tests.support import WorkerPools

COUNT = int(os.environ.get("SHARDWRIGHT_PROGRAMS", "20"))
SEED = os.environ.get("SHARDWRIGHT_PROGRAMS_SEED")

draw_alike = settings(
    max_examples=COUNT,
    derandomize=SEED is None,
    database=None,
    deadline=None,
    # A program that fails costs a pool of processes, and shrinking runs many of them.
    suppress_health_check=list(HealthCheck),
    print_blob=False,
)


def seeded(test: object) -> object:
    return hypothesis.seed(int(SEED))(test) if SEED is not None else test


@pytest.mark.extensive("50 random programs")
@pytest.mark.multirank
@seeded
@draw_alike
@given(program=programs(), world_size=st.sampled_from([2, 3, 4]))
def test_programs_equal_the_plain_model(worker_pools: WorkerPools, world_size: int, program: Program) -> None:
    failure = failure_of(worker_pools, program, world_size)
    if failure is not None:
        pytest.fail(f"{show_program(program)}\n{failure}", pytrace=False)


@seeded
@draw_alike
@given(program=programs())
def test_the_programs_themselves(program: Program) -> None:
    """A plain model in the place of the sharded one passes: a failure above is the engine's."""
    failure = run_plain(program)
    assert failure is None, f"{show_program(program)}\n{failure}"
