"""Parameters on the meta device whose class has ``fsdp_pre_all_gather``: they are sharded first and get values later.

As float8 weights are made: a model on meta, its weights converted, ``fully_shard``, then memory and values. Weights are
gathered in bfloat16 and computed with in float32; a plain model with rounded weights is what results are compared with.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import distribute_tensor
from torch.utils._pytree import tree_map_only

import shardwright as sw
from tests.engine.bfloat16_gathers import post_all_gather, pre_all_gather
from tests.support import multirank, world_mesh

_aten = torch.ops.aten


class Rounded(torch.Tensor):
    """Holds one tensor, and travels in bfloat16."""

    inner: torch.Tensor
    KEEPS = (
        _aten.detach, _aten.empty_like, _aten.slice, _aten.clone, _aten.copy_, _aten._to_copy, _aten.view,
        _aten.as_strided, _aten.new_zeros, _aten.fill_, _aten.uniform_,
    )  # fmt: skip

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain_args, plain_kwargs = tree_map_only(Rounded, lambda t: t.inner, (args, kwargs or {}))
        out = func(*plain_args, **plain_kwargs)
        if func._schema.name.endswith("_") and isinstance(args[0], Rounded):
            return args[0]
        return tree_map_only(torch.Tensor, cls, out) if func.overloadpacket in cls.KEEPS else out

    def fsdp_pre_all_gather(self, mesh: Any, size: torch.Size, stride: Any, module: Any, policy: Any) -> Any:
        return pre_all_gather(self.inner, mesh, size)

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, dtype: Any, *, out: Any = None) -> Any:
        return post_all_gather(outputs, dtype, out)


def make() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5))


def build(**options: Any) -> Any:
    with torch.device("meta"):
        model: Any = make()
    for layer in (model[0], model[2]):
        layer.weight = nn.Parameter(Rounded(layer.weight.detach()))
    for module in (model[0], model[2], model):
        sw.fully_shard(module, mesh=world_mesh(dist.get_world_size()), **options)
    return model


def inner(p: Any) -> torch.Tensor:
    local = p._local_tensor
    return local.inner if isinstance(local, Rounded) else local


def part(value: torch.Tensor, p: Any) -> torch.Tensor:
    return distribute_tensor(value.detach(), p.device_mesh, p.placements).to_local()


def data(step: int, rank: int) -> torch.Tensor:
    return torch.randn(3, 5, generator=torch.Generator().manual_seed(10 * step + rank))


def train(model: nn.Module, plain: nn.Module, rank: int, world_size: int) -> None:
    for step in range(2):
        model(data(step, rank)).square().mean().backward()
        work = copy.deepcopy(plain)
        with torch.no_grad():
            for name, p in work.named_parameters():
                if name.endswith("weight"):
                    p.copy_(p.bfloat16())
        for r in range(world_size):
            (work(data(step, r)).square().mean() / world_size).backward()
        torch.optim.SGD(model.parameters(), lr=0.5).step()
        model.zero_grad()
        with torch.no_grad():
            for (name, p), q, w in zip(
                model.named_parameters(), plain.parameters(), work.parameters(), strict=True
            ):
                assert w.grad is not None
                q -= 0.5 * w.grad
                torch.testing.assert_close(inner(p), part(q, p), msg=lambda m, n=name: f"{n}: {m}")


@multirank(2)
def test_values_come_after_sharding(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    start = make()
    for options, ways in (({}, ("copy", "load", "materialize")), ({"strategy": "zero1"}, ("load",))):
        for way in ways:
            model, plain = build(**options), copy.deepcopy(start)
            with pytest.raises(RuntimeError, match=r"'weight' of unit .*no values|weight.*meta"):
                model(data(0, rank))
            if way == "materialize":
                sw.materialize(model)
                assert all(isinstance(model[i].weight._local_tensor, Rounded) for i in (0, 2))
                with torch.no_grad():
                    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                        values = [torch.empty(0)] * world_size
                        dist.all_gather_object(values, inner(p))
                        q.copy_(torch.cat(values)[: len(q)])
                assert plain[0].weight.std() > 0.1
            else:
                model.to_empty(device="cpu")
                assert all(isinstance(model[i].weight._local_tensor, Rounded) for i in (0, 2))
                with torch.no_grad():
                    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                        if way == "copy":
                            p.copy_(distribute_tensor(q.detach(), p.device_mesh, p.placements))
                if way == "load":
                    model.load_state_dict(plain.state_dict())
            train(model, plain, rank, world_size)


class Composite(Rounded):
    """As a quantised weight: made of another tensor, and of a class without ``fsdp_pre_all_gather``."""

    fsdp_pre_all_gather = fsdp_post_all_gather = property()  # type: ignore[assignment]

    def __tensor_flatten__(self) -> Any:
        return ["inner"], None


@multirank(2)
def test_composite_weights_without_the_protocol_are_refused(rank: int, world_size: int) -> None:
    mesh = world_mesh(world_size)
    message = r"'weight' of shape \(7, 5\).* is a Composite, .*other tensors \(inner\).*ignored_params"
    for layout in ("per_parameter", "ragged"):
        layer: Any = nn.Linear(5, 7)
        layer.weight = nn.Parameter(Composite(layer.weight.detach()), requires_grad=False)
        with pytest.raises(ValueError, match=message):
            sw.fully_shard(layer, mesh=mesh, layout=layout)
        assert type(layer) is nn.Linear and isinstance(layer.weight, Composite)
        sw.fully_shard(layer, mesh=mesh, layout=layout, ignored_params={layer.weight})
        assert isinstance(layer.weight, Composite)
        sharded: Any = sw.fully_shard(nn.Linear(5, 7), mesh=mesh, layout=layout)
        sharded(data(0, rank))
        sharded.weight = nn.Parameter(Composite(torch.ones(7, 5)), requires_grad=False)
        with pytest.raises(
            ValueError, match=r"'weight' of unit 'Linear' of shape .* is a Composite, .*ignored_params"
        ):
            sharded(data(0, rank))
