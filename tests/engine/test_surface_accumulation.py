"""Gradient accumulation as with torch's ``fully_shard``, and ``reset_iter_state`` after a failure."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.engine.kit.subclasses import LIBRARIES, backward, check, gradients
from tests.engine.kit.surface import Boom, Collectives, Policy, averaged, both, build, fail, need, ours, shard
from tests.support import multirank

# -- recovery --------------------------------------------------------------------------------------------------------


@multirank(2)
@pytest.mark.parametrize(
    "library, where",
    # FSDP2's leaves the gradients of the failed backward behind, to be added to the next one's.
    [("torch", "forward"), ("shardwright", "forward"), ("shardwright", "backward")],
)
def test_reset_iter_state_after_an_exception(rank: int, world_size: int, library: str, where: str) -> None:
    need(library, "reset_iter_state")
    expected = averaged(build(), world_size)
    model = shard(library, build())
    backward(model, rank)
    model.zero_grad()
    module = model.blocks[1].up
    hook = module.register_forward_hook(fail) if where == "forward" else None
    if where == "backward":
        hook = model.blocks[1].register_forward_hook(lambda m, a, o: o.register_hook(fail) and None)
    assert hook is not None
    with pytest.raises(Boom):
        backward(model, rank, 1)
    hook.remove()
    assert model.reset_iter_state() is None
    assert all(isinstance(p, DTensor) for p in model.parameters())
    model.zero_grad()
    for _ in range(2):
        backward(model, rank)
        check(gradients(model), expected)
        model.zero_grad()


@multirank(2)
@both
def test_reset_iter_state_at_rest_changes_nothing(rank: int, world_size: int, library: str) -> None:
    """Called on the root, where FSDP2 alone allows it; twice is once."""
    need(library, "reset_iter_state")
    model = shard(library, build())
    for micro in range(2):
        backward(model, rank, micro)
        before = gradients(model)
        model.reset_iter_state()
        model.reset_iter_state()
        check(gradients(model), before, tol=0)
    check(gradients(model), averaged(build(), world_size, micros=2))


@multirank(2)
@ours
def test_reset_iter_state_before_the_first_forward(rank: int, world_size: int, library: str) -> None:
    """Where FSDP2 raises AttributeError."""
    model = shard(library, build())
    model.reset_iter_state()
    backward(model, rank)
    check(gradients(model), averaged(build(), world_size))


@multirank(2)
@ours
def test_reset_iter_state_drops_held_micro_batches(rank: int, world_size: int, library: str) -> None:
    """As FSDP2 documents it; torch 2.13 keeps them."""
    expected = averaged(build(), world_size)
    model = shard(library, build())
    model.set_requires_gradient_sync(False)
    backward(model, rank, 1)
    model.reset_iter_state()
    model.set_requires_gradient_sync(True)
    backward(model, rank)
    check(gradients(model), expected)


# -- gradient accumulation -------------------------------------------------------------------------------------------


@multirank(2)
@both
def test_gradients_are_held_without_communication_until_the_last_micro_batch(
    rank: int, world_size: int, library: str
) -> None:
    expected = averaged(build(), world_size, micros=3)
    model = shard(library, build())
    for _ in range(2):
        with Collectives() as seen:
            for micro in range(3):
                last = micro == 2
                model.set_requires_gradient_sync(last)
                backward(model, rank, micro)
                assert all((p.grad is not None) == last for p in model.parameters())
                assert seen.count("reduce") == (4 if last else 0)
        check(gradients(model), expected)
        model.zero_grad()


@multirank(2)
@both
def test_gradient_sync_of_one_module_only(rank: int, world_size: int, library: str) -> None:
    model = shard(library, build())
    model.set_requires_gradient_sync(False, recurse=False)
    backward(model, rank)
    assert {n for n, p in model.named_parameters() if p.grad is None} == {"head.weight", "head.bias"}
    model.set_requires_gradient_sync(True)
    backward(model, rank, 1)
    check(gradients(model), averaged(build(), world_size, micros=2))


@multirank(2)
@pytest.mark.parametrize("reduce_dtype", [None, torch.float32])
def test_held_gradients_have_the_reduce_dtype(
    rank: int, world_size: int, reduce_dtype: torch.dtype | None
) -> None:
    """bfloat16 gradients of eight micro-batches: the sums agree with FSDP2's to what one rounding of it allows."""
    found = []
    for library in LIBRARIES:
        model = shard(
            library, build(), mp_policy=Policy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
        )
        for micro in range(8):
            model.set_requires_gradient_sync(micro == 7)
            backward(model, rank, micro)
        found.append(gradients(model))
    check(found[1], found[0], tol=1e-5 if reduce_dtype else 1e-2)
    assert all(g.dtype == torch.float32 for g in found[1].values())


@multirank(2)
@both
def test_every_gradient_is_there_after_a_backward_that_is_not_the_last(
    rank: int, world_size: int, library: str
) -> None:
    model = shard(library, build())
    for step in range(2):
        for micro in range(3):
            model.set_is_last_backward(micro == 2)
            backward(model, rank, micro)
            check(gradients(model), averaged(build(), world_size, micros=micro + 1))
        if step == 0:
            model.zero_grad()


@multirank(2)
@both
def test_both_flags_of_gradient_accumulation(rank: int, world_size: int, library: str) -> None:
    """The recipe that trades memory for communication: hold gradients and keep weights until the last micro-batch."""
    expected = averaged(build(), world_size, micros=3)
    model = shard(library, build())
    for _ in range(2):
        with Collectives() as seen:
            for micro in range(3):
                last = micro == 2
                model.set_is_last_backward(last)
                model.set_requires_gradient_sync(last)
                model.set_reshard_after_backward(last)
                backward(model, rank, micro)
            found = [kind for kind, _ in seen.take()]
            # Four units in the first forward; the blocks, released after each forward, again in each backward.
            assert (found.count("gather"), found.count("reduce")) == (4 + 3 * 3, 4)
        check(gradients(model), expected)
        model.zero_grad()
