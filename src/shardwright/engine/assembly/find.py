"""Finds the parameters that a unit owns, and those of other units in its modules. Nothing is made or changed here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from shardwright.engine.compat.dtensor import local_of
from shardwright.engine.tensors.extension import is_attached, is_extended
from shardwright.engine.tensors.parameter import Managed, Slot, has_no_values, plain_of, unit_of
from shardwright.engine.tensors.ragged.tensor import RaggedTensor
from shardwright.engine.tensors.ranks import Ranks
from shardwright.engine.tensors.same_object import TAKEN, Taken
from shardwright.engine.tensors.tensor_parallel import TensorParallel, cut_dim, parallel_of

UNIT = "_shardwright_unit"  #: the attribute under which a sharded module keeps its unit


@dataclass(frozen=True)
class ShardPlacementResult:
    """The result of a ``shard_placement_fn`` for a parameter with a separate data-parallel mesh.

    For example a parameter of an expert: ``fully_shard`` shards it over this ``mesh``, and all other parameters over
    the ``mesh`` of the call. torch's class of this name, with its ``mesh_info``, works, too. If ``mesh_info`` has
    ``dp_mesh_dims``, the parameter must already be a DTensor on its whole mesh, as with
    ``fully_shard(dp_mesh_dims=...)``.

    Attributes:
        placement: as without this class.
        mesh: has one dimension, or two: replicas outside, shards inside.
    """

    placement: Shard | None
    mesh: DeviceMesh


ShardPlacementFn = Callable[[nn.Parameter], "Shard | ShardPlacementResult | None"]


class Owned(NamedTuple):
    """A parameter that a unit will own, and all places where its modules hold it."""

    name: str
    parameter: nn.Parameter
    slots: list[Slot]
    parallel: TensorParallel | None


class UnitParameters(NamedTuple):
    owned: list[Owned]
    borrowed: list[
        tuple[nn.Parameter, Slot]
    ]  #: sharded parameters of other units, tied to a name in this one


def mesh_asked(fn: ShardPlacementFn | None, parameter: nn.Parameter) -> DeviceMesh | None:
    """The mesh that a placement function gives a parameter. None: the mesh of the call."""
    result: Any = fn(parameter) if fn is not None else None
    return getattr(getattr(result, "mesh_info", result), "mesh", None)


def meshes_asked(
    modules: list[nn.Module], ignored: Iterable[nn.Parameter], fn: ShardPlacementFn | None
) -> list[Any]:
    """The results of a placement function for parameters with separate meshes. Each has its ``mesh``."""
    if fn is None:
        return []
    ids = {id(p) for p in ignored}
    own = [p for top in modules for _, m in own_modules(top) for p in m._parameters.values() if p is not None]
    placements = [fn(p) for p in own if id(p) not in ids and not isinstance(p, Managed)]
    return [info for r in placements if hasattr(info := getattr(r, "mesh_info", r), "mesh")]


def find_parameters(
    modules: list[nn.Module],
    ignored: Iterable[nn.Parameter],
    ranks: Ranks,
    placement_fn: ShardPlacementFn | None = None,
    unit: Any = None,
    sibling: bool = False,
) -> UnitParameters:
    """Parameters below ``modules`` that no inner unit owns, each once, with all names of tied weights.

    Parameters that ``placement_fn`` gives another mesh are left out. A ``sibling`` gets only the parameters that it
    gives this mesh. ``unit`` is the unit that already owns them, if this is not the first time.
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
                    if not sibling:
                        borrowed.append((lent, slot))
                    continue
                if unit is None or unit_of(parameter) is not unit:
                    mesh = mesh_asked(placement_fn, parameter)
                    if not (ranks.is_of(mesh) or (mesh is None and not sibling)):
                        continue
                parallel = parallel_of_parameter(full_name, parameter, ranks)
                if unit_of(parameter) is not unit or unit is None:
                    _check_parameter(full_name, module, parameter, parallel, unit)
                entry = owned.setdefault(id(parameter), Owned(full_name, parameter, [], parallel))
                entry.slots.append(slot)
    return UnitParameters(list(owned.values()), borrowed)


