"""Uses that once gave wrong numbers, a crash or a hang: now right, or refused by name."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.engine import UNIT
from tests.engine.kit.averaged import backward, check_gradients, expected_gradients
from tests.engine.kit.models import Model, Reference, build, full, loss_of, shard, tokens
from tests.support import multirank


class Gated(nn.Module):
    """Two linear layers, of which the second is used or not."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        x = x + torch.tanh(self.always(x))
        return x + torch.tanh(self.sometimes(x)) if both else x


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Gated() for _ in range(4))

    def forward(self, x: torch.Tensor, skip: int) -> torch.Tensor:
        for i, block in enumerate(self.blocks):
            x = block(x, i != skip)
        return x


@multirank(2, 3)
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("hold", [True, False])
def test_ranks_that_leave_out_different_parameters(
    rank: int, world_size: int, reshard: bool, hold: bool
) -> None:
    """Each rank skips a layer in another block; reductions must pair up and count zeros."""
    torch.manual_seed(0)
    plain = Stack()
    inputs = [[torch.randn(3, 6) for _ in range(world_size)] for _ in range(2)]
    for micro in inputs:
        for r, x in enumerate(micro):
            (plain(x, r + 1).square().mean() / world_size).backward()
    expected = [p.grad for p in plain.parameters()]
    plain.zero_grad()
    for block in plain.blocks:
        sw.fully_shard(block, reshard_after_forward=reshard)
    model = sw.fully_shard(plain)
    for i, micro in enumerate(inputs):
        model.set_requires_gradient_sync(not hold or i == 1)
        model(micro[rank], rank + 1).square().mean().backward()
    check_gradients(model, expected)


@multirank(2)
def test_backward_that_enters_a_unit_unseen_is_refused(rank: int, world_size: int) -> None:
    aside = []

    class Aside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.main, self.side = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.main(x)
            aside.append(self.side(y).sum())
            return y

    torch.manual_seed(0)
    model = nn.Sequential(Aside(), nn.Linear(4, 4))
    sw.fully_shard(model[0])
    sw.fully_shard(model)
    y = model(torch.randn(2, 4))
    with pytest.raises(RuntimeError, match="Backward read weights of unit '0'"):
        (y.sum() + aside[0]).backward()


def fail_once(module: nn.Module) -> None:
    def fail(*_: object) -> None:
        handle.remove()
        raise KeyboardInterrupt

    handle = module.register_full_backward_hook(fail)


@multirank(2)
@pytest.mark.parametrize("clear", ["zero_grad", "none"])
def test_a_failed_backward_is_forgotten_by_clearing_gradients(rank: int, world_size: int, clear: str) -> None:
    model = shard(build())
    backward(model, rank)
    fail_once(model.blocks[0].up)
    with pytest.raises(KeyboardInterrupt):
        backward(model, rank, 3)
    if clear == "zero_grad":
        model.zero_grad()
    else:
        for p in model.parameters():
            p.grad = None
    backward(model, rank)
    check_gradients(model, expected_gradients(world_size))


@multirank(2)
def test_another_graphs_backward_after_a_failed_one(rank: int, world_size: int) -> None:
    model = shard(build())
    batch, other = tokens(0, 0, rank), tokens(4, 0, rank)
    loss, doomed = loss_of(model(batch), batch), loss_of(model(other), other)
    fail_once(model.blocks[0].down)
    handle = model.blocks[0].up.register_full_backward_hook(lambda *_: (_ for _ in ()).throw(KeyError()))
    with pytest.raises((KeyboardInterrupt, KeyError)):
        loss_of(model(other), other).backward()
    handle.remove()
    del doomed
    model.zero_grad()
    loss.backward()
    check_gradients(model, expected_gradients(world_size))


