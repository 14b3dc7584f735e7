"""Making a unit's memory: which parameters it owns, how each is cut, and how the two forms get into the modules.

Used when ``fully_shard`` is called, and again when users replace parameters by others (another dtype, shape or
number of them) and when a model is copied. Nothing here communicates, except to gather a DTensor placed otherwise.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from shardwright._torch import local_of, untransformed
from shardwright.engine.cut import Cut, cut_alone, make_cut
from shardwright.engine.extension import Extension, is_attached, is_extended
from shardwright.engine.naming import remember
from shardwright.engine.parameter import (
    TAKEN,
    UNIT_OF,
    Managed,
    ManagedParameter,
    Slot,
    Taken,
    become,
    build,
    has_no_values,
    plain_of,
    unit_of,
)
from shardwright.engine.precision import gradient_dtypes, policy_for
from shardwright.engine.ragged import RaggedTensor
from shardwright.engine.ranks import Ranks
from shardwright.engine.tensor_parallel import TensorParallel, cut_dim, parallel_of
from shardwright.engine.unset import carry_mark
from shardwright.layout import TensorSpec, plan_unit
from shardwright.memory import Slab

if TYPE_CHECKING:
    from shardwright.engine.unit import Unit

UNIT = "_shardwright_unit"  #: the attribute under which a sharded module keeps its unit


@dataclass(frozen=True)
class ShardPlacementResult:
    """What a ``shard_placement_fn`` may return for a parameter that has a data-parallel mesh of its own.

    Such as an expert's: what ``fully_shard`` does with all others over its ``mesh`` it does with this one over ``mesh``
    here, beside them. torch's own class of this name, with its ``mesh_info``, is taken, too. If that has
    ``dp_mesh_dims``, the parameter is a DTensor on its whole mesh already, as with ``fully_shard(dp_mesh_dims=...)``.

    Attributes:
        placement: as without this class.
        mesh: of one dimension, or of two: replicas outside, shards inside.
    """

    placement: Shard | None
    mesh: DeviceMesh


ShardPlacementFn = Callable[[nn.Parameter], "Shard | ShardPlacementResult | None"]


class Owned(NamedTuple):
    """A parameter that a unit is to own, and everywhere its modules hold it."""

    name: str
    parameter: nn.Parameter
    slots: list[Slot]
    parallel: TensorParallel | None


class Found(NamedTuple):
    owned: list[Owned]
    borrowed: list[
        tuple[nn.Parameter, Slot]
    ]  #: sharded parameters of other units, tied to a name in this one


def mesh_asked(fn: ShardPlacementFn | None, parameter: nn.Parameter) -> DeviceMesh | None:
    """The mesh that a placement function gives a parameter, None for that of all."""
    result: Any = fn(parameter) if fn is not None else None
    return getattr(getattr(result, "mesh_info", result), "mesh", None)


def meshes_asked(
    modules: list[nn.Module], ignored: Iterable[nn.Parameter], fn: ShardPlacementFn | None
) -> list[Any]:
    """What a placement function gives the parameters that have meshes of their own: each holds its ``mesh``."""
    if fn is None:
        return []
    ids = {id(p) for p in ignored}
    own = [p for top in modules for _, m in own_modules(top) for p in m._parameters.values() if p is not None]
    found = [fn(p) for p in own if id(p) not in ids and not isinstance(p, Managed)]
    return [info for r in found if hasattr(info := getattr(r, "mesh_info", r), "mesh")]


def find_parameters(
    modules: list[nn.Module],
    ignored: Iterable[nn.Parameter],
    ranks: Ranks,
    placement_fn: ShardPlacementFn | None = None,
    unit: Unit | None = None,
    companion: bool = False,
) -> Found:
    """Parameters below ``modules`` that no inner unit owns, each once, with every name that tied weights have.

    Those that ``placement_fn`` gives another mesh are left out; for a ``companion`` all but those that it gives this
    one. ``unit`` is the one they belong to already, if this is not the first time.
    """
    owned: dict[int, Owned] = {}
    borrowed: list[tuple[nn.Parameter, Slot]] = []
    ignored_ids = {id(p) for p in ignored}
    for position, top in enumerate(modules):
        prefix = f"{position}." if len(modules) > 1 else ""
        for module_name, module in own_modules(top):
            for name, parameter in module._parameters.items():
                if parameter is None or id(parameter) in ignored_ids:
                    continue
                full_name = f"{prefix}{module_name}.{name}" if module_name else f"{prefix}{name}"
                slot = Slot.of(module, name)
                lent = _lent_by_another(full_name, parameter, top, unit)
                if lent is not None:
                    if not companion:
                        borrowed.append((lent, slot))
                    continue
                if unit is None or unit_of(parameter) is not unit:
                    mesh = mesh_asked(placement_fn, parameter)
                    if not (mesh == ranks.mesh or (mesh is None and not companion)):
                        continue
                parallel = _parallel_of(full_name, parameter, ranks)
                if unit_of(parameter) is not unit or unit is None:
                    _check_parameter(full_name, module, parameter, parallel, unit)
                known = owned.setdefault(id(parameter), Owned(full_name, parameter, [], parallel))
                known.slots.append(slot)
    return Found(list(owned.values()), borrowed)


def parameters_of(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    return [p for top in modules for p in top.parameters()]


def units_of(model: nn.Module) -> list[Unit]:
    """Every unit at or below a module, once, each with its companions."""
    mains: dict[Unit, None] = dict.fromkeys(
        u for m in model.modules() if (u := m.__dict__.get(UNIT)) is not None
    )
    return [unit for main in mains for unit in (main, *main.companions)]


def own_modules(top: nn.Module) -> list[tuple[str, nn.Module]]:
    """``top`` and the Python modules below it, but nothing at or below a module that is sharded already."""
    found: list[tuple[str, nn.Module]] = []
    seen: set[int] = set()
    todo = [("", top)]
    while todo:
        name, module = todo.pop()
        if id(module) in seen or (module is not top and hasattr(module, UNIT)):
            continue
        if isinstance(module, torch.jit.ScriptModule):
            continue
        seen.add(id(module))
        found.append((name, module))
        below = [(f"{name}.{n}" if name else n, m) for n, m in module._modules.items() if m is not None]
        todo.extend(reversed(below))
    return found


def _lent_by_another(
    name: str, parameter: nn.Parameter, top: nn.Module, unit: Unit | None
) -> nn.Parameter | None:
    """The sharded parameter of another unit that ``parameter`` is, or was before that unit took it."""
    taken: Taken | None = getattr(parameter, TAKEN, None)
    sharded = parameter if isinstance(parameter, Managed) or taken is None else taken.sharded
    owner = unit_of(sharded)
    if owner is None or owner is unit or (unit is not None and not _holds(owner, sharded)):
        return None  # in the last case it has moved here with its module
    if owner.main is None and any(
        top is m for outer in owner.living_modules() for _, m in own_modules(outer)
    ):
        raise ValueError(
            f"parameter {name!r} of shape {tuple(parameter.shape)} belongs to a unit already: an outer module was "
            "sharded before this one. Call fully_shard on inner modules first."
        )
    return sharded


def _holds(owner: Unit, sharded: nn.Parameter) -> bool:
    """Whether a unit's own modules have one of its parameters still."""
    inside = {id(m) for top in owner.living_modules() for _, m in own_modules(top)}
    p = owner.managed(sharded)
    return p is not None and any(id(slot.module()) in inside for slot in p.slots)


