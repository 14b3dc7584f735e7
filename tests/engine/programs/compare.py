"""Comparing a sharded model with a plain one: the same verdict on every rank, by few collectives."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from shardwright.engine import RaggedTensor


@torch.no_grad()  # to_local then costs nothing
def whole(
    model: nn.Module, wrong: Sequence[str] = ()
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[float]]:
    """Every parameter and gradient of a sharded model, whole and in float64, by one collective.

    Each rank adds its part, where torch's chunks say that it belongs, to zeros; the sum, over the number of replicas,
    is the same on all ranks. The last result counts, for each parameter, the ranks that have a gradient; its last item
    the ranks with a complaint in ``wrong``. So every rank comes to the same verdict, and none goes on alone. Where
    ranks hold copies of each other's parts, a second collective compares those to the last bit; elements that
    differ become not a number.
    """
    parameters = list(model.parameters())
    parameters_twice = [p for p in parameters for _ in range(2)]
    tensors = [t for p in parameters for t in (p, p.grad)]
    flats = [torch.zeros(p.shape, dtype=torch.float64) for p in parameters_twice]
    sharded = any(is_cut(p) for p in parameters)
    rank = dist.get_rank() if sharded else 0
    for flat, tensor in zip(flats, tensors, strict=True):
        if tensor is not None and (rank == 0 or is_cut(tensor)):
            part = part_of(flat, tensor)
            part.copy_(local_of(tensor).view(part.shape))
    flags = torch.tensor(
        [float(p.grad is not None) for p in parameters] + [float(bool(wrong))], dtype=torch.float64
    )
    everything = torch.cat([flat.reshape(-1) for flat in flats] + [flags])
    if sharded:
        dist.all_reduce(everything)
        flags = everything[-len(flags) :] / dist.get_world_size()
    pieces = everything[: len(everything) - len(flags)].split([flat.numel() for flat in flats])
    means = [piece.view(p.shape) for piece, p in zip(pieces, parameters_twice, strict=True)]
    likes = [p if t is None else t for t, p in zip(tensors, parameters_twice, strict=True)]
    copies = [replicas_of(like) for like in likes]
    for mean, number in zip(means, copies, strict=True):
        mean /= number
    if sharded and max(copies) > 1:
        drifted = torch.zeros(len(tensors))
        for i, (tensor, mean) in enumerate(zip(tensors, means, strict=True)):
            if tensor is not None and copies[i] > 1:
                mine = part_of(mean, tensor)
                local = local_of(tensor).view(mine.shape).double()
                drifted[i] = not torch.allclose(
                    mine, local, rtol=1e-15, atol=0.0
                )  # a third of thrice a double
        dist.all_reduce(drifted)
        for mean, bad in zip(means, drifted.tolist(), strict=True):
            if bad:
                mean.fill_(float("nan"))
    return means[::2], means[1::2], flags.tolist()


def is_cut(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, DTensor | RaggedTensor)


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if is_cut(tensor) else tensor  # type: ignore[attr-defined,no-any-return]


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if is_cut(tensor) else tensor  # type: ignore[attr-defined,no-any-return]


def replicas_of(tensor: torch.Tensor) -> int:
    """How many ranks hold the same part."""
    if isinstance(tensor, RaggedTensor):
        return tensor.device_mesh.size() // tensor.spec.world_size
    if not isinstance(tensor, DTensor):
        return 1
    sizes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return math.prod(size for size, placement in sizes if placement.is_replicate())


def part_of(flat: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This rank's part of ``like`` as a view of ``flat``, which is whole and contiguous."""
    if isinstance(like, RaggedTensor):
        start, stop = like.spec.range_of(like.spec.rank)
        return flat.view(-1)[start:stop]
    if not isinstance(like, DTensor):
        return flat
    return flat[_part(flat.shape, like.device_mesh, like.placements)]


@functools.cache  # torch's arithmetic takes longer than the comparison
def _part(shape: torch.Size, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> tuple[slice, ...]:
    sizes, starts = compute_local_shape_and_global_offset(shape, mesh, placements)
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))


