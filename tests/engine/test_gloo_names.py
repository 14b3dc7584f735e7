"""The engine issues no collective on gloo whose name is stored on the heap, where gloo's threads would race for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.profiler import ProfilerActivity, profile

import shardwright as sw
from shardwright.engine.tensors.gathering import full_of, gathers_plainly
from tests.engine.kit.torch_versions import subclasses_dispatch
from tests.support import multirank, world_mesh

#: In gloo's own words ALLGATHER_COALESCED, ALLREDUCE_COALESCED, _REDUCE_SCATTER_BASE, _ALLREDUCE_SPARSE.
LONG = ("coalesced", "_reduce_scatter_base", "sparse")


@contextmanager
def watched() -> Iterator[set[str]]:
    """The names of the collectives that passed through torch's dispatcher, from C++ too."""
    names: set[str] = set()
    if dist.get_rank():  # all ranks issue the same, and recording takes time
        yield names
        return
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        yield names
    events = profiler.profiler.kineto_results.events()  # as recorded: making a tree of them takes seconds
    names.update(name for event in events if (name := event.name()).startswith("c10d::"))
    assert names


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(rank))
    model(x).square().sum().backward()
    sw.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


@multirank(2)
def test_watching_sees_what_torch_does(rank: int, world_size: int) -> None:
    tensor = distribute_tensor(torch.ones(4), world_mesh(2), [Shard(0)])
    with watched() as names:
        tensor.full_tensor()
    assert rank or any("coalesced" in name for name in names), names


SETTINGS: list[dict[str, Any]] = [
    {},
    {"layout": "ragged"},
    {"layout": sw.Ragged("element")},
    {
        "mp_policy": sw.MixedPrecisionPolicy(torch.bfloat16, torch.float32),
        "shard_placement_fn": lambda p: Shard(p.ndim - 1),
    },
    {"strategy": "zero1"},
    {"strategy": "hsdp", "mesh": True},
    {"strategy": "hfsdp", "mesh": True, "layout": "ragged"},
]


@pytest.mark.extensive("all of training, on a mesh")
@pytest.mark.skipif(not subclasses_dispatch, reason="there gradients are plain DTensors, which torch gathers")
@multirank(4)
def test_no_long_name_in_training_gathering_and_state_dicts(rank: int, world_size: int) -> None:
    for settings in SETTINGS:
        options = dict(settings)
        options["mesh"] = world_mesh(2, 2) if options.pop("mesh", False) else world_mesh(4)
        model, plain = build(), build()
        with watched() as names:
            for layer in model:
                sw.fully_shard(layer, **{k: v for k, v in options.items() if k != "memory"})
            sw.fully_shard(model, **options)
            optimizer = sw.fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
            for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                assert torch.equal(p.full_tensor(), q), settings
            step(model, optimizer, rank)
            whole = [p.full_tensor().detach() for p in model.parameters()]
            gradients = [p.grad.full_tensor() for p in model.parameters()]
            numbers = [p.grad.norm().item() for p in model.parameters()]
            with sw.unsharded(model, with_grads=True):
                assert all(torch.equal(p, w) for p, w in zip(model.parameters(), whole, strict=True))
                for p, g in zip(model.parameters(), gradients, strict=True):
                    assert torch.equal(p.grad, g), settings
            full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
            for value, w in zip(full.values(), whole, strict=True):
                assert type(value) is torch.Tensor and torch.equal(value, w), settings
            get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
            moments = [optimizer.state[p]["exp_avg"].full_tensor() for p in model.parameters()]
            set_model_state_dict(model, full, options=StateDictOptions(full_state_dict=True))
            model.load_state_dict(model.state_dict())
        assert [m.shape for m in moments] == [w.shape for w in whole]
        torch.testing.assert_close(
            numbers, [g.norm().item() for g in gradients], rtol=1e-5, atol=1e-6
        )  # norms of parts are summed in another order
        found = {name for name in names if any(part in name for part in LONG)}
        assert not found, (settings, found)


@multirank(4)
@pytest.mark.parametrize("shape", [(5, 6, 3), (1, 4, 4), (8, 2, 2), (0, 3, 2)])
def test_plain_gathers_equal_torch_s(rank: int, world_size: int, shape: tuple[int, ...]) -> None:
    source = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    meshes = {
        world_mesh(4): [(Shard(0),), (Shard(1),), (Shard(2),), (Replicate(),)],
        world_mesh(2, 2): [
            (Shard(0), Shard(0)), (Shard(1), Shard(0)), (Shard(1), Shard(1)), (Replicate(), Shard(2)),
            (Shard(0), Replicate()),
        ],
    }  # fmt: skip
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for mesh, every in meshes.items():
            for placements in every:
                tensor = distribute_tensor(source.to(dtype), mesh, placements, src_data_rank=None)
                assert gathers_plainly(tensor)
                assert torch.equal(full_of(tensor), tensor.full_tensor()), (mesh, placements)
    tensor = distribute_tensor(source, world_mesh(4), [Shard(0)], src_data_rank=None).requires_grad_()
    weights = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    (full_of(tensor) * weights).sum().backward()
    assert isinstance(tensor.grad, DTensor) and tensor.grad.placements == tensor.placements
    assert torch.equal(tensor.grad.full_tensor(), weights)
    assert not gathers_plainly(DTensor.from_local(source, world_mesh(4), [dist.tensor.Partial()]))
