"""Random models, deferred, sharded and materialised, equal the plain build; ``random_models.py`` tells what they are.

``SHARDWRIGHT_MODELS`` is the number of models (a tenth of them on real ranks), ``SHARDWRIGHT_MODELS_SEED`` makes them
others than those of every run. What hypothesis prints of a failure builds the smallest model that fails.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import hypothesis
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwright as sw
from shardwright.checkpoint import tensors_of as held_by
from tests.init.models import assert_built_alike, tensors_of
from tests.init.random_models import SHARDINGS, Described, descriptions
from tests.support import CaseFailed, WorkerPools, world_mesh

COUNT = int(os.environ.get("SHARDWRIGHT_MODELS", "60"))
SEED = os.environ.get("SHARDWRIGHT_MODELS_SEED")


def drawn(count: int) -> settings:
    return settings(
        max_examples=count,
        derandomize=SEED is None,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )


def seeded(test: object) -> object:
    return hypothesis.seed(int(SEED))(test) if SEED is not None else test


@pytest.mark.extensive("each layer of many models")
@seeded
@drawn(COUNT)
@given(model=descriptions())
def test_unsharded(model: Described) -> None:
    assert_built_alike(model.build, model.seed)


@pytest.fixture(scope="module")
def one_of_three() -> Iterator[None]:
    """This process is rank 1 of three of which the others are not there: ranks do not communicate."""
    dist.init_process_group("fake", rank=1, world_size=3, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.extensive("each layer of many models")
@pytest.mark.usefixtures("one_of_three")
@seeded
@drawn(COUNT)
@given(model=descriptions())
def test_the_part_of_one_rank(model: Described) -> None:
    torch.manual_seed(model.seed)
    plain = model.build()
    state = torch.get_rng_state()
    torch.manual_seed(model.seed)
    with sw.deferred_init():
        deferred = model.build()
    model.shard(deferred)
    sw.materialize(deferred)
    assert torch.equal(torch.get_rng_state(), state)
    wanted, found = tensors_of(plain), held_by(deferred)
    assert sorted(name for held in found for name in held.names) == sorted(wanted)
    for held in found:
        for name in held.names:
            value = wanted[name]
            assert (held.tensor.shape, held.tensor.dtype) == (value.shape, value.dtype), name
            assert held.tensor.requires_grad == value.requires_grad, name
            for offsets, local in held.boxes():
                box = tuple(slice(o, o + n) for o, n in zip(offsets, local.shape, strict=True))
                assert torch.equal(local, value[box]), name


def build_on_ranks(rank: int, world_size: int, model: Described) -> None:
    mesh = world_mesh(world_size)
    assert_built_alike(model.build, model.seed, lambda built: model.shard(built, mesh=mesh))


@pytest.mark.multirank
@seeded
@drawn(max(COUNT // 10, 1))
@given(model=descriptions())
def test_on_two_ranks(worker_pools: WorkerPools, model: Described) -> None:
    try:
        worker_pools.run(build_on_ranks, 2, model=model)
    except CaseFailed as failure:
        pytest.fail(f"{model}\n{failure}", pytrace=False)


def test_random_models_are_not_all_alike() -> None:
    seen: list[Described] = []

    @settings(drawn(60), phases=[hypothesis.Phase.generate])
    @given(model=descriptions())
    def draw(model: Described) -> None:
        seen.append(model)

    draw()
    torch.manual_seed(0)
    assert len({tuple(tensors_of(model.build())) for model in seen}) > 25
    assert {model.sharding for model in seen} == set(SHARDINGS)
