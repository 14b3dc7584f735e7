"""Making a unit's memory: how each parameter is cut, and its two forms over the shards and the slab.

Nothing here knows units or changes modules. The only communication is the gather of a DTensor with other placements.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard

from shardwright.engine.assembly.find import Owned, ShardPlacementFn, mesh_asked, parallel_of_parameter
from shardwright.engine.base.offload import Offload
from shardwright.engine.base.precision import PrecisionPolicy, gradient_dtypes, policy_for
from shardwright.engine.base.site import UnitSite
from shardwright.engine.compat.dtensor import local_of
from shardwright.engine.layout import GradientDtypes, Ragged, TensorSpec, UnitLayout, plan_unit
from shardwright.engine.memory import Slab
from shardwright.engine.tensors.cut import Cut, cut_alone, make_cut
from shardwright.engine.tensors.extension import Extension, is_attached, is_extended
from shardwright.engine.tensors.parameter import (
    Managed,
    ManagedParameter,
    build,
    has_no_values,
    in_place_view,
)
from shardwright.engine.tensors.ragged.tensor import RaggedTensor
from shardwright.engine.tensors.same_object import Exchanged
from shardwright.engine.tensors.tensor_parallel import TensorParallel


@dataclass(frozen=True, slots=True, eq=False)
class Arguments:
    """The arguments of ``fully_shard`` for a unit. They never change.

    Attributes:
        policy: the precision policy, in the engine's terms.
        users_policy: the user's own policy object, for tensors with ``fsdp_pre_all_gather``.
        placement_fn: chooses the dimension along which a parameter is cut.
        layout: None: each parameter is cut in rows.
        offload: the parts in the CPU's memory.
    """

    policy: PrecisionPolicy
    users_policy: MixedPrecisionPolicy
    placement_fn: ShardPlacementFn | None
    layout: Ragged | None
    offload: Offload


class Built(NamedTuple):
    """A unit's memory. The slab is leased."""

    layout: UnitLayout
    shards: list[torch.Tensor]
    slab: Slab
    parameters: list[ManagedParameter]
    gradient_dtypes: list[GradientDtypes]
    before: list[torch.Tensor]  #: what each parameter was before


def _spec_of(
    name: str, parameter: nn.Parameter, parallel: TensorParallel | None, site: UnitSite, arguments: Arguments
) -> TensorSpec:
    dim = _placement_dim(arguments.placement_fn, name, parameter)
    shares = arguments.layout is not None or len(site.ranks.axes) > 1
    if shares and dim:
        how = f"layout {arguments.layout}" if arguments.layout is not None else str(site.ranks.strategy)
        raise ValueError(
            f"shard_placement_fn asks for dimension {dim} of parameter {name!r}, but {how} cuts parameters by the "
            "order of their elements. Return None or Shard(0)."
        )
    storage = parameter.dtype
    own = policy_for(arguments.policy, name, parameter)
    compute = (own.param_dtype or storage) if parameter.is_floating_point() else storage
    inner = local_of(parameter) if isinstance(parameter, (DTensor, RaggedTensor)) else parameter
    extended = is_extended(inner)
    if extended and (isinstance(parameter, RaggedTensor) or (site.reads is not None and is_attached(inner))):
        raise NotImplementedError(
            f"parameter {name!r} of unit {site.owner.name!r}: fsdp_pre_all_gather was attached to its local tensor "
            f"after fully_shard, which needs layout 'per_parameter' without offload; this unit has "
            f"{'layout ' + repr(arguments.layout) if site.reads is None else 'offloaded parameters'}. Define it on the "
            "class of the parameter before fully_shard."
        )
    if extended and (dim or not parameter.ndim):
        raise ValueError(
            f"parameter {name!r} defines its own all-gather ({type(parameter).__name__} has fsdp_pre_all_gather), so "
            "it must be sharded along dimension 0"
        )
    order = () if shares else _memory_order(parameter, dim)
    shape = parallel.local_shape if parallel is not None else tuple(parameter.shape)
    return TensorSpec(name, shape, storage, compute, dim, order, extended)


def _placement_dim(fn: ShardPlacementFn | None, name: str, parameter: nn.Parameter) -> int:
    result: Any = fn(parameter) if fn is not None else None
    placement = result if mesh_asked(lambda p: result, parameter) is None else result.placement
    if placement is None:
        return 0
    if not isinstance(placement, Shard):
        raise ValueError(
            f"shard_placement_fn must return Shard, ShardPlacementResult or None, got {result!r} for parameter {name!r}"
        )
    dim = placement.dim + parameter.ndim if placement.dim < 0 else placement.dim
    if not 0 <= dim < parameter.ndim:
        raise ValueError(
            f"shard_placement_fn returned {placement} for parameter {name!r} of shape {tuple(parameter.shape)}, which "
            f"has {parameter.ndim} dimensions"
        )
    return dim


