"""``fully_shard`` and training where torch's default device is another, and parameters without elements."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shardwright as sw
from shardwright.engine.front import api
from tests.engine.kit.models import build, full, loss_of, tokens
from tests.support import multirank, world_mesh

LAYOUTS = ("per_parameter", "ragged", sw.Ragged("element"))


@contextmanager
def default_device(device: str) -> Any:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@multirank(2)
def test_sharding_where_the_default_device_is_meta(rank: int, world_size: int) -> None:
    """The communicators that are made there serve later models, too, so that none may be left on meta."""
    ways: list[Callable[[str], AbstractContextManager[Any]]] = [torch.device, default_device]
    mesh = world_mesh(2)
    for way, layout in itertools.product(ways, LAYOUTS):
        api._communicators.clear()
        plain = build()
        state = plain.state_dict()
        with way("meta"):
            model: Any = build()
            for block in model.blocks:
                sw.fully_shard(block, mesh=mesh, layout=layout)
            sw.fully_shard(model, mesh=mesh, layout=layout)
        model.to_empty(device="cpu")
        model.load_state_dict(state)
        other = sw.fully_shard(copy.deepcopy(plain), mesh=mesh)
        batch = tokens(0, 0, rank)
        expected = loss_of(plain(batch), batch)
        for each in (model, other):
            loss = loss_of(each(batch), batch)
            torch.testing.assert_close(loss, expected)
            loss.backward()
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(full(p.grad), full(q.grad))


@multirank(2)
def test_whole_steps_where_the_default_device_is_meta(rank: int, world_size: int) -> None:
    """The first call and all that follows: nothing that the engine makes goes by the default."""
    for layout, strategy in (("per_parameter", "zero3"), ("ragged", "zero1")):
        api._communicators.clear()
        plain, model = build(), build()
        expected = torch.optim.SGD(plain.parameters(), lr=0.1)
        batches = [tokens(0, 0, r) for r in range(world_size)]
        mesh = world_mesh(2)
        with default_device("meta"):
            for block in model.blocks:
                sw.fully_shard(block, mesh=mesh, layout=layout, strategy=strategy, reshard_after_forward=None)
            sw.fully_shard(model, mesh=mesh, layout=layout, strategy=strategy)
            optimizer = sw.fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            for _ in range(2):
                loss_of(model(batches[rank]), batches[rank]).backward()
                sw.clip_grad_norm_(model.parameters(), 1e6)
                optimizer.step()
                optimizer.zero_grad()
        for _ in range(2):
            for batch in batches:
                (loss_of(plain(batch), batch) / world_size).backward()
            expected.step()
            expected.zero_grad()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(full(p.detach()), q.detach())


class Empty(nn.Module):
    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, other: torch.dtype | None) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.empty(*shape, dtype=dtype))
        if other is not None:
            self.other = nn.Parameter(torch.ones(3, 3, dtype=other))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x @ self.other.to(x.dtype) if hasattr(self, "other") else x
        return x + self.empty.sum().to(x.dtype)


@multirank(2)
def test_a_parameter_without_elements_alone_in_its_unit_or_dtype(rank: int, world_size: int) -> None:
    kinds = ((torch.float32, None), (torch.float64, torch.float32), (torch.float32, torch.float32))
    for shape, layout, (dtype, other) in itertools.product(((0,), (0, 4), (4, 0)), LAYOUTS, kinds):
        module = Empty(shape, dtype, other)
        x = torch.randn(2, 3, requires_grad=True)
        expected = module(x).detach()
        sw.fully_shard(module, layout=layout)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        for step in range(2):
            out = module(x)
            if not step:
                torch.testing.assert_close(out, expected)
            out.sum().backward()
            assert tuple(module.empty.grad.shape) == shape and module.empty.grad.dtype == dtype
            optimizer.step()
            optimizer.zero_grad()
        state = module.state_dict()
        assert tuple(state["empty"].full_tensor().shape) == shape
        module.load_state_dict(state)
        dist.barrier()
