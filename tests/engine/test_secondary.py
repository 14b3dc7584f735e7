"""``reshard_after_forward=k``: backward gathers among k neighbours, and changes no bit.

Settings are generated: strategies, layouts, dtypes and accumulation (see tests/support/matrix.py).
"""

from __future__ import annotations

import copy
import itertools
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwright as sw
from shardwright.engine.comm import Communicator
from tests.engine.kit.models import Model, build, loss_of, tokens
from tests.engine.kit.places import On, on, on_meshes
from tests.engine.kit.torch_versions import subclasses_dispatch
from tests.engine.kit.training import (
    UNITS,
    backward,
    check_gradients,
    expected_gradients,
    modules_of,
    set_micro,
    sharded,
    units_of,
)
from tests.support.matrix import select, together

FOUR = [*on("zero3", (4,)), *on("hsdp", (1, 4))]
POLICIES = {"fp32": sw.MixedPrecisionPolicy(), "bf16": sw.MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
LAYOUTS = {
    "per_parameter": "per_parameter",
    "row": "ragged",
    "3": sw.Ragged(3),
    "element": sw.Ragged("element"),
}
MICROS = {
    "single": [(True, True)],
    "each": [(True, True), (True, True)],
    "hold": [(False, True), (True, True)],
}
CASES = select(
    itertools.product(FOUR, LAYOUTS, POLICIES, MICROS), lambda row, strength: together(strength, *row)
)


@contextmanager
def gathers() -> Iterator[Counter[int]]:
    """How many gathers there are inside, by their number of ranks."""
    seen: Counter[int] = Counter()
    original = Communicator.all_gather

    def counting(self: Communicator, *args: Any, **kwargs: Any) -> Any:
        seen[self.world_size] += 1
        return original(self, *args, **kwargs)

    Communicator.all_gather = counting  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        Communicator.all_gather = original  # type: ignore[method-assign]


def secondary_bytes(model: nn.Module) -> list[int]:
    return [
        u.weights.copies.secondary.slab._storage.nbytes() if u.weights.copies.secondary is not None else 0
        for u in units_of(model)
    ]


@on_meshes(CASES)
def test_no_bit_changes(rank: int, world_size: int, at: On, layout: str, precision: str, micros: str) -> None:
    os.environ["SHARDWRIGHT_POISON"] = "1"
    options = {"layout": LAYOUTS[layout], "mp_policy": POLICIES[precision]}
    models = [sharded(at, reshard_after_forward=k, **options) for k in (True, 2)]
    optimizers = [
        sw.fully_shard_optimizer(torch.optim.AdamW(m.parameters(), lr=0.03, eps=1e-3)) for m in models
    ]
    for step in range(3):
        losses = []
        for model, optimizer in zip(models, optimizers, strict=True):
            with gathers() as seen:
                for micro, flags in enumerate(MICROS[micros]):
                    set_micro(model, *flags)
                    losses.append(backward(model, rank, step, micro))
            n = UNITS * len(MICROS[micros])
            assert seen == ({4: 2 * n} if model is models[0] else {4: n, 2: n})
            sw.clip_grad_norm_(model.parameters(), 0.2)
            optimizer.step()
            optimizer.zero_grad()
        assert losses[: len(losses) // 2] == losses[len(losses) // 2 :]
        for (name, p), q in zip(models[1].named_parameters(), models[0].parameters(), strict=True):
            assert torch.equal(p.to_local(), q.to_local()), name


@on_meshes(FOUR)
def test_memory_and_when_it_is_given_back(rank: int, world_size: int, at: On) -> None:
    model = sharded(at, reshard_after_forward=2)
    nothing = [0] * UNITS
    batch = tokens(0, 0, rank)
    assert secondary_bytes(model) == nothing
    assert [u.weights.copy.slab._storage.nbytes() for u in units_of(model)] == nothing
    loss = loss_of(model(batch), batch)
    full = [u.weights.copy.slab.nbytes - u.weights.place.headers.nbytes for u in units_of(model)]
    halves = [u.weights.copies.secondary.slab.nbytes for u in units_of(model)]
    assert all(
        half <= nbytes // 2
        for half, nbytes in zip(halves, (u.weights.copy.slab.nbytes for u in units_of(model)), strict=True)
    )
    assert min(full) > 0 and secondary_bytes(model) == halves
    assert [u.weights.copy.slab._storage.nbytes() for u in units_of(model)] == nothing
    loss.backward()
    assert secondary_bytes(model) == nothing
    with torch.no_grad():
        model(batch)
    assert secondary_bytes(model) == nothing
    loss_of(model(batch), batch)  # and no backward
    sw.fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1)).step()
    assert secondary_bytes(model) == nothing


