"""Truncated normal numbers in pieces: torch's own bits, without its tensors of the whole size."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.init import truncated
from tests.support.live_bytes import LiveBytes

PIECE = 1 << 10


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(truncated, "PIECE", PIECE)


class Matrix(nn.Module):
    def __init__(self, size: int, dtype: torch.dtype, bound: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype))
        nn.init.trunc_normal_(self.weight, mean=0.01, std=0.02, a=-bound, b=bound)
        self.after = nn.Parameter(torch.rand(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_values_are_those_of_torch(dtype: torch.dtype) -> None:
    # Whole pieces, less and more than one group of 16 numbers beyond; and bounds for which torch has another way.
    for size in (PIECE, PIECE + 1, 3 * PIECE, 5 * PIECE + 7, 4 * PIECE - 3):
        for bound in (0.06, 0.03, 0.005):
            torch.manual_seed(size)
            plain = Matrix(size, dtype, bound)
            torch.manual_seed(size)
            with sw.deferred_init():
                model = Matrix(size, dtype, bound)
            sw.materialize(model)
            assert torch.equal(model.weight, plain.weight) and torch.equal(model.after, plain.after), (
                size,
                bound,
            )


def test_memory_is_the_tensor_and_a_piece() -> None:
    with sw.deferred_init():
        model = Matrix(64 * PIECE, torch.float32, 0.06)
    with LiveBytes() as live:
        sw.materialize(model)
    whole = 4 * 64 * PIECE
    # A piece of fresh numbers, and of each comparison one byte an element. Generators' states are 5 kB.
    assert whole <= live.peak <= whole + 4 * PIECE + 3 * PIECE + 4 * torch.get_rng_state().nbytes


def test_another_loop_of_torch_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where pieces would give other bits, torch's own function runs."""

    def other(
        tensor: torch.Tensor, mean: float, std: float, a: float, b: float, generator: object = None
    ) -> object:
        return tensor.fill_(0.5)

    filled = truncated.with_little_memory(other)(torch.empty(2 * PIECE), 0.0, 0.02, -0.06, 0.06)
    assert bool((filled == 0.5).all())