@multirank(2)
def test_held_gradients_survive_a_failed_backward_and_not_zero_grad(rank: int, world_size: int) -> None:
    model = shard(build())
    model.set_requires_gradient_sync(False)
    backward(model, rank, 0, 0)
    fail_once(model.blocks[1].down)
    with pytest.raises(KeyboardInterrupt):
        backward(model, rank, 9)
    model.set_requires_gradient_sync(True)
    backward(model, rank, 0, 1)
    held = {n: full(p.grad) for n, p in model.named_parameters()}
    expected = expected_gradients(world_size, micros=2)
    torch.testing.assert_close(held["embed.weight"], expected[0], rtol=1e-5, atol=1e-6)
    model.zero_grad()
    optimizer = sw.fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for zero_grad in (model.zero_grad, optimizer.zero_grad):
        model.set_requires_gradient_sync(False)
        backward(model, rank, 5)
        zero_grad()
        model.set_requires_gradient_sync(True)
        backward(model, rank)
        check_gradients(model, expected_gradients(world_size))
        model.zero_grad()


@multirank(2)
def test_unsharded_by_hand_and_stepped_since(rank: int, world_size: int) -> None:
    model, reference = shard(build()), build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    backward(model, rank)
    model.blocks[0].unshard()
    optimizer.step()
    for q, gradient in zip(reference.parameters(), expected_gradients(world_size), strict=True):
        q.data.sub_(0.5 * gradient)
    batch = tokens(1, 0, rank)
    torch.testing.assert_close(model(batch), reference(batch), rtol=1e-5, atol=1e-6)


@multirank(2)
@pytest.mark.parametrize("keep", [True, False])
def test_backward_over_weights_that_changed_is_refused_as_by_torch(
    rank: int, world_size: int, keep: bool
) -> None:
    model, reference = shard(build(), reshard_after_forward=not keep), build()
    model.set_reshard_after_backward(not keep)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    backward(model, rank)
    batch = tokens(1, 0, rank)
    loss = loss_of(model(batch), batch)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    optimizer.zero_grad()
    reference.load_state_dict({k: full(v) for k, v in model.state_dict().items()})
    torch.testing.assert_close(model(batch), reference(batch))  # a kept slab is not taken for new


@multirank(2)
def test_complex_parameters_keep_their_imaginary_part(rank: int, world_size: int) -> None:
    class Rotate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(3, dtype=torch.complex64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.w).abs().square().sum()

    torch.manual_seed(0)
    plain = Rotate()
    inputs = [torch.randn(3, dtype=torch.complex64) for _ in range(world_size)]
    (sum(plain(x) for x in inputs) / world_size).backward()
    expected = plain.w.grad.clone()
    plain.w.grad = None
    model = sw.fully_shard(plain, mp_policy=sw.MixedPrecisionPolicy(reduce_dtype=torch.float32))
    model(inputs[rank]).backward()
    torch.testing.assert_close(full(model.w.grad), expected)


@multirank(4)
def test_clipping_float64_with_more_ranks_than_rows(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model = sw.fully_shard(nn.Linear(5, 2, dtype=torch.float64))
    model(torch.ones(1, 5, dtype=torch.float64)).sum().backward()
    norm = sw.clip_grad_norm_(model.parameters(), 1e9)
    assert norm.dtype == torch.float64 and norm.item() == pytest.approx(math.sqrt(12))


@multirank(2)
def test_an_optimizer_that_could_not_begin_its_step_is_unchanged(rank: int, world_size: int) -> None:
    model = shard(build())
    optimizer = sw.fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    backward(model, rank)
    optimizer.step()
    last = list(model.parameters())[-1]
    good = optimizer.state[last]["momentum_buffer"]
    optimizer.state[last]["momentum_buffer"] = good.full_tensor()
    with pytest.raises(
        ValueError, match=r"parameter .* of .* is a plain tensor, but its parameter is sharded"
    ):
        optimizer.step()
    assert optimizer.param_groups[0]["params"][0] is next(iter(model.parameters()))
    optimizer.state[last]["momentum_buffer"] = good
    optimizer.step()


@multirank(2)
def test_the_first_call_may_be_in_inference_mode(rank: int, world_size: int) -> None:
    model = shard(build())
    with torch.inference_mode():
        model(tokens(0, 0, rank))
    backward(model, rank)
    check_gradients(model, expected_gradients(world_size))


@multirank(2)
def test_double_backward_is_refused(rank: int, world_size: int) -> None:
    model = shard(build())
    batch = tokens(0, 0, rank)
    with pytest.raises(RuntimeError, match="create_graph=True reached unit 'Model'"):
        loss_of(model(batch), batch).backward(create_graph=True)


@multirank(2)
def test_post_accumulate_hooks_of_sharded_parameters_are_called(rank: int, world_size: int) -> None:
    model = shard(build())
    seen: list[torch.Size] = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda q: seen.append(q.grad.shape))
    backward(model, rank)
    assert sorted(seen) == sorted(p.shape for p in model.parameters())


