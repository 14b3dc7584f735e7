"""Gradient clipping by the global norm of sharded gradients: local norms, one all-reduce, one scaling call."""

from __future__ import annotations

import functools
import math
import types
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from shardwright.engine import CLIP, RaggedTensor, Unit, cut_dim, reduce_held, root_of, unit_of
from shardwright.engine.comm import noted
from shardwright.engine.compat import foreach_mul_, foreach_norm, local_of


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scale gradients so that their global norm is at most ``max_norm``; return the norm before.

    The norm is over all elements on all ranks, whatever meshes their parameters are on: each element counts once, even
    if several ranks hold the same gradient. Every rank must call it with the same parameters.

    Args:
        parameters: a tensor or tensors whose ``.grad`` is clipped in place; those without a gradient are left out.
        max_norm: the largest norm allowed afterwards.
        norm_type: p of the norm, ``math.inf`` for the largest absolute value.
        error_if_nonfinite: raise if the norm is nan or infinite, instead of scaling by it.
        foreach: accepted as in torch, but has no effect: the multi-tensor functions are always used.

    Returns:
        The norm as a plain 0-d tensor, float32 or wider, on the gradients' device; 0 if there is no gradient.

    Raises:
        ValueError: ``norm_type`` is not positive, or a gradient is still a partial sum.
        RuntimeError: ``error_if_nonfinite`` and the norm is not finite; an optimizer steps these parameters in
            backward (``sw.optim.in_backward``).
    """
    return _clip(parameters, max_norm, norm_type, error_if_nonfinite).total


NO_UNIT = "outside of all units"
"""The name that stands for the unit of parameters which have none."""


class ParameterNorms(NamedTuple):
    """The norms of which the global norm is made.

    Attributes:
        norms: of each gradient over all ranks, before clipping; equal on all ranks. [gradients]
        units: the name of each one's unit, in the order of ``norms``.
        order: the names of all units, in the order of the parameters.
    """

    norms: torch.Tensor
    units: list[str]
    order: list[str]

    def by_unit(self, norms: Sequence[float]) -> dict[str, float]:
        """Return the norm of each unit. ``norms``: the values of the tensor."""
        parts: dict[str, list[float]] = {unit: [] for unit in self.order}
        for unit, norm in zip(self.units, norms, strict=True):
            parts[unit].append(norm)
        return {unit: math.hypot(*values) for unit, values in parts.items()}


def clip_finite_grad_norm_(
    parameters: Iterable[torch.Tensor], max_norm: float, *, by_unit: bool = False
) -> tuple[torch.Tensor, ParameterNorms | None]:
    """Clip as :func:`clip_grad_norm_`, but leave gradients as they are if their norm is not finite.

    Scaled by such a norm, all gradients would be nan, and nobody could find the wrong one.

    Args:
        parameters, max_norm: as for :func:`clip_grad_norm_`, with the same collectives.
        by_unit: return the norms of all gradients, too, with the names of their units.

    Returns:
        The norm before, and the norms of which it is made, or None unless ``by_unit``.
    """
    parameters = list(parameters)
    clipped = _clip(parameters, max_norm, only_finite=True)
    if not by_unit:
        return clipped.total, None
    units: dict[int, str] = {}  # by the tensor of the gradient
    for p in parameters:
        if (gradient := p.grad) is not None:
            unit = unit_of(p)
            units[id(getattr(gradient, "_local_tensor", gradient))] = NO_UNIT if unit is None else unit.name
    names = [units[id(each)] for each in clipped.gradients]
    return clipped.total, ParameterNorms(clipped.norms, names, list(dict.fromkeys(units.values())))


class _Clipped(NamedTuple):
    """The global norm, the norms of the gradients, and this rank's part of each, in the same order."""

    total: torch.Tensor
    norms: torch.Tensor
    gradients: list[torch.Tensor]