def _check_parameter(
    name: str,
    module: nn.Module,
    parameter: nn.Parameter,
    parallel: TensorParallel | None,
    unit: Unit | None,
) -> None:
    if isinstance(parameter, nn.parameter.UninitializedParameter):
        raise ValueError(f"parameter {name!r} is not initialised. Run one forward of the lazy module first.")
    owner = f" of unit {unit.name!r}" if unit is not None else ""
    where = f"parameter {name!r}{owner} of shape {tuple(parameter.shape)}"
    if is_attached(parameter):
        raise ValueError(
            f"{where}: fsdp_pre_all_gather was attached to this object, and each rank's part is another one. Define it "
            "on the parameter's class, or attach it to the local tensor after fully_shard."
        )
    if parallel is not None and is_extended(plain_of(parameter)):
        raise NotImplementedError(
            f"{where}, a DTensor over a {type(local_of(parameter)).__name__}, decides itself what is gathered of it, "
            "which cannot be combined with tensor parallelism. Pass it in ignored_params, or leave it whole."
        )
    if has_no_values(parameter) and not parameter.is_meta and is_extended(parameter):
        raise NotImplementedError(
            f"{where}, a {type(parameter).__name__}, decides itself what is gathered of it, and deferred_init cannot "
            "replay what made it. Build it on a device, or on the meta device."
        )
    _refuse_composite(where, plain_of(parameter))
    if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return
    if module.max_norm is not None:
        raise ValueError(
            f"{where}: with max_norm the module changes its own weights in forward, on each rank those of its own "
            "tokens, so the ranks would differ. Build the embedding without max_norm."
        )
    if module.sparse:
        raise ValueError(
            f"{where}: sparse gradients cannot be reduced. Build the embedding with sparse=False."
        )


