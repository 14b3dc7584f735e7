"""Where the host waits for a device in a step of the trainer, on the simulated device, which names each such place."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest

from tests.support.sim import on_sim
from tests.train.kit.jobs import HYBRID

AGREEMENT = "a copy to the host in read"
#: Ranks compare their gradients in backward, see `tests/engine/test_sim.py`.
COMPARISON = "an event's synchronize in read"
PACKED = {"document_mask": True}
#: The simulated device has no convolution.
MIXTURE = {**HYBRID, "pattern": "E*-"}

JOBS: dict[str, dict[str, Any]] = {
    "dense": {},
    "packed documents": {"data": PACKED},
    "padded samples": {"data": {"packing": "none"}, "model": MIXTURE},
    "8 bits": {"optimizer": {"name": "adamw8bit"}},
    "muon": {"optimizer": {"name": "muon"}},
    "mixture": {"model": MIXTURE},
    "mixture of packed documents": {"model": HYBRID, "data": PACKED},
    "experts on ranks": {"model": MIXTURE, "parallel": {"expert": 2}},
}
#: Waits beside those of every step, for each number of ranks: a place, and how often a step of two micro-batches on one
#: rank, or one on each of two, comes there.
BESIDE: dict[tuple[str, int], dict[str, int]] = {
    # The failures of other ranks' steps, with numbers of the state.
    ("muon", 2): {"a copy to the host in _gathered_rows": 1},
    # The ends of the experts' rows, where `grouped_mm` has no kernel.
    ("mixture", 1): {"a copy to the host in through_experts": 4},
    ("mixture", 2): {"a copy to the host in through_experts": 2},
    ("padded samples", 1): {"a copy to the host in through_experts": 4},
    ("padded samples", 2): {"a copy to the host in through_experts": 2},
    ("mixture of packed documents", 1): {"a copy to the host in through_experts": 4},
    ("mixture of packed documents", 2): {"a copy to the host in through_experts": 2},
    # The sizes of what travels depend on the routing.
    ("experts on ranks", 2): {
        "a copy to the host in through_experts": 2,
        "a copy to the host in _chosen_elsewhere": 2,
    },
}


@pytest.mark.extensive(
    "each kind of job",
    but=("dense-1ranks", "muon-2ranks", "mixture of packed documents-2ranks", "experts on ranks-2ranks"),
)
@on_sim(1, 2)
@pytest.mark.parametrize("name", JOBS)
def test_the_host_waits_in_a_step_at_named_places_alone(rank: int, world_size: int, name: str) -> None:
    from tests.train.kit.on_sim import trainer_on_sim

    if name == "experts on ranks" and world_size == 1:
        pytest.skip("one rank has all experts")
    expected = Counter({AGREEMENT: 1, **({COMPARISON: 1} if world_size > 1 else {})})
    expected.update(BESIDE.get((name, world_size), {}))
    with trainer_on_sim(JOBS[name], rank, world_size) as job:
        found = job.waits_of(job.step)
        assert found == expected, found


@on_sim(1)
def test_the_host_waits_once_in_a_validation(rank: int, world_size: int) -> None:
    from shardwright.train.step.evaluation import validate
    from tests.train.kit.on_sim import trainer_on_sim

    settings = {"data": {**PACKED, "validation_fraction": 0.1}, "validation": {"every": 1, "batches": 2}}
    with trainer_on_sim(settings, rank, world_size) as job:
        found = job.waits_of(lambda: validate(job.trainer))
        assert found == {"a copy to the host in validate": 1}, found


LONG = {"train": {"steps": 20}, "validation": {"every": 0}, "checkpoint": {"every": 15}}
LATE = {**LONG, "fault": {"check": "after_step"}}


@on_sim(1, 2)
def test_a_late_check_waits_for_the_step_before_alone(rank: int, world_size: int) -> None:
    """When the host waits for the numbers of a step, the device has the whole next one to do after them."""
    from tests.train.kit.on_sim import trainer_on_sim

    leads = []
    for settings in (LONG, LATE):
        with trainer_on_sim(settings, rank, world_size) as job:
            found = job.waits_of(job.step)
            assert found.total() == world_size, found  # on two ranks `COMPARISON` is one of them
            leads.append(job.lead())
            whole_step = job.operations_of_a_step()
    assert leads[0] <= 1 and leads[1] >= whole_step, (leads, whole_step)


@on_sim(2)
def test_a_late_check_has_the_same_numbers_in_any_order(rank: int, world_size: int) -> None:
    from tests.train.kit.on_sim import trainer_on_sim

    found = []
    for settings, seed in ((LONG, 0), (LATE, 1 + 3 * rank), (LATE, 2 + 3 * rank)):
        with trainer_on_sim(settings, rank, world_size, seed) as job:
            found.append([(result.loss, result.agreed.norm) for result in (job.step() for _ in range(7))])
            assert job.trainer.is_ahead is (settings is LATE)
    assert found[0] == found[1] == found[2]


@pytest.mark.extensive("without a graph and on two ranks, too", but=("True-1ranks",))
@on_sim(1, 2)
@pytest.mark.parametrize("graph", [False, True])
def test_a_late_check_leaves_a_wrong_step_out_of_a_graph_too(rank: int, world_size: int, graph: bool) -> None:
    """A step with a loss of NaN is skipped: the losses after it are the same, in any order of the streams."""
    from tests.train.kit.on_sim import trainer_on_sim

    found = []
    for settings, seed in ((LONG, 0), (LATE, 1), (LATE, 2)):
        train, fault = {**settings["train"], "cuda_graph": graph}, settings.get("fault", {})
        with trainer_on_sim(
            {**settings, "train": train, "fault": {**fault, "on_non_finite": "skip"}}, rank, world_size, seed
        ) as job:
            found.append(losses_around_a_wrong_step(job))
    assert found[0] == found[1] == found[2]


def losses_around_a_wrong_step(job: Any) -> list[tuple[float, float]]:
    """Losses and gradient norms of nine steps, and nothing for the seventh, whose loss is NaN."""
    trainer, found = job.trainer, []
    compute, first = trainer._compute_gradients, 6 * trainer.config.train.global_batch

    def wrong(data: Any) -> Any:
        made = compute(data)
        return made._replace(shares=made.shares * math.nan) if trainer.position.samples == first else made

    trainer._compute_gradients = wrong
    for _ in range(9):
        result = job.step()
        if result.fault is None:
            found.append((result.loss, result.agreed.norm))
        else:
            assert trainer.position.samples == first
            trainer.skip()
    assert len(found) == 8
    return found