@on_meshes(FOUR)
def test_two_forwards_failures_and_evaluation(rank: int, world_size: int, at: On) -> None:
    os.environ["SHARDWRIGHT_POISON"] = "1"
    model = sharded(at, reshard_after_forward=2)
    one, two = tokens(0, 0, rank), tokens(0, 1, rank)
    losses = [loss_of(model(one), one), loss_of(model(two), two)]
    with torch.no_grad():
        model(one)
    with pytest.raises(ZeroDivisionError):
        handle = model.head.register_forward_hook(lambda *_: 1 / 0)
        model(one)
    handle.remove()
    for loss in losses:
        loss.backward()
    check_gradients(model, expected_gradients(world_size, micros=2))
    model.zero_grad()
    loss = loss_of(model(one), one)
    loss.backward(retain_graph=True)
    model.zero_grad()
    loss.backward()
    check_gradients(model, expected_gradients(world_size))


@on_meshes(FOUR)
def test_evaluation_in_full_precision_between_steps(rank: int, world_size: int, at: On) -> None:
    """Evaluation has other memory for full weights; the copies kept for backward are a part of those of training."""
    os.environ["SHARDWRIGHT_POISON"] = "1"
    policy = sw.PrecisionPolicy(param_dtype=torch.bfloat16, full_precision_in_eval=True)
    models = [sharded(at, reshard_after_forward=k, mp_policy=policy) for k in (True, 2)]
    for step in range(3):
        losses = []
        for model in models:
            losses.append(backward(model, rank, step, 0))
            with torch.no_grad():
                losses.append(model.eval()(tokens(step, 1, rank)).sum().item())
            model.train()
            sw.fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1)).step()
            model.zero_grad()
        assert losses[:2] == losses[2:]
        for (name, p), q in zip(models[1].named_parameters(), models[0].parameters(), strict=True):
            assert torch.equal(p.to_local(), q.to_local()), name


@on_meshes(FOUR)
def test_checkpointed_blocks(rank: int, world_size: int, at: On) -> None:
    for use_reentrant in (False, True):
        model = sharded(at, reshard_after_forward=2)
        for block in model.blocks:
            run = block.forward
            block.forward = partial(checkpoint, run, use_reentrant=use_reentrant)
        backward(model, rank)
        check_gradients(model, expected_gradients(world_size))


@on_meshes(FOUR)
@pytest.mark.parametrize("through", ["parameter", "data"])
def test_edits_since_forward(rank: int, world_size: int, at: On, through: str) -> None:
    """Noticed as with True: autograd refuses, or backward reads the new values."""
    if through == "data" and not subclasses_dispatch:
        pytest.skip(
            "this torch asks no subclass of DTensor about operations, so edits through .data show nowhere"
        )
    found = []
    for k in (True, 2):
        model = sharded(at, reshard_after_forward=k)
        batch = tokens(0, 0, rank)
        loss = loss_of(model(batch), batch)
        with torch.no_grad():
            for p in model.parameters():
                (p if through == "parameter" else p.data).mul_(2.0)
        try:
            loss.backward()
            found.append([p.grad.full_tensor() for p in model.parameters()])
        except RuntimeError as error:
            found.append(str(error).split(";")[0][:60])
    assert type(found[0]) is type(found[1])
    if isinstance(found[0], str):
        assert found[0] == found[1]
    else:
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@on_meshes(on("zero3", (4,)))
def test_set_to_true_or_false_later(rank: int, world_size: int, at: On) -> None:
    model = sharded(at, reshard_after_forward=2)
    for value, expected in ((True, {4: 2 * UNITS}), (False, {4: UNITS})):
        model.set_reshard_after_forward(value)
        with gathers() as seen:
            backward(model, rank)
        assert seen == expected
        check_gradients(model, expected_gradients(world_size))
        model.zero_grad()


