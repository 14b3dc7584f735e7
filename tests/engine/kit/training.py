"""Sharded models of tests: built, trained, and compared with plain ones part by part."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

import shardwright as sw
from shardwright.engine import RaggedDTensor, RaggedTensor
from tests.engine.kit.models import Model, Reference, build, loss_of, shard, tokens, units_of
from tests.engine.kit.places import On

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


UNITS = 4  #: of what `sharded` makes


def sharded(at: On, plain: Model | None = None, **options: Any) -> Model:
    """Two blocks, a list of the last norm and the head, and the rest: four units."""
    return shard(plain or build(), head_unit=True, mesh=at.mesh, strategy=at.strategy, **options)


def modules_of(model: nn.Module) -> list[sw.FSDPModule]:
    """One module of each unit."""
    return [unit.watch.references[0]() for unit in units_of(model)]


def set_micro(model: Model, sync: bool, last: bool) -> None:
    model.set_requires_gradient_sync(sync)
    model.set_is_last_backward(last)


def backward(model: Model, rank: int, step: int = 0, micro: int = 0) -> float:
    batch = tokens(step, micro, rank)
    loss = loss_of(model(batch), batch)
    loss.backward()
    return loss.item()


Sharded = DTensor | RaggedTensor


def is_cut_as(p: torch.Tensor, at: On) -> bool:
    """Whether a parameter, a gradient or a moment is of the right kind, on the right mesh."""
    if at.ragged:
        return isinstance(p, RaggedTensor) and p.device_mesh == at.mesh
    return isinstance(p, DTensor) and p.device_mesh == at.mesh and p.placements == at.placements


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's memory of a parameter or of an entry of a state dict; a plain tensor itself."""
    while isinstance(tensor, DTensor | RaggedTensor):
        tensor = tensor.to_local()
    return tensor


def part_of(whole: torch.Tensor, like: Sharded) -> torch.Tensor:
    """This rank's part of a plain tensor: by torch's own arithmetic of placements, over two axes by torch.chunk's."""
    if isinstance(like, RaggedDTensor):
        like = like.ragged
    if isinstance(like, RaggedTensor):
        chunks, number = whole.chunk(like.spec.world_size), like.spec.rank
        return chunks[number] if number < len(chunks) else whole[:0]
    sizes, starts = compute_local_shape_and_global_offset(whole.shape, like.device_mesh, like.placements)
    return whole[tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))]


def check(name: str, found: Sharded, expected: torch.Tensor, tolerance: float) -> None:
    """This rank's part, relative to the largest element of the whole."""
    assert found.shape == expected.shape and found.dtype == expected.dtype == FP32
    mine, theirs = local_of(found).detach(), part_of(expected.detach(), found)
    assert mine.shape == theirs.shape, name
    if mine.numel():
        error = (mine - theirs).abs().max().item() / max(expected.abs().max().item(), 1e-3)
        assert error <= tolerance, f"{name} is off by {error:.2e} of its largest element"


def check_gradients(model: nn.Module, expected: list[torch.Tensor | None], tolerance: float = 1e-5) -> None:
    for (name, p), gradient in zip(model.named_parameters(), expected, strict=True):
        assert (p.grad is None) == (gradient is None), f"{name}.grad is {p.grad}"
        if gradient is not None:
            if isinstance(p, RaggedTensor):
                assert isinstance(p.grad, RaggedTensor) and p.grad.spec == p.spec, name
            else:
                assert p.grad.placements == p.placements and p.grad.device_mesh == p.device_mesh, name
            check(f"gradient of {name}", p.grad, gradient, tolerance)


def expected_gradients(world_size: int, micros: int = 1, step: int = 0, seed: int = 0) -> list[torch.Tensor]:
    reference = Reference(build(seed), FP32, FP32)
    reference.backward(world_size, [[tokens(step, m, r) for r in range(world_size)] for m in range(micros)])
    return [p.grad for p in reference.model.parameters()]
