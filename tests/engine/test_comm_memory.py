"""Memory from the process group and symmetric memory: refused by gloo, and used where a backend has it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import shardwright as sw
from shardwright.engine import comm
from tests.engine.kit.models import Model, build, loss_of, tokens
from tests.engine.kit.training import units_of
from tests.support import multirank


class Backend:
    """Allocates, as NCCL's does, and remembers what there is of it."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return True

    def allocate_tensor(self, nbytes: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        memory = torch.empty(nbytes, dtype=dtype, device=device)
        self.sizes.append(nbytes)
        self.alive.add(memory)
        return memory

    def holds(self, address: int) -> bool:
        return any(m.data_ptr() <= address < m.data_ptr() + m.nbytes for m in self.alive)


@contextmanager
def allocating() -> Iterator[Backend]:
    backend, original = Backend(), comm.memory.backend_for
    comm.memory.backend_for = lambda group, device: backend
    try:
        yield backend
    finally:
        comm.memory.backend_for = original


def sharded(memory: Any) -> Model:
    model = build(layers=3)
    for block in model.blocks:
        sw.fully_shard(block)
    return sw.fully_shard(model, memory=memory)


def train(model: Model, rank: int, steps: int) -> list[float]:
    optimizer = sw.fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    losses = []
    for step in range(steps):
        batch = tokens(step, 0, rank)
        loss = loss_of(model(batch), batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@multirank(2)
@pytest.mark.parametrize("memory", ["dynamic", "max_pool", "arena"])
def test_slabs_come_from_the_backend(rank: int, world_size: int, memory: str) -> None:
    expected = train(sharded(memory), rank, 5)
    with allocating() as backend:
        model = sharded(memory)
        for module in model.modules():
            if isinstance(module, sw.FSDPModule):
                module.set_allocate_memory_from_process_group_for_comm(True)
        found: list[bool] = []
        for unit in units_of(model):
            hook = lambda *_, unit=unit: found.append(backend.holds(unit.weights.copy.slab.address))  # noqa: E731
            unit.watch.references[0]().register_forward_pre_hook(hook)
        assert train(model, rank, 4) == expected[:4]
        assert all(found) and len(found) == 4 * len(units_of(model))
        report = sw.memory_report(model)
        if memory != "dynamic":
            assert report.plan is not None and report.plan.nbytes in backend.sizes
        if memory == "arena":
            made = len(backend.sizes)
            train(model, rank, 1)
            assert len(backend.sizes) == made  # one block, made once
        kept = {unit.weights.copy.slab.address for unit in units_of(model) if unit.weights.copy.slab.leased}
        assert len(backend.alive) == (1 if memory != "dynamic" else len(kept))  # and nothing more
        for module in model.modules():
            if isinstance(module, sw.FSDPModule):
                module.set_allocate_memory_from_process_group_for_comm(False)
        made = len(backend.sizes)
        train(model, rank, 3)
        assert len(backend.sizes) == made


@multirank(2)
def test_where_there_is_none_it_is_refused(rank: int, world_size: int) -> None:
    model = sharded("arena")
    with pytest.raises(NotImplementedError, match="The backend 'gloo' allocates no memory on cpu"):
        model.set_allocate_memory_from_process_group_for_comm(True)
    model.set_allocate_memory_from_process_group_for_comm(False)
    with pytest.raises(
        NotImplementedError, match="Symmetric memory needs NCCL on CUDA devices; this model is on cpu"
    ):
        model.set_symm_mem_for_comm()
    with pytest.raises(ValueError, match="backend must be \"NCCL\", got 'CUDA'"):
        model.set_symm_mem_for_comm("CUDA")


class Own:
    def lease(self, slab: Any) -> None:
        return None

    def release(self, slab: Any, memory: Any) -> None:
        return None


@multirank(2)
def test_an_allocator_of_the_users_decides_itself(rank: int, world_size: int) -> None:
    model = sharded(Own())
    with allocating(), pytest.raises(ValueError, match="uses your allocator Own"):
        model.set_allocate_memory_from_process_group_for_comm(True)


class Fresh:
    """An allocator that keeps nothing itself."""

    def __init__(self) -> None:
        self.alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()

    def lease(self, slab: Any) -> torch.Tensor | None:
        if not slab.nbytes:
            return None
        memory = torch.empty(slab.nbytes, dtype=torch.uint8)
        self.alive.add(memory)
        return memory

    def release(self, slab: Any, memory: torch.Tensor | None) -> None:
        return None


@multirank(2)
def test_memory_given_back_is_not_kept(rank: int, world_size: int) -> None:
    """An allocator may give other memory at every lease: nothing of the engine's holds what it took back."""
    memory = Fresh()
    model = sharded(memory)
    train(model, rank, 3)
    model.zero_grad()
    leased = sum(
        slab.leased and slab.nbytes > 0 for unit in units_of(model) for slab in unit.site.owner.slabs
    )
    assert len(memory.alive) == leased