@torch.no_grad()
def _clip(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    only_finite: bool = False,
) -> _Clipped:
    if isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    max_norm, norm_type = float(max_norm), float(norm_type)
    if not norm_type > 0:
        raise ValueError(f"norm_type must be positive, got {norm_type}")
    is_generator = isinstance(parameters, types.GeneratorType)
    parameters = list(parameters)
    if is_generator and not parameters:
        warnings.warn(
            "clip_grad_norm_ got an empty generator, so it clips nothing. A generator is used up after one loop over "
            "it: call model.parameters() for each clipping.",
            stacklevel=3,
        )
    units = dict.fromkeys(unit for p in parameters if (unit := unit_of(p)) is not None)
    for unit in units:
        if unit.stepping is not None:
            raise RuntimeError(
                f"clip_grad_norm_ got a parameter of unit {unit.name!r}, whose optimizer steps in backward: it uses "
                "and frees the gradient before the norm of all gradients is known. Use fully_shard_optimizer without "
                "in_backward, or clip each gradient by value with in_backward(clip_value=)."
            )
    reduce_held(parameters)
    plain: list[torch.Tensor] = []
    sharded: dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]] = {}  # by the groups that cut them
    kinds: dict[Any, str] = {}  # the device on which they communicate
    mesh = placements = None
    alike = plain  #: the gradients that are cut by ``mesh`` and ``placements``
    groups: tuple[dist.ProcessGroup, ...]
    for p in parameters:
        gradient = p.grad
        if gradient is None:
            continue
        if isinstance(gradient, RaggedTensor):
            groups = gradient.spec.groups
            (sharded.setdefault(groups, []) if groups else plain).append(local_of(gradient))
            kinds[groups] = gradient.spec.mesh.device_type
        elif isinstance(gradient, DTensor):
            # Mostly they are those of the gradient before, and a model has thousands.
            if gradient.device_mesh is not mesh or gradient.placements != placements:
                mesh, placements = gradient.device_mesh, gradient.placements
                groups = _groups_of(mesh, placements)
                alike = sharded.setdefault(groups, []) if groups else plain
                kinds[groups] = mesh.device_type
            alike.append(local_of(gradient))
        else:
            plain.append(gradient)
    everything = [*plain, *(t for tensors in sharded.values() for t in tensors)]
    if units and (root := root_of(next(iter(units)))) is not None:
        agreement = root.agreement
        agreement.agree_all(CLIP, 0, _fingerprints(parameters, units) if agreement.compares else None)
    if not everything:
        return _Clipped(torch.tensor(0.0), torch.zeros(0), [])
    device = everything[0].device
    largest = math.isinf(norm_type)
    norms = _norms(plain, norm_type, device)
    for groups, tensors in sharded.items():
        # One all-reduce per axis, of one number per parameter. DTensor makes the same norms, so both round alike.
        part = _norms(tensors, norm_type, device)
        assert part is not None
        part = part if largest else part.pow_(norm_type)
        here, there = part.device, torch.device(kinds[groups])
        groups_with_others = [group for group in groups if group.size() > 1]
        if groups_with_others and here.type != there.type:
            part = part.to(there)  # norms of offloaded tensors are summed on the groups' device
        for group in groups_with_others:
            with noted("all-reduce of norms", group):
                dist.all_reduce(part, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=group)
        part = (part if largest else part.pow_(1.0 / norm_type)).to(here)
        norms = part if norms is None else torch.cat([norms, part])
    assert norms is not None
    norm = torch.linalg.vector_norm(norms, norm_type)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(
            f"The gradients' norm of order {norm_type} is {norm.item()}, so they cannot be clipped. Pass "
            "error_if_nonfinite=False to scale by this norm anyway."
        )
    # The same coefficient as torch.nn.utils.clip_grad_norm_, applied without asking the device whether it is < 1.
    divisor = torch.where(norm.isfinite(), norm, 0.0) if only_finite else norm
    scale = torch.clamp(max_norm / (divisor + 1e-6), max=1.0)
    foreach_mul_(everything, scale)
    return _Clipped(norm, norms, everything)


def _fingerprints(
    parameters: Iterable[torch.Tensor], units: Iterable[Unit]
) -> dict[dist.ProcessGroup, tuple[int, int]]:
    """Return, for each axis, how many gradients it cuts or replicates, and a hash of their places in the order."""
    groups_of: dict[int, tuple[dist.ProcessGroup | None, ...]] = {}
    places: dict[int, tuple[int, int]] = {}
    for unit in units:
        axes = tuple(comm.group for comm in unit.ranks.every)
        for index, managed in enumerate(unit.parameters):
            parallel = managed.cut.parallel
            groups_of[id(managed.sharded)] = axes if parallel is None else (*axes, *parallel.axes)
            places[id(managed.sharded)] = unit.number, index
    by_group: dict[dist.ProcessGroup, list[tuple[int, int]]] = {}
    for p in parameters:
        gradient = p.grad
        if gradient is None:
            continue
        groups: tuple[dist.ProcessGroup | None, ...] | None = groups_of.get(id(p))
        if groups is None:  # of no unit
            groups = ()
            if isinstance(gradient, DTensor):
                groups = _groups_of(gradient.device_mesh, gradient.placements)
        for group in groups:
            assert group is not None
            by_group.setdefault(group, []).append(places.get(id(p), (-1, p.numel())))
    return {group: (len(each), hash(tuple(each))) for group, each in by_group.items()}


def _groups_of(mesh: DeviceMesh, placements: tuple[Placement, ...]) -> tuple[dist.ProcessGroup, ...]:
    """Return the groups of the mesh axes that cut a DTensor with these placements."""
    if any(placement.is_partial() for placement in placements):
        raise ValueError("clip_grad_norm_ got a gradient that is a partial sum on each rank; reduce it first")
    return tuple(
        mesh.get_group(axis) for axis, placement in enumerate(placements) if cut_dim(placement) is not None
    )


def _norms(tensors: list[torch.Tensor], norm_type: float, device: torch.device) -> torch.Tensor | None:
    """Return the norm of each tensor, at least in float32; 0 for a tensor without elements.

    None if there are no tensors.
    """
    if not tensors:
        return None
    filled = [t for t in tensors if t.numel()]  # torch has no maximum of an empty tensor
    norms = [norm.to(device) for norm in foreach_norm(filled, norm_type)] if filled else []
    dtype = functools.reduce(torch.promote_types, {t.dtype for t in tensors}, torch.float32)
    if len(filled) < len(tensors):
        zero = (filled or tensors)[0].new_zeros(()).to(device)
        rest = iter(norms)
        norms = [next(rest) if t.numel() else zero for t in tensors]
    stacked = torch.stack(norms)
    return stacked.to(dtype.to_real())  # equal on every rank, also if it has no element of the widest dtype
