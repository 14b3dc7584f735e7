"""``unshard`` and ``reshard`` by hand, as torch's ``fully_shard`` has them."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tests.engine.kit.subclasses import LIBRARIES, backward, check, data, gradients, loss_of
from tests.engine.kit.surface import Collectives, Policy, averaged, both, build, ours, shard
from tests.support import multirank, world_mesh


def sharded(module: nn.Module) -> bool:
    """Whether the module's own parameters are sharded now."""
    kinds = {isinstance(p, DTensor) for p in module.parameters()}
    assert len(kinds) == 1
    return kinds.pop()


@multirank(2)
@both
def test_unshard_and_reshard_concern_one_unit_and_not_those_inside(
    rank: int, world_size: int, library: str
) -> None:
    plain = build()
    model = shard(library, build())
    assert model.unshard() is None
    assert not isinstance(model.head.weight, DTensor)
    assert isinstance(model.head.weight, nn.Parameter)
    torch.testing.assert_close(model.head.weight, plain.head.weight)
    assert all(sharded(block) for block in model.blocks)
    model.blocks[1].unshard()
    torch.testing.assert_close(model.blocks[1].up.weight, plain.blocks[1].up.weight)
    model.reshard()
    assert isinstance(model.head.weight, DTensor) and not sharded(model.blocks[1])
    for _ in range(2):  # twice is once
        model.blocks[1].reshard()
        assert sharded(model.blocks[1])


@multirank(2)
@both
def test_an_asynchronous_unshard_shows_the_parameters_at_wait(
    rank: int, world_size: int, library: str
) -> None:
    block = shard(library, build()).blocks[0]
    handle = block.unshard(async_op=True)
    assert isinstance(handle, LIBRARIES[library].UnshardHandle)
    assert sharded(block)
    assert handle.wait() is None
    torch.testing.assert_close(block.up.weight, build().blocks[0].up.weight)
    handle.wait()
    assert not sharded(block)
    block.reshard()
    handle.wait()  # of an earlier gather: nothing to wait for
    assert sharded(block)


@multirank(2)
@both
def test_a_second_unshard_gathers_nothing(rank: int, world_size: int, library: str) -> None:
    block = shard(library, build()).blocks[0]
    with Collectives() as seen:
        first, second = block.unshard(async_op=True), block.unshard(async_op=True)
        block.unshard()
        first.wait()
        second.wait()
        block.unshard()
    assert seen.count("gather") == 1
    assert not sharded(block)
    with Collectives() as seen:
        block.reshard()
        block.unshard()
    assert seen.count("gather") == 1


@multirank(2)
@both
def test_forward_uses_what_was_unsharded_by_hand(rank: int, world_size: int, library: str) -> None:
    """The documented recipe for explicit prefetching: unshard ahead, without waiting."""
    expected = averaged(build(), world_size)
    model = shard(library, build())
    for _ in range(3):
        with Collectives() as seen:
            for module in (model, *model.blocks):
                module.unshard(async_op=True)
            assert seen.count("gather") == 4
            loss = loss_of(model(data(rank)))
            assert seen.count("gather") == 0
        loss.backward()
        check(gradients(model), expected)
        model.zero_grad()


@multirank(2)
@both
def test_reshard_of_what_is_still_being_gathered(rank: int, world_size: int, library: str) -> None:
    expected = averaged(build(), world_size)
    model = shard(library, build())
    for module in (model, *model.blocks):
        module.unshard(async_op=True)
        module.reshard()
        assert isinstance(next(module.parameters()), DTensor)
    backward(model, rank)
    check(gradients(model), expected)


@multirank(2)
@both
def test_unshard_follows_the_precision_policy(rank: int, world_size: int, library: str) -> None:
    model = shard(library, build(), mp_policy=Policy(param_dtype=torch.bfloat16))
    assert model.head.weight.dtype == torch.float32
    model.unshard()
    assert model.head.weight.dtype == torch.bfloat16
    torch.testing.assert_close(model.head.weight, build().head.weight.bfloat16(), rtol=0, atol=0)
    model.reshard()
    assert model.head.weight.dtype == torch.float32


@multirank(2)
@both
def test_unshard_of_a_module_without_parameters(rank: int, world_size: int, library: str) -> None:
    fully_shard = LIBRARIES[library].fully_shard
    model = nn.Sequential(nn.ReLU(), nn.Linear(6, 6))
    fully_shard(model[1], mesh=world_mesh(world_size))
    fully_shard(model, mesh=world_mesh(world_size))
    with Collectives() as seen:
        model.unshard(async_op=True).wait()
        assert model.unshard() is None
        model.reshard()
    assert seen.count("gather") == 0


@multirank(2)
@both
def test_requires_grad_set_on_the_sharded_parameter_shows_on_the_full_one(
    rank: int, world_size: int, library: str
) -> None:
    model = shard(library, build())
    for flag in (False, True):
        model.head.weight.requires_grad_(flag)
        model.unshard()
        assert model.head.weight.requires_grad is flag and model.head.bias.requires_grad
        model.reshard()


@multirank(2)
@both
def test_reshard_between_forward_and_backward(rank: int, world_size: int, library: str) -> None:
    expected = averaged(build(), world_size)
    model = shard(library, build(), reshard_after_forward=False)
    with Collectives() as seen:
        loss = loss_of(model(data(rank)))
        assert seen.count("gather") == 4
        for module in (model, *model.blocks):
            module.reshard()
        assert all(isinstance(p, DTensor) for p in model.parameters())
        loss.backward()
        assert seen.count("gather") == 4
    check(gradients(model), expected)


@multirank(2)
@both
def test_unsharded_for_a_method_of_ones_own(rank: int, world_size: int, library: str) -> None:
    """Evaluation code that reads weights outside forward: unshard, use, reshard."""
    model, plain = shard(library, build()), build()
    with torch.no_grad():
        model.unshard()
        found = data(rank) @ model.head.weight.T
        model.reshard()
    torch.testing.assert_close(found, data(rank) @ plain.head.weight.T)


@multirank(2)
@ours
def test_weights_that_change_while_unsharded_are_seen(rank: int, world_size: int, library: str) -> None:
    """Where FSDP2 goes on with the weights gathered before the optimizer stepped."""
    model, plain = shard(library, build()), build()
    model.set_reshard_after_backward(False)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, plain)]
    for micro in range(3):
        for name, gradient in averaged(
            plain, world_size, loss=lambda m, r, _, i=micro: loss_of(m(data(r, i)))
        ).items():
            plain.get_parameter(name).grad = gradient
        model.unshard()
        backward(model, rank, micro)
        model.unshard()  # held over the step
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            torch.testing.assert_close(model(data(rank)), plain(data(rank)), rtol=1e-5, atol=1e-6)
