"""Optimizers that step in backward: the bits of the ordinary step, and gradients that are gone at once."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.utils.checkpoint import checkpoint

import shardwright as sw
from shardwright.engine import SteppedGradient
from tests.engine.kit.models import Model, build, full, loss_of, shard, tokens
from tests.engine.kit.offload import set_more
from tests.engine.kit.places import On, on, on_meshes
from tests.support import multirank
from tests.support.matrix import select, together

FP32, BF16 = torch.float32, torch.bfloat16

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=0.01, foreach=True),
    "AdamW-fused": lambda ps: torch.optim.AdamW(ps, lr=0.01, fused=True),
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True),
    "Adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.01),
}
#: Micro-batches of a step, and which of the three ways says that more come.
ACCUMULATION = ["none", "not synced", "not last", "not all-reduced"]


class Row(NamedTuple):
    at: On
    layout: str
    memory: str
    reduce: torch.dtype | None
    accumulation: str
    optimizer: str


def rows() -> list[Row]:
    at = [
        *on("ddp", (2,)),
        *on("zero1", (2, 2)),
        *on("zero2", (3,)),
        *on("zero3", (1,), (4,)),
        *on("hsdp", (2, 2)),
        *on("hfsdp", (2, 2)),
    ]
    memory = ["dynamic", "arena"]
    product = itertools.product(
        at, ["per_parameter", "ragged"], memory, [None, FP32], ACCUMULATION, OPTIMIZERS
    )
    return select([Row(*row) for row in product], lambda row, strength: together(strength, *row))


def train(model: Model, optimizer: Any, rank: int, steps: int = 3, way: str = "none", first: int = 0) -> None:
    for step in range(first, first + steps):
        micros = 1 if way == "none" else 2
        for micro in range(micros):
            set_more(model, way, micro + 1 < micros)
            batch = tokens(step, micro, rank)
            loss_of(model(batch), batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_same(one: nn.Module, other: nn.Module) -> None:
    for (name, p), q in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(p.to_local(), q.to_local()), name


def no_gradients(model: nn.Module) -> bool:
    return all(p.grad is None or type(p.grad) is SteppedGradient for p in model.parameters())


@on_meshes(rows())
def test_bits_of_the_ordinary_step(rank: int, world_size: int, at: On, layout: str, memory: str,
                                   reduce: torch.dtype | None, accumulation: str, optimizer: str) -> None:  # fmt: skip
    models = []
    for wrap in (sw.fully_shard_optimizer, sw.optim.in_backward):
        policy = sw.MixedPrecisionPolicy(param_dtype=BF16 if reduce else None, reduce_dtype=reduce)
        options: dict[str, Any] = {
            "mesh": at.mesh,
            "strategy": at.strategy,
            "layout": layout,
            "mp_policy": policy,
        }
        model = build()
        for block in model.blocks:
            sw.fully_shard(block, **options)
        sw.fully_shard([model.norm, model.head], **options)
        sw.fully_shard(model, memory=memory, **options)
        made = wrap(OPTIMIZERS[optimizer](model.parameters()))
        scheduler = torch.optim.lr_scheduler.ExponentialLR(made, 0.5)
        for step in range(2):
            train(model, made, rank, 1, accumulation, step)
            scheduler.step()
        models.append(model)
    assert_same(*models)


def pair(
    rank: int, make: Callable[[], Any] = build, optimizer: str = "AdamW", **options: Any
) -> list[tuple[Any, Any]]:
    """A model with the ordinary optimizer, and one with the optimizer in backward."""
    made = []
    for wrap in (sw.fully_shard_optimizer, sw.optim.in_backward):
        torch.manual_seed(0)
        model = shard(make(), **options)
        made.append((model, wrap(OPTIMIZERS[optimizer](model.parameters()))))
    return made


@multirank(2)
def test_steps_and_frees_gradients_within_backward(rank: int, world_size: int) -> None:
    (plain, ordinary), (model, optimizer) = pair(rank)
    assert isinstance(optimizer, torch.optim.AdamW) and sw.optim.in_backward(optimizer) is optimizer
    for step in range(3):
        for each in (plain, model):
            batch = tokens(step, 0, rank)
            loss_of(each(batch), batch).backward()
        assert no_gradients(model) and not no_gradients(plain)
        ordinary.step()
        ordinary.zero_grad()
        assert_same(plain, model)  # without a call of step


@multirank(2)
def test_gradients_of_two_units_at_most(rank: int, world_size: int) -> None:
    """Bytes of gradient shards alive at once: of all units, or with the optimizer in backward of the largest ones."""
    from shardwright.engine.memory import Slab

    alive: dict[Any, int] = {}
    peak = 0
    lease, release = Slab.lease, Slab.release

    def leased(slab: Any) -> None:
        nonlocal peak
        lease(slab)
        if slab.kind == "gradients":
            alive[slab] = slab.nbytes
            peak = max(peak, sum(alive.values()))

    def released(slab: Any) -> None:
        release(slab)
        alive.pop(slab, None)

    patch = pytest.MonkeyPatch()
    with patch.context() as context:
        context.setattr(Slab, "lease", leased)
        context.setattr(Slab, "release", released)
        peaks = []
        for model, optimizer in pair(rank, lambda: Model(layers=5)):
            train(model, optimizer, rank, 1)
            peak = 0
            train(model, optimizer, rank, 1)
            peaks.append(peak)
            assert not alive
    # float32; rows padded to whole ones per rank, each chunk and the flags to 16 bytes; 12 rows of 7 are 6 per rank.
    shapes = [(7,), (7,), (12, 7), (12,), (7, 12)]
    block = sum(4 * -(-(-(-s[0] // 2) * math.prod(s[1:])) // 4) * 4 for s in shapes) + 4 * 8
    root = (
        sum(
            4 * -(-(-(-s[0] // 2) * math.prod(s[1:])) // 4) * 4 for s in [(11, 7), (7,), (7,), (11, 7), (11,)]
        )
        + 4 * 8
    )
    assert peaks == [5 * block + root, max(block, root)]


class Shared(nn.Module):
    """Blocks that run in an order of one's own, also twice, and an output matrix tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Model(layers=3)
        self.inner.head.weight = self.inner.embed.weight
        self.order = [0, 1, 2]
        self.recompute: bool | None = None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.inner.embed(tokens)
        for i in self.order:
            block = self.inner.blocks[i]
            h = block(h) if self.recompute is None else checkpoint(block, h, use_reentrant=self.recompute)
        return self.inner.head(self.inner.norm(h))