def _refuse_composite(where: str, plain: Any) -> None:
    """Raise if the tensor is made of others, such as quantised rows and scales, and does not say how to cut it."""
    kind = type(plain)
    if not hasattr(kind, "__tensor_flatten__") or isinstance(plain, (DTensor, RaggedTensor)):
        return
    if not is_extended(plain):
        raise ValueError(
            f"{where} is a {kind.__name__}, made of other tensors ({', '.join(plain.__tensor_flatten__()[0])}), and "
            "has no fsdp_pre_all_gather, so it cannot be cut. Shard the ordinary weight and leave it one. Or convert "
            "it before fully_shard, freeze it and pass it in ignored_params of every call: each rank keeps all of it."
        )


def _parallel_of(name: str, parameter: torch.Tensor, ranks: Ranks) -> TensorParallel | None:
    """How a parameter, sharded by us or not, lies but for data parallelism."""
    if isinstance(parameter, RaggedTensor):
        return parameter.spec.parallel
    if isinstance(parameter, DTensor):
        return parallel_of(name, parameter, ranks.mesh, ranks.spmd)
    if ranks.spmd is not None:
        raise ValueError(
            f"parameter {name!r} of shape {tuple(parameter.shape)} is a {type(parameter).__name__}; with dp_mesh_dims "
            f"every parameter must be a DTensor on {ranks.spmd.mesh} already, such as distribute_tensor makes."
        )
    return None


def is_cut(parameter: torch.Tensor, parallel: TensorParallel | None) -> bool:
    """Whether it is cut over the data-parallel mesh already."""
    if isinstance(parameter, DTensor) and parallel is not None:
        if parameter.device_mesh != parallel.mesh:
            return True
        return any(cut_dim(parameter.placements[axis]) is not None for axis in parallel.data)
    return isinstance(parameter, (DTensor, RaggedTensor))