@multirank(2)
def test_inner_modules_come_first(rank: int, world_size: int) -> None:
    model: Model = build()
    sw.fully_shard(model)
    with pytest.raises(ValueError, match=r"belongs to a unit already.*inner modules first"):
        sw.fully_shard(model.blocks[0])


@multirank(2)
def test_opaque_outputs_beside_tensors_are_looked_into(rank: int, world_size: int) -> None:
    class Extra:
        pass

    class Two(nn.Linear):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Extra]:
            extra = Extra()
            extra.loss = super().forward(x * 2).square().sum()
            return super().forward(x), extra

    torch.manual_seed(0)
    plain, x = Two(3, 3), torch.ones(1, 3)
    y, extra = plain(x)
    (y.sum() + extra.loss).backward()
    expected = plain.weight.grad.clone()
    plain.zero_grad()
    model = sw.fully_shard(plain, reshard_after_forward=True)
    y, extra = model(x)
    (y.sum() + extra.loss).backward()
    torch.testing.assert_close(full(model.weight.grad), expected)
    assert not getattr(model, UNIT).weights.gathered


@multirank(2)
def test_an_output_of_any_kind_is_fine_where_no_graph_is_recorded(rank: int, world_size: int) -> None:
    """A frozen teacher or tokenizer in training, and one with a graph from which no backward starts."""

    class Answer:
        def __init__(self, x: torch.Tensor) -> None:
            self.words = str(x.tolist())

    class Teacher(nn.Linear):
        def forward(self, x: torch.Tensor) -> Answer:
            return Answer(super().forward(x))

    teacher = sw.fully_shard(Teacher(3, 3).requires_grad_(False))
    assert teacher(torch.ones(1, 3)).words
    assert sw.fully_shard(Teacher(3, 3))(torch.ones(1, 3)).words


