"""Two processes on one device over gloo: the way to try several ranks on a machine with one GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.engine.sharing_a_device import on_first_gpu, refuse_divergence, train_as_one
from tests.support import multirank
from tests.support.stand_in import stand_in_device


@pytest.mark.extensive("processes of their own")
@multirank(2)
def test_as_an_accelerator(rank: int, world_size: int) -> None:
    """The rehearsal: CPU tensors, and the engine's path for a device with streams."""
    with stand_in_device():
        train_as_one(rank, world_size, torch.device("cpu"))
        refuse_divergence(rank, world_size, torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_two_processes_on_one_gpu(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(on_first_gpu, (2, str(tmp_path / "store")), nprocs=2)