def _spec_of(name: str, parameter: nn.Parameter, parallel: TensorParallel | None, unit: Unit) -> TensorSpec:
    dim = _placement_dim(unit.placement_fn, name, parameter)
    shares = unit.layout_kind is not None or len(unit.ranks.axes) > 1
    if shares and dim:
        how = f"layout {unit.layout_kind}" if unit.layout_kind is not None else str(unit.ranks.strategy)
        raise ValueError(
            f"shard_placement_fn asks for dimension {dim} of parameter {name!r}, but {how} cuts parameters by the "
            "order of their elements. Return None or Shard(0)."
        )
    storage = parameter.dtype
    own = policy_for(unit.policy, name, parameter)
    compute = (own.param_dtype or storage) if parameter.is_floating_point() else storage
    inner = local_of(parameter) if isinstance(parameter, (DTensor, RaggedTensor)) else parameter
    extended = is_extended(inner)
    if extended and (isinstance(parameter, RaggedTensor) or (unit.host is not None and is_attached(inner))):
        raise NotImplementedError(
            f"parameter {name!r} of unit {unit.name!r}: fsdp_pre_all_gather was attached to its local tensor after "
            f"fully_shard, which needs layout 'per_parameter' without offload; this unit has "
            f"{'layout ' + repr(unit.layout_kind) if unit.host is None else 'offloaded parameters'}. Define it on the "
            "class of the parameter before fully_shard."
        )
    if extended and (dim or not parameter.ndim):
        raise ValueError(
            f"parameter {name!r} decides itself what is gathered of it ({type(parameter).__name__} has "
            "fsdp_pre_all_gather), so it must be sharded along dimension 0"
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
    """The sharded dimension, then the others as they lie in memory, so that channels-last weights stay that."""
    strides = parameter.stride()
    others = [d for d in range(parameter.ndim) if d != dim]
    if not parameter.is_contiguous():
        others.sort(key=lambda d: -strides[d])
    return (dim, *others) if parameter.ndim else ()


@torch.inference_mode(False)
def own_parameters(unit: Unit, found: Found) -> None:
    """Cut each parameter, make both of its forms, put the sharded one into the modules, and give all to ``unit``."""
    ranks, device = unit.ranks, unit.ranks.device
    owned = found.owned
    specs = [_spec_of(each.name, each.parameter, each.parallel, unit) for each in owned]
    policies = [policy_for(unit.policy, each.name, each.parameter) for each in owned]
    unit.gradient_dtypes = [
        gradient_dtypes(own, s.compute_dtype) for own, s in zip(policies, specs, strict=True)
    ]
    trainable = [each.parameter.requires_grad for each in owned]
    layout = plan_unit(specs, ranks.parts, unit.layout_kind, trainable)
    slab = Slab(layout.slab_nbytes, device, "parameters", unit.owner)
    slab.lease()  # views are made over memory that is there
    on_gradient, on_data = unit.gradient_listener(), unit.data_listener()
    unset = unit.without_values()  # a change of dtype does not give them any
    managed: list[ManagedParameter | None] = [None] * len(owned)
    shards: list[torch.Tensor] = []
    with torch.no_grad():
        for run in layout.runs:
            for segment in run.segments:
                # A storage of its own: torch takes a DTensor whose local tensor begins further on in one for a plain
                # tensor, and can neither save nor copy it.
                numel = 0 if run.extended else segment.chunk
                if unit.host is None:
                    shards.append(torch.zeros(numel, dtype=run.storage_dtype, device=device))
                else:
                    shards.append(unit.host.zeros(numel, run.storage_dtype))
                for member in segment.members:
                    _, original, slots, parallel = owned[member.index]
                    cut = make_cut(ranks, specs[member.index], parallel, segment, member)
                    if run.extended:
                        local = _extended_local(unit, cut, original)
                        full = torch.empty(
                            0, dtype=run.compute_dtype, device=device
                        )  # until the first gather
                    else:
                        # With a version counter of its own: an edit of one parameter is none of its neighbours'.
                        local = cut.local_view(shards[-1], 0).data
                        if not has_no_values(original):
                            local.copy_(cut.part_of(original))
                        full = cut.full_view(slab, run)
                    p = managed[member.index] = build(
                        original, cut, slots, local=local, full=full, on_gradient=on_gradient, on_data=on_data
                    )
                    module = slots[0].module()
                    if run.extended and module is not None:
                        own = policies[member.index]
                        told = unit.given_policy if own is unit.policy else own
                        p.extension = Extension(specs[member.index], ranks, module, told, unit.owner)
    parameters = [p for p in managed if p is not None]
    for p, dtypes in zip(parameters, unit.gradient_dtypes, strict=True):
        if dtypes.grad is not None and dtypes.grad != p.sharded.dtype:
            p.sharded.grad_dtype = dtypes.grad
    unit.chooses_grad_dtype = any(dtypes.grad is not None for dtypes in unit.gradient_dtypes)
    unit.own(layout, shards, slab, parameters)
    for p, (_, original, _, _) in zip(parameters, owned, strict=True):
        if original in unset or has_no_values(original):
            unit.expect_values(p, unset.get(original, original))
    ref = weakref.ref(unit)
    for parameter, (_, original, _, _) in zip(parameters, owned, strict=True):
        setattr(parameter.sharded, UNIT_OF, ref)
        remember(unit, parameter.sharded)
        if original is not parameter.sharded:
            setattr(original, TAKEN, Taken(f"{parameter.name} of {unit.name}", parameter.sharded))
        parameter.show(parameter.sharded)


def _extended_local(unit: Unit, cut: Cut, original: nn.Parameter) -> torch.Tensor:
    """The local tensor of a parameter that decides itself what is gathered of it, in memory of its own."""
    if isinstance(original, Managed) and is_attached(local_of(original)):
        return local_of(original)  # the methods are bound to this object
    part = cut.part_of(original)
    if part.is_meta:  # memory, whose values come later
        return torch.empty_like(part, device=unit.ranks.device if unit.host is None else "cpu")
    return part.to(unit.ranks.device, copy=True) if unit.host is None else unit.host.copy_of(part)


def borrow_parameters(unit: Unit, found: Found) -> None:
    """Put the sharded parameters of other units under the names that this unit's modules have for them."""
    unit.lenders, unit.borrowed = [], found.borrowed
    unit.watch_slots()
    for sharded, slot in found.borrowed:
        lender = unit_of(sharded)
        if lender not in unit.lenders:
            unit.lenders.append(lender)
        lent = lender.managed(sharded)
        assert lent is not None
        if not any(s.registry is slot.registry and s.name == slot.name for s in lent.slots):
            lent.slots.append(slot)
            lender.index_slots()
        slot.show(sharded)


def take_over(units: list[Unit], founds: list[Found]) -> None:
    """Let a unit and its companions own what was found for each, and the first have what the others own."""
    main, *companions = units
    borrowed = []
    for unit, found in zip(companions, founds[1:], strict=True):
        unit.main = weakref.ref(main)
        own_parameters(unit, found)
        borrow_parameters(unit, found)
        borrowed += [(p.sharded, slot) for p in unit.parameters for slot in p.slots]
    main.companions = companions
    if founds[0].owned:
        own_parameters(main, founds[0])
    borrow_parameters(main, Found(founds[0].owned, [*founds[0].borrowed, *borrowed]))


# -- parameters replaced by the user ---------------------------------------------------------------------------------


def settle(unit: Unit) -> None:
    """Take over what users put in the place of the unit's parameters, by making its memory anew.

    The old parameters keep their values, for whoever still has them and may put them back. A tensor that is no
    parameter is left in its place: ``torch.func.functional_call`` lends it to the module for one call.
    """
    if unit.settling_paused or unit.unsharded or (not unit.lends_over and unit.untouched()):
        return
    replaced = [p for p in unit.parameters if p.replaced]
    for p in unit.parameters:
        p.lent_over = False
    lent = [p for p in replaced if p.stand_in() is not None]
    for p in lent:
        p.lent_over = True
    unit.lends_over = bool(lent)
    if len(lent) < len(replaced) or unit.slots_changed():
        remake(unit)


def refuse_sharded_stand_ins(unit: Unit) -> None:
    """Raise if a module is about to compute with a sharded tensor that stands in the place of a parameter."""
    for p in unit.parameters:
        held = p.stand_in() if p.lent_over else None
        if held is not None and is_cut(plain := untransformed(held), p.cut.parallel):
            raise RuntimeError(
                f"Parameter {p.name!r} of unit {unit.name!r} was replaced for this call (torch.func.functional_call) "
                f"by a sharded {type(plain).__name__} of shape {tuple(plain.shape)}, and modules compute with full "
                "tensors. Give .full_tensor() of it, called on every rank, or the parameter itself."
            )


def assign_data(unit: Unit, sharded: nn.Parameter, value: torch.Tensor) -> None:
    """``sharded.data = value``. The shard follows when the unit is next used; what aliased the old one keeps it."""
    p = unit.managed(sharded)
    assert p is not None
    if unit.calls or unit.visits:
        p.take_values(value)
        return
    if value.shape == p.cut.shape:
        cut = p.cut
    else:
        new = nn.Parameter(value, requires_grad=False)
        parallel = _parallel_of(p.name, new, unit.ranks)
        if p.cut.parallel is not None and parallel is None:
            raise ValueError(
                f"The data of tensor-parallel parameter {p.name!r} of shape {tuple(p.cut.shape)} was set to a plain "
                f"tensor of shape {tuple(value.shape)}. Give a DTensor on {p.cut.parallel.mesh}."
            )
        cut = cut_alone(unit.ranks, _spec_of(p.name, new, parallel, unit), parallel, p.cut)
    before = local_of(sharded)
    become(sharded, cut.wrap(cut.part_of(value)))
    if isinstance(
        value, (DTensor, RaggedTensor)
    ):  # else it has values; ``to_empty`` of a module within gives these
        carry_mark(before, local_of(sharded))


@torch.inference_mode(False)  # the next step writes to what is made here
def remake(unit: Unit) -> None:
    """Make the unit's memory again from the parameters that its modules hold now."""
    unit.release()
    modules = unit.living_modules()
    own = {id(m) for top in modules for _, m in own_modules(top)}
    lent = [
        (p.sharded, slot)
        for p in unit.parameters
        for slot in p.slots
        if id(slot.module()) not in own and slot.holds(p.sharded)
    ]
    found = find_parameters(
        modules,
        unit.living_ignored(),
        unit.ranks,
        unit.placement_fn,
        unit,
        companion=unit.main is not None,
    )
    for owned in found.owned:
        owned.slots.extend(slot for sharded, slot in lent if sharded is owned.parameter)
    before = unit.parameters
    held = unit.reductions if unit.held else []
    known = {id(p.sharded) for p in before}
    if not any(id(owned.parameter) in known for owned in found.owned):
        held = []  # it belongs to parameters that are the model's no more, as a plain parameter's .grad would
    if held and not _same_parameters(before, found):
        raise RuntimeError(
            f"Parameters of unit {unit.name!r} were replaced by others while gradients of earlier micro-batches are "
            "held. Replace them between optimizer steps."
        )
    for name, parameter, *_ in found.owned:
        if not isinstance(parameter, (DTensor, RaggedTensor)) and parameter.grad is not None:
            raise RuntimeError(
                f"Parameter {name!r} of unit {unit.name!r} was put in the place of another and has a gradient, that of "
                "this rank alone. Set its .grad to None, and replace parameters outside of forward."
            )
    try:
        unit.retire()
        own_parameters(unit, found)
        borrow_parameters(unit, found)
        unit.rejoin_root()
        if held:
            unit.take_held(held)
    except BaseException:
        unit.remake_later(held)
        raise
    finally:
        kept = {id(p.sharded) for p in unit.parameters}
        for p in before:
            # It is nobody's now, and a module that was tied to it may still have it.
            if id(p.sharded) not in kept and unit_of(p.sharded) is unit:
                p.sharded.__dict__.pop(UNIT_OF, None)


def _same_parameters(before: list[ManagedParameter], found: Found) -> bool:
    """Whether the very same parameters are there, whatever their values."""
    return len(before) == len(found.owned) and all(
        p.sharded is owned.parameter
        and owned.parameter.shape == p.cut.shape
        and owned.parameter.dtype == p.spec.storage_dtype
        for p, owned in zip(before, found.owned, strict=True)
    )