def parameters_of(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    return [p for top in modules for p in top.parameters()]


def own_modules(top: nn.Module) -> list[tuple[str, nn.Module]]:
    """``top`` and the modules below it, without modules that are already sharded and those below them."""
    inner_modules: list[tuple[str, nn.Module]] = []
    seen: set[int] = set()
    todo = [("", top)]
    while todo:
        name, module = todo.pop()
        if id(module) in seen or (module is not top and hasattr(module, UNIT)):
            continue
        if isinstance(module, torch.jit.ScriptModule):
            continue
        seen.add(id(module))
        inner_modules.append((name, module))
        below = [(f"{name}.{n}" if name else n, m) for n, m in module._modules.items() if m is not None]
        todo.extend(reversed(below))
    return inner_modules


def _lent_by_another(name: str, parameter: nn.Parameter, top: nn.Module, unit: Any) -> nn.Parameter | None:
    """The sharded parameter of another unit: ``parameter`` itself, or the one that replaced it there."""
    origin: Taken | None = parameter.__dict__.get(TAKEN)
    sharded = parameter if isinstance(parameter, Managed) or origin is None else origin.sharded
    owner = unit_of(sharded)
    if owner is None or owner is unit or (unit is not None and not _holds(owner, sharded)):
        return None  # the other unit lost it: it has moved here with its module
    if owner.main is None and any(top is m for outer in owner.watch.modules() for _, m in own_modules(outer)):
        raise ValueError(
            f"parameter {name!r} of shape {tuple(parameter.shape)} belongs to a unit already: an outer module was "
            "sharded before this one. Call fully_shard on inner modules first."
        )
    return sharded


def _holds(owner: Any, sharded: nn.Parameter) -> bool:
    """Whether a unit's own modules still have one of its parameters."""
    inside = {id(m) for top in owner.watch.modules() for _, m in own_modules(top)}
    p = owner.managed(sharded)
    full_shown = owner.weights.forms.full_shown
    return p is not None and any(
        id(slot.module()) in inside and (full_shown or slot.holds(sharded)) for slot in p.slots
    )


def _check_parameter(
    name: str,
    module: nn.Module,
    parameter: nn.Parameter,
    parallel: TensorParallel | None,
    unit: Any,
) -> None:
    if isinstance(parameter, nn.parameter.UninitializedParameter):
        raise ValueError(f"parameter {name!r} is not initialised. Run one forward of the lazy module first.")
    owner = f" of unit {unit.name!r}" if unit is not None else ""
    where = f"parameter {name!r}{owner} of shape {tuple(parameter.shape)}"
    if is_attached(parameter):
        raise ValueError(
            f"{where}: fsdp_pre_all_gather was attached to this object, and each rank's part is a different object "
            "without it. Define it on the parameter's class, or attach it to the local tensor after fully_shard."
        )
    if parallel is not None and is_extended(plain_of(parameter)):
        raise NotImplementedError(
            f"{where}, a DTensor over a {type(local_of(parameter)).__name__}, defines its own all-gather "
            "(fsdp_pre_all_gather), which cannot be combined with tensor parallelism. Pass it in ignored_params, or "
            "do not parallelize it."
        )
    if has_no_values(parameter) and not parameter.is_meta and is_extended(parameter):
        raise NotImplementedError(
            f"{where}, a {type(parameter).__name__}, defines its own all-gather (fsdp_pre_all_gather), and "
            "deferred_init cannot replay the operation that made it. Build it on a device, or on the meta device."
        )
    _refuse_composite(where, plain_of(parameter))
    if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return
    if module.max_norm is not None:
        raise ValueError(
            f"{where}: with max_norm the module changes its weights in forward. Each rank would change the rows of "
            "its own tokens, so the ranks would differ. Build the embedding without max_norm."
        )
    if module.sparse:
        raise ValueError(
            f"{where}: sparse gradients cannot be reduced. Build the embedding with sparse=False."
        )


def _refuse_composite(where: str, plain: Any) -> None:
    """Raise for a tensor that is made of others, such as quantised rows and scales, without ``fsdp_pre_all_gather``."""
    kind = type(plain)
    if not hasattr(kind, "__tensor_flatten__") or isinstance(plain, (DTensor, RaggedTensor)):
        return
    if not is_extended(plain):
        raise ValueError(
            f"{where} is a {kind.__name__}, made of other tensors ({', '.join(plain.__tensor_flatten__()[0])}), and "
            "has no fsdp_pre_all_gather, so it cannot be cut. Do not convert the weight, and shard the ordinary one. "
            "Or convert it before fully_shard, freeze it and pass it in ignored_params of every call; then each rank "
            "keeps the whole parameter."
        )


def parallel_of_parameter(name: str, parameter: torch.Tensor, ranks: Ranks) -> TensorParallel | None:
    """The placement of a parameter on the axes that are not data-parallel. The parameter may already be sharded."""
    if isinstance(parameter, RaggedTensor):
        return parameter.spec.parallel
    if isinstance(parameter, DTensor):
        return parallel_of(name, parameter, ranks.mesh, ranks.spmd)
    if ranks.spmd is not None:
        raise ValueError(
            f"parameter {name!r} of shape {tuple(parameter.shape)} is a {type(parameter).__name__}; with "
            f"dp_mesh_dims every parameter must already be a DTensor on {ranks.spmd.mesh}. Call distribute_tensor "
            "before."
        )
    return None


def is_cut(parameter: torch.Tensor, parallel: TensorParallel | None) -> bool:
    """Whether it is already cut over the data-parallel mesh."""
    if isinstance(parameter, DTensor) and parallel is not None:
        if parameter.device_mesh != parallel.mesh:
            return True
        return any(cut_dim(parameter.placements[axis]) is not None for axis in parallel.data)
    return isinstance(parameter, (DTensor, RaggedTensor))


def inner_first(module: nn.Module, seen: set[int] | None = None) -> Iterator[nn.Module]:
    """All modules, each once and after the modules inside it."""
    seen = set() if seen is None else seen
    if id(module) not in seen:
        seen.add(id(module))
        for child in module.children():
            yield from inner_first(child, seen)
        yield module