@multirank(2)
def test_ranks_that_reduce_different_units_are_named(rank: int, world_size: int) -> None:
    """Gathers agree, since nothing is gathered in backward; equal sizes would pair up without an error."""

    class Fork(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
            return [part(x) for part in self.parts]

    torch.manual_seed(0)
    model = Fork()
    for part in model.parts:
        sw.fully_shard(part, reshard_after_forward=False)
    sw.fully_shard(model)
    outputs = model(torch.randn(2, 4))
    used = [y for i, y in enumerate(outputs) if i != 2 * rank]
    with pytest.raises(
        RuntimeError,
        match=r"diverged: rank 0 reduces the gradients of unit 3 .*; rank 1 reduces the gradients of unit 2",
    ):
        sum(y.sum() for y in used).backward()


@multirank(2)
def test_the_reference_itself_averages_over_ranks(rank: int, world_size: int) -> None:
    plain = build()
    reference = Reference(plain, torch.float32, torch.float32)
    reference.backward(2, [[tokens(0, 0, r) for r in range(2)]])
    loss = sum(loss_of(plain(tokens(0, 0, r)), tokens(0, 0, r)) for r in range(2)) / 2
    loss.backward()
    for p, q in zip(plain.parameters(), reference.model.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


@multirank(2)
def test_weights_swapped_out_and_in_again(rank: int, world_size: int) -> None:
    model, reference = shard(build()), build()
    batch = tokens(0, 0, rank)
    expected = reference(batch)
    kept = {n: p.data for n, p in model.named_parameters()}
    for p in model.parameters():
        p.data = p.data * 0.5
    assert not torch.allclose(model(batch), expected)
    for n, p in model.named_parameters():
        p.data = kept[n]
    torch.testing.assert_close(model(batch), expected)
    before = model.head.weight
    model.head.weight = nn.Parameter(torch.zeros(11, 7))
    assert not torch.allclose(model(batch), expected)
    model.head.weight = before
    torch.testing.assert_close(model(batch), expected)
    assert model.head.weight is before


@multirank(2)
def test_functional_call_leaves_the_model_alone(rank: int, world_size: int) -> None:
    model, reference = shard(build()), build()
    batch = tokens(0, 0, rank)
    halves = {n: p.detach() * 0.5 for n, p in reference.named_parameters()}
    torch.testing.assert_close(
        torch.func.functional_call(model, halves, batch), torch.func.functional_call(reference, halves, batch)
    )
    torch.testing.assert_close(model(batch), reference(batch))


class Caching(nn.Module):
    """Leaves a tensor in a cache that it is given, from which a later call computes."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.value = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, cache: list[torch.Tensor]) -> torch.Tensor:
        cache.append(torch.tanh(self.key(x)))
        return self.value(x) + sum(cache)


@multirank(2)
def test_backward_through_a_cache_of_an_earlier_call(rank: int, world_size: int) -> None:
    def gradients(model: nn.Module, r: int) -> list[torch.Tensor]:
        cache: list[torch.Tensor] = []
        for step in range(2):
            y = model(torch.full((2, 4), 0.1 * (r + 1) * (step + 1)), cache)
        (y.square().sum() / (1 if isinstance(model, sw.FSDPModule) else world_size)).backward()
        return [p.grad for p in model.parameters()]

    torch.manual_seed(0)
    plain = Caching()
    model = sw.fully_shard(copy.deepcopy(plain), reshard_after_forward=True)
    for r in range(world_size):
        expected = gradients(plain, r)
    for ours, theirs in zip(gradients(model, rank), expected, strict=True):
        torch.testing.assert_close(full(ours), theirs)


@multirank(2)
def test_gradients_taken_inside_forward(rank: int, world_size: int) -> None:
    class Forces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(3, 3), nn.Linear(3, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                energy = self.outer(torch.tanh(self.inner(x))).sum()
                (force,) = torch.autograd.grad(energy, x)
            return self.outer(force)

    torch.manual_seed(0)
    plain = Forces()
    model = copy.deepcopy(plain)
    sw.fully_shard(model.inner)
    sw.fully_shard(model)
    x = torch.full((2, 3), 0.5 + rank)
    torch.testing.assert_close(model(x), plain(x))


@multirank(2)
def test_a_gather_that_failed_is_not_taken_for_done(rank: int, world_size: int) -> None:
    model = shard(build(), reshard_after_forward=True)
    batch, other = tokens(0, 0, rank), tokens(4, 0, rank)
    loss, doomed = loss_of(model(batch), batch), loss_of(model(other), other)
    comm = getattr(model, UNIT).comm

    def fail(*_: object) -> None:
        del comm.all_gather  # all models over these ranks share it
        raise torch.OutOfMemoryError("no memory for the gather")

    comm.all_gather = fail
    with pytest.raises(torch.OutOfMemoryError):
        doomed.backward()
    model.zero_grad()
    loss.backward()
    check_gradients(model, expected_gradients(world_size))


@multirank(2)
def test_views_of_weights_in_attributes_are_refused(rank: int, world_size: int) -> None:
    class Prefix(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.prefix = self.weight[:2]
            return super().forward(x)

    model = sw.fully_shard(Prefix(4, 4))
    with pytest.raises(RuntimeError, match=r"Unit 'Prefix'.*keeps a view of its weights, of shape \(2, 4\)"):
        model(torch.ones(1, 4))


@multirank(2)
def test_modules_put_in_after_sharding_are_sharded(rank: int, world_size: int) -> None:
    """Modules replaced or added after sharding are sharded with the unit, not trained by each rank alone."""
    model = shard(build())
    torch.manual_seed(1)
    model.head = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 11))
    backward(model, rank)
    for p in model.parameters():
        assert hasattr(p, "full_tensor") and p.grad is not None