def shard_shared(model: Shared) -> Shared:
    for part in (*model.inner.blocks, model.inner.embed, model.inner.head):
        sw.fully_shard(part)
    return sw.fully_shard(model)


def shared_pair() -> list[tuple[Shared, Any]]:
    made = []
    for wrap in (sw.fully_shard_optimizer, sw.optim.in_backward):
        torch.manual_seed(0)
        model = shard_shared(Shared())
        made.append((model, wrap(OPTIMIZERS["AdamW"](model.parameters()))))
    return made


def run_shared(model: Shared, rank: int, step: int) -> torch.Tensor:
    batch = tokens(step, 0, rank)
    return loss_of(model(batch), batch)


@multirank(2)
def test_units_used_again_ties_frozen_and_unused_units(rank: int, world_size: int) -> None:
    """Each is stepped once, when no more gradients can come; what has none is left as it is."""
    (plain, ordinary), (model, _) = shared_pair()
    for step, (order, recompute, frozen, calls) in enumerate([
        ([0, 1, 2], None, False, 1),
        ([0, 1, 0, 2, 0], None, False, 1),  # twice and thrice in one forward
        ([0, 1], False, False, 2),  # two forwards of one backward; a block without gradients
        ([2, 1, 0, 1], False, False, 1),
        ([0, 1, 2], None, True, 2),
    ]):  # fmt: skip
        for each in (plain, model):
            each.order, each.recompute = order, recompute
            each.inner.blocks[1].requires_grad_(not frozen)
            sum(run_shared(each, rank, 10 * step + call) for call in range(calls)).backward()
        assert no_gradients(model)
        ordinary.step()
        ordinary.zero_grad()
        assert_same(plain, model)


@multirank(2)
def test_gradients_after_the_step_are_refused(rank: int, world_size: int) -> None:
    (_, _), (model, _) = shared_pair()
    loss = run_shared(model, rank, 0)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    model.zero_grad()
    one, other = run_shared(model, rank, 1), run_shared(model, rank, 2)
    one.backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()
    model.zero_grad()
    del loss, one, other  # while a graph lives, its units are stepped when backward ends
    model.order, model.recompute = [0, 1, 0], True  # the first one's gradients come in two backwards
    with pytest.raises(RuntimeError, match=r"'inner\.blocks\.0' came after its optimizer had stepped it"):
        run_shared(model, rank, 3).backward()


@multirank(2)
def test_several_backwards_for_one_step(rank: int, world_size: int) -> None:
    (plain, ordinary), (model, optimizer) = shared_pair()
    for each in (plain, model):
        each.set_is_last_backward(False)
        loss = run_shared(each, rank, 0)
        loss.backward(retain_graph=True)
        other = run_shared(each, rank, 1)
        loss.backward()
        each.set_is_last_backward(True)
        other.backward()
    ordinary.step()
    assert no_gradients(model)
    assert_same(plain, model)
    # Sums that no backward has reduced are stepped by step.
    for each, made in ((plain, ordinary), (model, optimizer)):
        made.zero_grad()
        each.set_requires_gradient_sync(False)
        run_shared(each, rank, 2).backward()
        made.step()
    assert_same(plain, model)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise ValueError("this backward fails")