@on_meshes(on("zero3", (4,)))
def test_ranks_that_diverge_are_named(rank: int, world_size: int, at: On) -> None:
    """In backward neighbours gather one unit, the others another: no gather sees it, the reduction does."""
    model = sharded(at, reshard_after_forward=2)
    batch = tokens(0, 0, rank)
    backward(model, rank)
    one, two = (m(torch.randn(2, 3, 7)).sum() for m in model.blocks)
    with pytest.raises(RuntimeError, match=r"The ranks have diverged: .*blocks\.[01].*blocks\.[01]"):
        (one if rank < 2 else two).backward()
    model.zero_grad()
    loss_of(model(batch), batch).backward()
    check_gradients(model, expected_gradients(world_size))


@on_meshes(on("zero3", (4,)))
def test_values(rank: int, world_size: int, at: On) -> None:
    def refuse(match: str, value: Any, error: type[Exception] = ValueError, **options: Any) -> None:
        layer = nn.Linear(4, 4)
        with pytest.raises(error, match=match):
            sw.fully_shard(layer, mesh=at.mesh, reshard_after_forward=value, **options)
        assert type(layer) is nn.Linear and not isinstance(layer.weight, sw.FSDPModule)

    refuse(r"reshard_after_forward=3 must divide the 4 ranks", 3)
    refuse(r"reshard_after_forward=0 must divide the 4 ranks", 0)
    refuse(r"reshard_after_forward=8 must divide the 4 ranks", 8)
    refuse(r"must be True, False, None or a number of ranks, got '2'", "2")
    refuse(r"reshard_after_forward=2 releases full parameters, but .* keeps them", 2, strategy="zero1")
    for value, expected in ((1, False), (4, True), (2, 2)):
        model = sw.fully_shard(nn.Linear(4, 4), mesh=at.mesh, reshard_after_forward=value)
        assert [m.settings.reshard_after_forward for m in units_of(model)] == [expected]


@on_meshes(on("zero3", (4,)))
def test_copies_keep_it(rank: int, world_size: int, at: On) -> None:
    model: Model = copy.deepcopy(sharded(at, build(), reshard_after_forward=2))
    with gathers() as seen:
        backward(model, rank)
    assert seen == {4: UNITS, 2: UNITS} and len(modules_of(model)) == UNITS
    check_gradients(model, expected_gradients(world_size))


@on_meshes(on("zero3", (4,)))
def test_every_backward_gathers_among_neighbours(rank: int, world_size: int, at: On) -> None:
    """Forward gathers over all ranks, whatever was kept; backward among neighbours, however many are to come."""
    for reshard_after_backward in (True, False):
        model = sharded(at, reshard_after_forward=2)
        model.set_reshard_after_backward(reshard_after_backward)
        batches = [tokens(0, micro, rank) for micro in range(2)]
        with gathers() as seen:
            losses = [loss_of(model(batch), batch) for batch in batches]
        assert seen == {4: 2 * UNITS}
        with gathers() as seen:
            for loss in losses:
                loss.backward()
        assert seen == {2: 2 * UNITS if reshard_after_backward else UNITS}
        assert secondary_bytes(model) == [0] * UNITS
        check_gradients(model, expected_gradients(world_size, micros=2))


@on_meshes(on("zero3", (4,)))
def test_what_one_rank_reads_or_steps_is_its_own_business(rank: int, world_size: int, at: On) -> None:
    model = sharded(at, reshard_after_forward=2)
    other = nn.Parameter(torch.zeros(2))
    other.grad = torch.ones(2)
    optimizer = torch.optim.SGD([other], lr=0.1)
    batch = tokens(0, 0, rank)
    loss = loss_of(model(batch), batch)
    if rank == 0:
        optimizer.step()
        assert all(p.data.to_local() is not None for p in model.parameters())
    with gathers() as seen:
        loss.backward()
    assert seen == {2: UNITS}
    check_gradients(model, expected_gradients(world_size))
