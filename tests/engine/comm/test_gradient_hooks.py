"""Codecs and gradient hooks by themselves: bounds, what is lost and kept, one result on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwright.comm_hooks import Cast, Compressed, GradientHook, Int8Blocks, PowerSGD, Site
from tests.support import multirank, world_mesh


def finished(steps: Any) -> torch.Tensor:
    while True:
        try:
            next(steps).wait()
        except StopIteration as end:
            return end.value


def site_of(world_size: int, *matrices: tuple[int, int]) -> Site:
    group = dist.distributed_c10d._get_default_group()
    return Site("here", group, world_mesh(world_size), torch.device("cpu"), True, matrices)


HOOKS = {
    "bf16": lambda: Compressed(Cast(torch.bfloat16), error_feedback=True),
    "int8": lambda: Compressed(Int8Blocks(8), error_feedback=True),
    "power": lambda: PowerSGD(2),
}


@multirank(1, 2, 3)
@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.parametrize("scatters", [True, False])
def test_nothing_is_lost_for_good(rank: int, world_size: int, name: str, scatters: bool) -> None:
    """The results of all steps and the errors that ranks keep add up to the inputs."""
    hook: GradientHook = HOOKS[name]()
    site = site_of(world_size, (60, 6), (5, 1), (70, 10), (3, 1))
    hook.prepare(site, scatters)
    torch.manual_seed(rank)
    given, taken = torch.zeros(world_size if scatters else 1, site.numel), torch.zeros(site.numel)
    for _ in range(4):
        rows = torch.randn_like(given)
        given += rows
        if scatters:
            taken += finished(hook.reduce_scatter(rows, site))
        else:
            result = finished(hook.all_reduce(rows[0], site))
            everyone = [torch.empty_like(result) for _ in range(world_size)]
            dist.all_gather(everyone, result.contiguous())
            assert all(map(torch.equal, everyone, [result] * world_size))
            taken += result
    errors = hook._errors["here"].clone()  # type: ignore[attr-defined]
    assert errors.abs().max() > 1e-3
    dist.all_reduce(given)
    dist.all_reduce(errors)
    mine = (given - errors)[rank if scatters else 0]
    torch.testing.assert_close(taken, mine, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("numel", [1, 7, 8, 9, 100])
@pytest.mark.parametrize("codec", [Int8Blocks(8), Int8Blocks(256), Cast(torch.bfloat16), Cast(torch.float16)])
def test_codecs(codec: Any, numel: int) -> None:
    rows = torch.randn(3, numel) * torch.tensor([[1e-3], [1.0], [1e3]])
    coded = codec.encode(rows)
    assert coded.dtype == torch.uint8 and tuple(coded.shape) == (3, codec.nbytes(numel))
    decoded = codec.decode(coded, numel)
    assert decoded.dtype == torch.float32
    bound = rows.abs().amax(1, keepdim=True) / 253 + 1e-7  # float16 is coarse near zero
    assert ((decoded - rows).abs() <= bound).all()
    assert torch.equal(codec.decode(coded[1:2], numel), decoded[1:2])  # a row by itself
    assert not codec.decode(codec.encode(torch.zeros(1, numel)), numel).any()
    for bad in (torch.nan, torch.inf, -torch.inf):
        rows[1, numel // 2] = bad
        again = codec.decode(codec.encode(rows), numel)
        assert not again[1, numel // 2].isfinite()
        assert torch.equal(again[0], decoded[0])