@multirank(2)
def test_after_an_exception_training_goes_on(rank: int, world_size: int) -> None:
    """Parameters that backward had come through are stepped, the rest is not, and nothing is due later."""
    (_, _), (model, optimizer) = shared_pair()
    train_step = lambda step: run_shared(model, rank, step).backward()  # noqa: E731
    train_step(0)
    before = [full(p).clone() for p in model.parameters()]
    handle = model.inner.blocks[0].register_forward_hook(lambda module, args, output: Fails.apply(output))
    with pytest.raises(ValueError, match="this backward fails"):
        train_step(1)
    handle.remove()
    optimizer.zero_grad()
    model.zero_grad()
    moved = {
        name
        for (name, p), old in zip(model.named_parameters(), before, strict=True)
        if not torch.equal(full(p), old)
    }
    assert any(name.startswith("inner.blocks.2") for name in moved)
    assert not any(name.startswith("inner.blocks.0") for name in moved)
    with pytest.raises(IndexError):
        model(tokens(2, 0, rank) + 100)
    train_step(3)
    assert no_gradients(model)
    assert any(
        not torch.equal(full(p), old)
        for (name, p), old in zip(model.named_parameters(), before, strict=True)
        if name.startswith("inner.blocks.0")
    )


@multirank(2)
def test_state_is_that_of_the_ordinary_optimizer(rank: int, world_size: int) -> None:
    """By parameter name, in either direction, full and sharded, in the middle of training."""
    (plain, ordinary), (model, optimizer) = pair(rank)
    train(plain, ordinary, rank, 2)
    train(model, optimizer, rank, 2)
    one, other = optimizer.state_dict(), ordinary.state_dict()
    assert one["param_groups"] == other["param_groups"] and one["state"].keys() == other["state"].keys()
    for whole in (True, False):
        options = StateDictOptions(full_state_dict=whole)
        saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
        (fresh, renewed), (again, in_backward) = pair(rank)
        for target, made in ((fresh, renewed), (again, in_backward)):
            target.load_state_dict(copy.deepcopy(model.state_dict()))
            set_optimizer_state_dict(target, made, copy.deepcopy(saved), options=options)
            train(target, made, rank, 1, first=5)
        assert_same(fresh, again)
    train(plain, ordinary, rank, 1, first=5)
    assert_same(plain, fresh)
    assert sorted(saved["state"]) == sorted(name for name, _ in model.named_parameters())


@multirank(2)
def test_groups_optimizers_and_plain_parameters_beside_one_another(rank: int, world_size: int) -> None:
    models = []
    for wrap in (sw.fully_shard_optimizer, sw.optim.in_backward):
        plain = build()
        model = shard(plain, ignored_params={plain.norm.weight})
        names = dict(model.named_parameters())
        groups = [
            {"params": [p for n, p in names.items() if n.endswith("bias")], "weight_decay": 0.0},
            {"params": [p for n, p in names.items() if n.endswith("weight") and "blocks" in n], "lr": 0.05},
        ]
        rest = [p for n, p in names.items() if n.endswith("weight") and "blocks" not in n]
        made = [wrap(torch.optim.AdamW(groups, lr=0.01)), wrap(torch.optim.SGD(rest[:1], lr=0.3))]
        made[1].add_param_group({"params": rest[1:], "lr": 0.2})
        for step in range(2):
            batch = tokens(step, 0, 0)  # one batch, since nobody reduces the ignored parameter
            loss_of(model(batch), batch).backward()
            for optimizer in made:
                optimizer.step()
                optimizer.zero_grad()
        models.append(model)
    for (name, p), q in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert torch.equal(full(p), full(q)), name


@multirank(2)
def test_values_are_clipped_unit_by_unit(rank: int, world_size: int) -> None:
    models = []
    for clip_value in (None, 1e-3):
        model = shard(build())
        made = torch.optim.SGD(model.parameters(), lr=0.1)
        if clip_value is None:
            optimizer = sw.fully_shard_optimizer(made)
            batch = tokens(0, 0, rank)
            loss_of(model(batch), batch).backward()
            for p in model.parameters():
                p.grad.to_local().clamp_(-1e-3, 1e-3)
            optimizer.step()
        else:
            train(model, sw.optim.in_backward(made, clip_value=clip_value), rank, 1)
        models.append(model)
    assert_same(*models)


