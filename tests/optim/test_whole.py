"""Optimizers that need whole tensors: the bits of one device, each tensor stepped once in the world by its owner."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import shardwright as sw
from tests.optim.whole import LAYOUTS, assert_equal_bits, set_gradients, twins
from tests.support import multirank

OPTIMIZERS: dict[str, Any] = {
    "torch-Muon": lambda model: torch.optim.Muon(model.parameters(), lr=0.1),
    "Muon": lambda model: sw.Muon(model.named_parameters(), lr=0.1, adamw={"lr": 0.01}),
    "Adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=0.1),
}


def steps_equal(world_size: int, name: str, strategy: str, layout: str, dtype: torch.dtype) -> None:
    plain, sharded = twins(world_size, strategy, layout, others=name != "torch-Muon", dtype=dtype)
    expected = OPTIMIZERS[name](plain)
    ours = sw.fully_shard_optimizer(OPTIMIZERS[name](sharded))
    for step in range(3):
        set_gradients(plain, sharded, step=step, without="tall" if step == 1 else "")
        expected.step()
        ours.step()
        ours.zero_grad()
        expected.zero_grad()
        assert_equal_bits(plain, sharded, f"{strategy}, {layout}, step {step}")


@multirank(1, 2, 3, 4)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bits_of_one_device(rank: int, world_size: int, name: str) -> None:
    for strategy, layout in itertools.product(("zero3", "zero1", "ddp"), LAYOUTS):
        dtype = torch.bfloat16 if (strategy, layout) == ("zero3", "element") else torch.float32
        steps_equal(world_size, name, strategy, layout, dtype)


@multirank(4)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bits_of_one_device_over_two_axes(rank: int, world_size: int, name: str) -> None:
    for strategy, layout in itertools.product(("hsdp", "hfsdp"), LAYOUTS):
        steps_equal(world_size, name, strategy, layout, torch.float32)
