"""Page-locked memory in exact sizes: with functions of CUDA that are replaced, and on the simulated device."""

from __future__ import annotations

import gc
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from shardwright.comm import page_locks
from shardwright.comm.page_locks import LEAST, locked_zeros
from tests.support.sim import on_sim

DEVICE = torch.device("cuda")


class Runtime:
    """CUDA's functions, which note what is locked.

    Attributes:
        locked: bytes by address.
        most: the largest sum of them.
        limit: bytes beyond which a lock fails.
        waits: how often the host has waited for the device.
    """

    def __init__(self, extension: Any = None, limit: int = 1 << 40) -> None:
        self.extension, self.limit = extension, limit
        self.locked: dict[int, int] = {}
        self.most = self.waits = 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        assert address % mmap.PAGESIZE == nbytes % mmap.PAGESIZE == 0 and flags == 1
        if sum(self.locked.values()) + nbytes > self.limit:
            return 2
        assert address not in self.locked
        self.locked[address] = nbytes
        self.most = max(self.most, sum(self.locked.values()))
        if self.extension is not None:
            self.extension.lock_pages(address, nbytes)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        if self.extension is not None:
            self.extension.unlock_pages(address)
        return 0

    def wait(self, device: torch.device) -> None:
        self.waits += 1

    @contextmanager
    def in_use(self, kind: str) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(page_locks, "runtime_of", lambda device: self if device.type == kind else None)
            if self.extension is None:
                patch.setattr(torch.accelerator, "synchronize", self.wait)
                patch.setattr(torch, "ones", lambda *_, **__: None)
            yield
            gc.collect()
            page_locks._give_back()


def test_memory_is_locked_in_exact_sizes_and_unlocked_after_its_tensors() -> None:
    runtime = Runtime()
    with runtime.in_use("cuda"):
        numel = (3 << 20) + 5  # torch's allocator would take 16 MiB for its 12
        tensor: Any = locked_zeros(numel, torch.float32, DEVICE)
        assert tensor.shape == (numel,) and not tensor.any()
        assert tensor.untyped_storage().nbytes() == 4 * numel and tensor.storage_offset() == 0
        assert runtime.locked == {tensor.data_ptr(): 4 * numel + -4 * numel % mmap.PAGESIZE}
        view = tensor[7:]
        del tensor
        view.fill_(1.0)
        assert locked_zeros(LEAST, torch.uint8, DEVICE) is not None
        assert runtime.locked[view.data_ptr() - 28] and not runtime.waits
        del view
        gc.collect()
        assert len(runtime.locked) == 2  # until the next one is taken
        other = locked_zeros(LEAST, torch.bfloat16, DEVICE)
        assert other is not None and other.dtype == torch.bfloat16
        assert list(runtime.locked) == [other.data_ptr()] and runtime.waits == 2
        del other
    assert not runtime.locked


def test_little_memory_and_what_cannot_be_locked_are_left_to_torch() -> None:
    runtime = Runtime(limit=4 * LEAST)
    with runtime.in_use("cuda"):
        assert locked_zeros(LEAST - 1, torch.uint8, DEVICE) is None
        assert locked_zeros(LEAST, torch.uint8, torch.device("cpu")) is None
        assert locked_zeros(5 * LEAST, torch.uint8, DEVICE) is None
        with FakeTensorMode():
            assert locked_zeros(LEAST, torch.uint8, DEVICE) is None
        one, two = (locked_zeros(2 * LEAST, torch.uint8, DEVICE) for _ in range(2))
        assert one is not None and two is not None
        assert locked_zeros(2 * LEAST, torch.uint8, DEVICE) is None
        del one, two


@on_sim(2)
@pytest.mark.parametrize("what", ["offload", "state"])
def test_offloaded_training_keeps_its_numbers_in_such_memory(rank: int, world_size: int, what: str) -> None:
    from tests.engine.kit.on_sim import check
    from tests.engine.kit.simulated import Case
    from tests.support.sim import load

    runtime = Runtime(load().extension)
    with pytest.MonkeyPatch.context() as patch, runtime.in_use("sim"):
        patch.setattr(page_locks, "LEAST", 1)
        check(Case(offload=what), (1, 2))
        assert runtime.most > 4 * mmap.PAGESIZE
    assert not runtime.locked