class Counting(torch.optim.SGD):
    """Counts its steps in a group and in an attribute, and steps as far as it has counted."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    p.data.add_(p.grad, alpha=-0.1 * self.steps * group["count"])


@multirank(1, 2)
def test_what_a_step_counts_is_counted_once(rank: int, world_size: int) -> None:
    models = []
    for wrap in (sw.fully_shard_optimizer, sw.optim.in_backward):
        model = shard(build())
        optimizer = wrap(Counting(model.parameters()), needs=1)
        train(model, optimizer, rank, 3)
        assert (optimizer.steps, optimizer.param_groups[0]["count"]) == (3, 3)
        models.append(model)
    assert_same(*models)


@multirank(2)
@pytest.mark.parametrize("layout", ["per_parameter", "ragged"])
def test_gradients_that_are_gone_are_not_taken_for_none(rank: int, world_size: int, layout: str) -> None:
    """torch's clipping would find a norm of 0, and go on without clipping anything."""
    model = shard(build(), layout=layout)
    optimizer = sw.optim.in_backward(torch.optim.SGD(model.parameters(), lr=0.1))
    batch = tokens(0, 0, rank)
    uses: list[Callable[[], Any]] = [
        lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True),
        lambda: torch.nn.utils.clip_grad_value_(model.parameters(), 1.0),
        lambda: [p.grad.mul_(0.5) for p in model.parameters() if p.grad is not None],
        lambda: model.head.weight.grad.full_tensor(),
        lambda: model.head.weight.grad.to_local(),
        lambda: model.head.weight.grad.sum().item(),
        lambda: sw.unsharded(model, with_grads=True).__enter__(),
    ]
    loss_of(model(batch), batch).backward()
    for use in uses:
        with pytest.raises(RuntimeError, match=r"of unit '\S+', of shape .* is gone: its optimizer has"):
            use()
    with pytest.raises((RuntimeError, TypeError)):  # of whichever tensor sees the two first
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert "SteppedGradient(shape=(11, 7)" in repr(model.head.weight.grad)
    assert sw.memory_report(model).gradients == 0
    torch._foreach_zero_(
        [plain := torch.ones(2), model.head.weight.grad]
    )  # as zero_grad of foreach and fused ones
    assert not plain.any()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)  # a copy, a conversion and further backwards are not uses
    copy.deepcopy(model)
    model.to(torch.float64)
    model.to(FP32)
    loss_of(model(batch), batch).backward()
    optimizer.step()
    assert all(p.grad is None for p in model.parameters())


@multirank(2)
def test_what_cannot_be_done_in_parts_is_refused(rank: int, world_size: int) -> None:
    model = shard(build())
    with pytest.raises(NotImplementedError, match="Muon needs whole tensors"):
        sw.optim.in_backward(sw.Muon(model.named_parameters(), lr=0.01))
    with pytest.raises(ValueError, match=r"None of the .* parameters of this SGD belongs"):
        sw.optim.in_backward(torch.optim.SGD(build().parameters(), lr=0.1))
    with pytest.raises(ValueError, match="clip_value must be positive"):
        sw.optim.in_backward(torch.optim.SGD(model.parameters(), lr=0.1), clip_value=0.0)
    hooked = torch.optim.SGD(model.parameters(), lr=0.1)
    hooked.register_step_post_hook(lambda *_: None)
    with pytest.raises(NotImplementedError, match="step hooks"):
        sw.optim.in_backward(hooked)
    sw.clip_grad_norm_(model.parameters(), 1.0)  # nothing steps it yet
    optimizer = sw.optim.in_backward(torch.optim.AdamW(model.parameters(), fused=True))
    with pytest.raises(RuntimeError, match="steps in backward"):
        sw.clip_grad_norm_(model.parameters(), 1.0)
    scaler = torch.amp.GradScaler("cpu")
    batch = tokens(0, 0, rank)
    scaler.scale(loss_of(model(batch), batch)).backward()
    with pytest.raises(RuntimeError, match="its optimizer has stepped in backward"):
        scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="Train without GradScaler"):
        scaler.step(optimizer)
    optimizer.register_step_pre_hook(lambda *_: None)
    with pytest.raises(NotImplementedError, match="step hooks"):
        optimizer.step()
    with pytest.raises(ValueError, match="Another ShardedAdamW steps"):
        sw.optim.in_backward(torch.optim.SGD(list(model.parameters())[:1], lr=0.1))
    optimizer.leave_backward()
    loss_of(model(batch), batch).backward()
    assert sw.clip_grad_norm_(model.parameters(), 1.0) > 0  # nobody steps it in backward any more
    sw.optim.in_backward(torch.optim.SGD(model.parameters(), lr=0.1))
