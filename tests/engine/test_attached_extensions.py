"""``fsdp_pre_all_gather`` that local tensors get after ``fully_shard``: attached to the objects, or by a class.

Weights are gathered in bfloat16 and computed with in float32; a plain model with rounded weights is what results are
compared with. Ranks have different data.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn

import shardwright as sw
from tests.engine.bfloat16_gathers import post_all_gather, pre_all_gather
from tests.engine.kit.models import full
from tests.engine.kit.torch_versions import subclasses_dispatch
from tests.support import multirank, world_mesh

Calls = list[str]


def attach(model: nn.Module, calls: Calls) -> None:
    """As instance methods of each weight's local tensor."""

    def before(local: Any, mesh: Any, size: Any, stride: Any, module: Any, policy: Any) -> Any:
        calls.append("pre")
        return pre_all_gather(local, mesh, size)

    def after(local: Any, outputs: Any, metadata: Any, dtype: Any, *, out: Any = None) -> Any:
        calls.append("post")
        return post_all_gather(outputs, dtype, out)

    for name, p in model.named_parameters():
        if name.endswith("weight"):
            local: Any = p._local_tensor  # type: ignore[attr-defined]
            local.fsdp_pre_all_gather = before.__get__(local)
            local.fsdp_post_all_gather = after.__get__(local)


def build(on_meta: bool = False, use_torch: bool = False, **options: Any) -> tuple[Any, nn.Sequential]:
    """Seven rows, so that ranks have different numbers of them."""

    def make() -> nn.Sequential:
        return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5))

    torch.manual_seed(0)
    plain = make()
    with torch.device("meta" if on_meta else "cpu"):
        model: Any = make()
    if not on_meta:
        model.load_state_dict(plain.state_dict())
    fully_shard: Any = torch_fsdp.fully_shard if use_torch else sw.fully_shard
    options = {"mesh": world_mesh(dist.get_world_size()), **options}
    for layer in (model[0], model[2], model):
        fully_shard(layer, **options)
    if on_meta:
        model.to_empty(device="cpu")
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            p.data.copy_(torch.distributed.tensor.distribute_tensor(q.detach(), p.device_mesh, p.placements))
    return model, plain


def data(step: int, rank: int) -> torch.Tensor:
    return torch.randn(3, 5, generator=torch.Generator().manual_seed(10 * step + rank))


def step_of(model: nn.Module, plain: nn.Module, step: int, rounded: bool, rank: int, world_size: int) -> None:
    """One step of both, and a comparison. Gradients at rounded weights change the weights as they are."""
    model(data(step, rank)).square().mean().backward()
    work = copy.deepcopy(plain)
    with torch.no_grad():
        for name, p in work.named_parameters():
            if rounded and name.endswith("weight"):
                p.copy_(p.bfloat16())
    for r in range(world_size):
        (work(data(step, r)).square().mean() / world_size).backward()
    with torch.no_grad():
        for p, q, w in zip(model.parameters(), plain.parameters(), work.parameters(), strict=True):
            torch.testing.assert_close(full(p.grad), w.grad)
            q -= 0.5 * w.grad
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    model.zero_grad()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(
            full(p.detach()), q.detach(), msg=lambda m, n=name: f"step {step}: {n}: {m}"
        )


@multirank(2)
def test_attached_to_local_tensors_before_the_first_forward(rank: int, world_size: int) -> None:
    for on_meta in (False, True):
        for use_torch in (True, False):
            model, plain = build(on_meta, use_torch)
            calls: Calls = []
            attach(model, calls)
            for step in range(3):
                calls.clear()
                step_of(model, plain, step, True, rank, world_size)
                assert sorted(calls) == ["post"] * 4 + ["pre"] * 4  # both weights, forward and backward


@multirank(3)
def test_attached_between_steps_and_with_other_strategies(rank: int, world_size: int) -> None:
    for options in ({}, {"strategy": "zero2"}, {"strategy": "zero1"}, {"reshard_after_forward": False}):
        model, plain = build(**options)
        calls: Calls = []
        for step in range(4):
            if step == 1:
                attach(model, calls)
            step_of(model, plain, step, step > 0, rank, world_size)
            assert bool(calls) == (step > 0)
            if step == 2:  # another of the unit's parameters is replaced, and the unit's memory made again
                calls.clear()
                for each in (model, plain):
                    each[0].bias = nn.Parameter(torch.ones(7))


