"""Ranks that diverge are refused on every rank, by name, at once: other units, orders, sizes, or a rank that left."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardwright as sw
from shardwright.comm_hooks import MXFP8
from tests.engine.cases.base import CASES, DIM, FP32, Batch, Block, Net, loss_of
from tests.engine.cases.failures import Boom, raising
from tests.engine.cases.running import TOLERANCE, reference_step, sharded_net, step_of
from tests.engine.custom import Gathers
from tests.engine.programs import differences
from tests.support import multirank


def refusal(*parts: str) -> Any:
    """An error that says that ranks diverged and has all of these, in whichever order the ranks come."""
    return pytest.raises(
        RuntimeError, match="(?s)" + "".join(f"(?=.*{part})" for part in ("diverged", *parts))
    )


OTHER_PATHS = {
    "skipped by one rank": ((0, 1, 2), (0, 2), r"'blocks\.1'", r"'blocks\.2'"),
    "skipped by one rank, the last": ((0, 1, 2), (0, 1), r"'blocks\.2'", "'Net'"),
    "another order": ((0, 1, 2), (0, 2, 1), r"'blocks\.1'", r"'blocks\.2'"),
    "none at all": ((0, 1, 2), (), r"'blocks\.0'", "'Net'"),
}


@multirank(2, 3, timeout=15.0)
@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("kind", OTHER_PATHS)
def test_other_units_in_forward_are_refused(
    rank: int, world_size: int, kind: str, warm: bool, reshard: bool | None
) -> None:
    """The last rank goes another way than the others."""
    usual, other, *names = OTHER_PATHS[kind]
    model = sharded_net(reshard_after_forward=reshard)
    if warm:  # the guess of the next gather is the usual order on every rank
        step_of(model, rank)
        names = [
            r"unit \d \('.*'\).*unit \d \('.*'\)"
        ]  # what was gathered ahead is named, or what comes next
    last = rank == world_size - 1
    with refusal(*names, "ranks? 0", f"rank {world_size - 1}"):
        step_of(model, rank, other if last else usual)


@multirank(2, 3, timeout=15.0)
@pytest.mark.parametrize("kind", OTHER_PATHS)
def test_training_goes_on_after_a_refusal(rank: int, world_size: int, kind: str) -> None:
    usual, other, *_ = OTHER_PATHS[kind]
    torch.manual_seed(0)
    plain: Any = Net()
    batch = Batch(0, 0, 1, rank, world_size, FP32)
    reference_step(CASES["plain"], plain, batch, FP32)
    model = sharded_net()
    with refusal():
        step_of(model, rank, other if rank == 0 else usual)
    model.zero_grad()
    loss_of(model(batch.x)).backward()
    assert not differences(model, plain, TOLERANCE)


@multirank(2, 3, timeout=15.0)
def test_another_unit_in_backward_only_is_refused(rank: int, world_size: int) -> None:
    """Weights are kept, so nothing is gathered in backward; the reductions differ."""
    model = sharded_net(reshard_after_forward=False)
    x = torch.randn(3, DIM)
    states: list[torch.Tensor] = []
    handles = [b.register_forward_hook(lambda m, a, o: states.append(o)) for b in model.blocks]
    y = model(x)
    for handle in handles:
        handle.remove()
    with refusal("rank"):
        (loss_of(y) if rank else loss_of(states[0])).backward()


@multirank(2, 3, timeout=15.0)
@pytest.mark.parametrize("reshard", [True, False])
def test_the_same_parts_in_another_order_in_backward_are_refused(
    rank: int, world_size: int, reshard: bool
) -> None:
    model = sharded_net(reshard_after_forward=reshard)
    one, two = (model.blocks[i](torch.randn(2, DIM)) for i in (0, 1))
    with refusal():
        for y in (one, two) if rank else (two, one):
            loss_of(y).backward()


class Sized(Net):
    """Ranks that build different models."""

    def __init__(self, hidden: int) -> None:
        super().__init__(2, lambda: Block(DIM, hidden))


@multirank(2, 3, timeout=15.0)
def test_unequal_sizes_are_refused_before_the_gather(rank: int, world_size: int) -> None:
    model = sharded_net(Sized(5 if rank else 50))
    with refusal(r"'blocks\.0'", "bytes"):
        step_of(model, rank)


@multirank(2, 3, timeout=15.0)
@pytest.mark.parametrize("strategy", ["zero3", "zero2"])
@pytest.mark.parametrize(
    ("kind", "groups"),
    [
        ("codec on some ranks", "some on rank 0; none on rank"),
        ("elements of codecs", "some on rank 0; some on rank"),
        ("collective on some ranks", "some on rank 0; none on rank"),
    ],
)
def test_other_codecs_and_collectives_of_gathers_are_refused(
    rank: int, world_size: int, kind: str, groups: str, strategy: str
) -> None:
    model: Any = torch.nn.Linear(64, 64)
    sw.fully_shard(model, strategy=strategy)
    other = MXFP8(torch.float8_e5m2) if kind == "elements of codecs" else None
    if kind == "collective on some ranks":
        model.set_custom_all_gather(Gathers() if rank == 0 else None)
    else:
        model.set_all_gather_codec(MXFP8() if rank == 0 else other)
    with pytest.raises(RuntimeError, match=rf"\('Linear'\) with different codecs or collectives \({groups}"):
        model(torch.ones(2, 64))
    model.set_custom_all_gather(None)
    model.set_all_gather_codec(MXFP8())  # the message's way out
    model(torch.ones(2, 64)).sum().backward()


@multirank(2, 3, timeout=15.0)
def test_other_modules_as_units_are_refused(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model: Any = Net()
    for unit in [*(model.blocks if rank else model.blocks[1:]), model]:
        sw.fully_shard(unit)
    with pytest.raises(RuntimeError):
        step_of(model, rank)


@multirank(2, 3, timeout=15.0)
@pytest.mark.parametrize("ends_early", [0, 1])
def test_a_rank_that_leaves_the_loop_early_is_noticed(rank: int, world_size: int, ends_early: int) -> None:
    """It goes on to the optimizer and an evaluation, where it meets the others' next step."""
    model = sharded_net()
    optimizer = sw.fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    step_of(model, rank)
    with refusal("rank"):
        if rank != ends_early:
            step_of(model, rank)
        sw.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            model(torch.randn(2, DIM), (1, 2))