def stale_states(model: nn.Module, turn: int) -> list[str]:
    """The values in state dicts, ``detach`` and ``full_tensor`` that differ from the parameters. Every rank must come.

    Whole tensors, which need a collective each, are compared of every fourth parameter, others in the next ``turn``.
    """
    found = []
    state = model.state_dict()
    for i, (name, p) in enumerate(model.named_parameters()):
        if not is_cut(p):
            continue
        mine = local_of(p).detach().reshape(-1)
        if not same_values(mine, local_of(p.detach()).reshape(-1)):
            found.append(f"{name}: detach() has other values than the parameter")
        shown = local_of(local_of(state[name])).reshape(-1)  # a ragged tensor is inside its DTensor
        if shown.numel() == mine.numel() and not same_values(mine, shown):
            found.append(f"{name}: the state dict has other values than the parameter")
        if i % 4 == turn % 4:
            whole = full(p).detach()
            part = part_of(whole, p)
            if not same_values(part, local_of(p).detach().view(part.shape)):
                found.append(f"{name}: full_tensor() has other values than this rank's part")
            if not same_values(full(state[name]), whole):
                found.append(f"{name}: the state dict has other values than full_tensor()")
    return found


def same_values(one: torch.Tensor, two: torch.Tensor) -> bool:
    return one.shape == two.shape and torch.equal(one.nan_to_num(), two.nan_to_num())


def differences(
    model: nn.Module,
    plain: nn.Module,
    tolerance: float,
    wrong: Sequence[str] = (),
    adopt: bool = False,
    zeros: bool = False,
) -> list[str]:
    """How parameters and gradients of ``model`` differ from those of ``plain``; the same verdict on every rank.

    An error counts relative to the largest element, of a gradient to at least 2e-2 and the largest noted term: what is
    smaller came about by cancellation of terms of that size. Of one number, which bfloat16 sums over all of a layer's
    output, to 1e-1.

    With ``adopt`` and no difference ``plain`` takes over the parameters of ``model``. Then rounding does not add up
    over steps, and does not flip the rounding of a bfloat16 copy, so that every step can be compared as strictly as
    the first. The version counters of ``plain`` stay: no edit happened. With ``zeros`` gradients of nothing but zeros,
    which ``plain`` does not have, are given to it.
    """
    found = list(wrong)
    mine, theirs = list(model.named_parameters()), list(plain.named_parameters())
    if [name for name, _ in mine] != [name for name, _ in theirs]:
        found.append(f"parameters {[n for n, _ in mine]}, expected {[n for n, _ in theirs]}")
        return found
    values, gradients, flags = whole(model, wrong)
    if flags[-1] and not found:
        found.append("another rank found its results wrong")
    if zeros:
        for (_, q), gradient, has in zip(theirs, gradients, flags, strict=False):
            if q.grad is None and has == 1.0 and not gradient.any():
                q.grad = torch.zeros_like(q)
    for (name, p), (_, q), value, gradient, has in zip(mine, theirs, values, gradients, flags, strict=False):
        for what, is_, expected in (
            ("dtype", p.dtype, q.dtype),
            ("shape", p.shape, q.shape),
            ("requires_grad", p.requires_grad, q.requires_grad),
            ("share of ranks with a gradient", has, float(q.grad is not None)),
        ):
            if is_ != expected:
                found.append(f"{name}: {what} is {is_}, expected {expected}")
        if value.shape == q.shape:
            # Stored in bfloat16, gradients are summed over ranks and micro-batches in it, in another order.
            allowed = max(tolerance, 3e-2) if q.dtype is torch.bfloat16 else tolerance
            found += too_far(name, value, q, 1.0, allowed)
            if q.grad is not None and has == 1.0:
                least = 1e-1 if allowed > 1e-3 and not q.ndim else 2e-2
                least = max(least, getattr(q, _LARGEST_TERM, 0.0))
                found += too_far(f"gradient of {name}", gradient, q.grad, least, allowed)
    if adopt and not found:
        for (_, q), value in zip(theirs, values, strict=True):
            q.data.copy_(value)
    return found


_LARGEST_TERM = "largest_term"


def note_terms(parameter: torch.Tensor, terms: list[torch.Tensor], fresh: bool) -> None:
    """Note the size of the terms of which a parameter's gradient is the sum. ``fresh``: the sum begins with them."""
    before = 0.0 if fresh else getattr(parameter, _LARGEST_TERM, 0.0)
    setattr(parameter, _LARGEST_TERM, max([before, *(t.abs().max().item() for t in terms if t.numel())]))


def too_far(
    name: str, found: torch.Tensor, expected: torch.Tensor, least: float, tolerance: float
) -> list[str]:
    if not expected.numel():
        return []
    scale = max(expected.abs().max().item(), least)
    error = (found - expected.detach().double()).abs().max().item() / scale
    return [] if error <= tolerance else [f"{name} is off by {error:.1e} of {scale:.1e}"]