class Halved(torch.Tensor):
    """A subclass that is put in the place of a local tensor. What is computed of it is plain."""

    calls: Calls

    def fsdp_pre_all_gather(self, mesh: Any, size: Any, stride: Any, module: Any, policy: Any) -> Any:
        self.calls.append("pre")
        return pre_all_gather(self.as_subclass(torch.Tensor), mesh, size)

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, dtype: Any, *, out: Any = None) -> Any:
        return post_all_gather(outputs, dtype, out)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") in ("to", "detach", "clone") and type(result) is torch.Tensor:
            result = result.as_subclass(cls)
            result.calls = args[0].calls
        return result


@multirank(2)
def test_local_tensors_replaced_by_those_of_a_class(rank: int, world_size: int) -> None:
    if not subclasses_dispatch:
        pytest.skip("in torch 2.11 operations on DTensors go past their subclasses")
    model, plain = build()
    calls: Calls = []
    for step in range(3):
        if step == 1:
            for layer in (model[0], model[2]):
                local = layer.weight._local_tensor.as_subclass(Halved)
                local.calls = calls
                layer.weight._local_tensor = local
        step_of(model, plain, step, step > 0, rank, world_size)
        assert bool(calls) == (step > 0)


@multirank(2)
def test_what_cannot_be_honoured_is_refused(rank: int, world_size: int) -> None:
    for layout in ("ragged", sw.Ragged("element")):
        model, _ = build(layout=layout)
        attach(model, [])
        with pytest.raises(
            NotImplementedError, match=r"parameter 'weight' of unit .*needs layout 'per_parameter'"
        ):
            model(data(0, rank))
    model, plain = build()
    attach(model, [])
    model(data(0, rank))
    with pytest.raises(RuntimeError, match=r"'weight' of unit '0' cannot be copied: fsdp_pre_all_gather"):
        copy.deepcopy(model)
    with pytest.raises(ValueError, match=r"'weight' cannot become torch.bfloat16: fsdp_pre_all_gather"):
        model.to(torch.bfloat16)
    model, plain = build()
    attach(model, [])
    for layer in (model[0], model[2]):
        del layer.weight._local_tensor.fsdp_post_all_gather
    with pytest.raises(ValueError, match=r"defines fsdp_pre_all_gather but not fsdp_post_all_gather"):
        model(data(0, rank))
    for layer in (model[0], model[2]):
        del layer.weight._local_tensor.fsdp_pre_all_gather
    step_of(model, plain, 0, False, rank, world_size)
    whole = nn.Linear(4, 4)
    whole.weight.fsdp_pre_all_gather = whole.weight.fsdp_post_all_gather = lambda *_: None  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"parameter 'weight' .*was attached to this object"):
        sw.fully_shard(whole)


@multirank(2)
@pytest.mark.parametrize("how", ["deleted", "assigned"])
def test_what_is_attached_no_longer_is_named(rank: int, world_size: int, how: str) -> None:
    model, _ = build()
    attach(model, [])
    model(torch.ones(2, 5))
    if how == "assigned":
        model.load_state_dict(model.state_dict(), assign=True)
    else:
        for p in model.parameters():
            p._local_tensor.__dict__.clear()
    with pytest.raises(RuntimeError, match="'weight' no longer has the attached fsdp_pre_all_gather"):
        model(torch.ones(2, 5))


@multirank(2)
def test_what_is_attached_on_some_ranks_only_is_named(rank: int, world_size: int) -> None:
    model, _ = build()
    if rank == 1:
        attach(model, [])
    named = (
        r"unit \d \('0'\) with fsdp_pre_all_gather on different parameters \(none on rank 0; some on rank 1\)"
    )
    with pytest.raises(RuntimeError, match=named):
        model(data(0, rank))
    if rank == 0:  # the message's way out
        attach(model, [])
    model(data(0, rank))