@multirank(2, 3, timeout=15.0)
@pytest.mark.parametrize("where", ["a part of a unit", "a whole unit", "everything"])
def test_requires_grad_that_differs_is_refused(rank: int, world_size: int, where: str) -> None:
    model = sharded_net()
    if rank == 0:
        {"a part of a unit": model.blocks[1].up, "a whole unit": model.blocks[1], "everything": model}[
            where
        ].requires_grad_(False)
    x = torch.randn(3, DIM).requires_grad_()
    with refusal(*(["requires_grad"] if where == "a part of a unit" else [])):
        loss_of(model(x)).backward()


@multirank(2, 3, timeout=15.0)
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("reshard", [None, False])
def test_a_rank_that_raises_and_goes_on_is_noticed(
    rank: int, world_size: int, where: str, reshard: bool | None
) -> None:
    """As where a user skips batches that fail on one rank: the others hear why, and then all may go on."""
    model = sharded_net(reshard_after_forward=reshard)
    step_of(model, rank)
    if rank == 0:
        handle = raising(model.blocks[1].up, where)
        with pytest.raises(Boom):
            step_of(model, rank)
        handle.remove()
    else:
        with refusal(rf"rank 0 has left the {where} of unit 0 \('Net'\) by Boom"):
            step_of(model, rank)
    model.zero_grad()
    step_of(model, rank)