def _memory_order(parameter: nn.Parameter, dim: int) -> tuple[int, ...]:
    """The sharded dimension, then the others in memory order, so that channels-last weights stay channels-last."""
    strides = parameter.stride()
    others = [d for d in range(parameter.ndim) if d != dim]
    if not parameter.is_contiguous():
        others.sort(key=lambda d: -strides[d])
    return (dim, *others) if parameter.ndim else ()


@torch.inference_mode(False)
def build_memory(
    owned: list[Owned], site: UnitSite, arguments: Arguments, exchanged: list[Exchanged] | None = None
) -> Built:
    """Cut each parameter, and make both of its forms. Adds to ``exchanged`` the objects that become sharded."""
    ranks, device, reads = site.ranks, site.ranks.device, site.reads
    specs = [_spec_of(each.name, each.parameter, each.parallel, site, arguments) for each in owned]
    policies = [policy_for(arguments.policy, each.name, each.parameter) for each in owned]
    dtypes = [gradient_dtypes(own, s.compute_dtype) for own, s in zip(policies, specs, strict=True)]
    trainable = [each.parameter.requires_grad for each in owned]
    # The full form of a tensor-parallel parameter is a DTensor, and its local tensor has another version counter.
    allows_in_place = ranks.parts == 1 and reads is None and not any(each.parallel for each in owned)
    layout = plan_unit(specs, ranks.parts, arguments.layout, trainable, allows_in_place)
    slab = Slab(layout.slab_nbytes, device, "parameters", site.owner)
    slab.lease()  # views need existing memory
    managed: list[ManagedParameter | None] = [None] * len(owned)
    shards: list[torch.Tensor] = []
    with torch.no_grad():
        for run in layout.runs:
            for segment in run.segments:
                # A separate storage, because torch treats a DTensor whose local tensor has a storage offset as a plain
                # tensor, and cannot save or copy it.
                numel = 0 if run.extended else segment.chunk
                if reads is None:
                    shards.append(torch.zeros(numel, dtype=run.storage_dtype, device=device))
                else:
                    shards.append(reads.host.lasting_zeros(numel, run.storage_dtype))
                for member in segment.members:
                    _, original, slots, parallel = owned[member.index]
                    cut = make_cut(ranks, specs[member.index], parallel, segment, member)
                    if run.extended:
                        local = _extended_local(site, cut, original)
                        # Until the first gather.
                        full = torch.empty(0, dtype=run.compute_dtype, device=device)
                    else:
                        # With a separate version counter, so that an edit of one parameter is no edit of its
                        # neighbours.
                        local = cut.local_view(shards[-1], 0).data
                        if not has_no_values(original):
                            local.copy_(cut.part_of(original))
                        full = in_place_view(local, cut) if run.in_place else cut.full_view(slab, run)
                    p = managed[member.index] = build(
                        original,
                        cut,
                        slots,
                        local=local,
                        full=full,
                        on_gradient=site.on_gradient,
                        on_data=site.on_data,
                    )
                    module = slots[0].module()
                    if run.extended and module is not None:
                        own = policies[member.index]
                        policy = arguments.users_policy if own is arguments.policy else own
                        p.extension = Extension(specs[member.index], ranks, module, policy, site.owner)
    parameters = [p for p in managed if p is not None]
    before: list[torch.Tensor] = []
    for p, (_, original, _, _) in zip(parameters, owned, strict=True):
        record = None if p.sharded is original else p.keep_object(original, site.owner.name)
        before.append(original if record is None else record.before)
        if record is not None and exchanged is not None:
            exchanged.append(record)
    for p, each in zip(parameters, dtypes, strict=True):
        if each.grad is not None and each.grad != p.sharded.dtype:
            p.sharded.grad_dtype = each.grad
    return Built(layout, shards, slab, parameters, dtypes, before)


def cut_for(p: ManagedParameter, value: torch.Tensor, site: UnitSite, arguments: Arguments) -> Cut:
    """The cut of a value with another shape or dtype that was assigned to ``.data`` of a parameter."""
    new = nn.Parameter(value, requires_grad=False)
    parallel = parallel_of_parameter(p.name, new, site.ranks)
    if p.cut.parallel is not None and parallel is None:
        raise ValueError(
            f"The data of tensor-parallel parameter {p.name!r} of shape {tuple(p.cut.shape)} was set to a plain "
            f"tensor of shape {tuple(value.shape)}. Assign a DTensor on {p.cut.parallel.mesh}."
        )
    return cut_alone(site.ranks, _spec_of(p.name, new, parallel, site, arguments), parallel, p.cut)


def _extended_local(site: UnitSite, cut: Cut, original: nn.Parameter) -> torch.Tensor:
    """The local tensor, in separate memory, of a parameter with ``fsdp_pre_all_gather``."""
    if isinstance(original, Managed) and is_attached(local_of(original)):
        return local_of(original)  # the methods are bound to this object
    part = cut.part_of(original)
    if part.is_meta:  # make memory; its values come later
        return torch.empty_like(part, device=site.ranks.device if site.reads is None else "cpu")
    return part.to(site.ranks.device, copy=True) if site.reads is None else site.reads.host.copy_of(part)
