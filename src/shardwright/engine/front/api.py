"""``fully_shard``: checks its arguments and makes a unit of the modules.

``assembly/build.py`` cuts the parameters. ``model/root.py`` and ``unit/uses.py`` run a step. Options of later versions
raise an error here.
"""

from __future__ import annotations

import inspect
import os
import weakref
from collections.abc import Iterable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor

from shardwright.engine.assembly.build import Arguments
from shardwright.engine.assembly.find import (
    UNIT,
    ShardPlacementFn,
    UnitParameters,
    find_parameters,
    is_cut,
    meshes_asked,
    own_modules,
    parameters_of,
)
from shardwright.engine.assembly.overlaps import Sharer, sharers_of
from shardwright.engine.assembly.states import check_layout, check_states, states_of, sync_states
from shardwright.engine.base.offload import offload_of
from shardwright.engine.base.precision import as_precision
from shardwright.engine.base.settings import Settings
from shardwright.engine.comm import Communicator, Streams, make_mesh, streams_for
from shardwright.engine.compat.dtensor import local_of
from shardwright.engine.compat.fully_shard import DataParallelMeshDims, sharded_or_replicated_by_torch
from shardwright.engine.extend import NamedLayout, NamedMemory, NamedStrategy
from shardwright.engine.extend.named_layouts import layout_of
from shardwright.engine.extend.named_strategies import resolve
from shardwright.engine.front.composable import state_of
from shardwright.engine.front.copies import convert_buffer
from shardwright.engine.front.module import FSDPModule, install, original_class
from shardwright.engine.front.selected import hook_backward
from shardwright.engine.front.undo import Undo
from shardwright.engine.layout import Ragged, Strategy
from shardwright.engine.memory import Allocator
from shardwright.engine.model.direct_uses import see_uses
from shardwright.engine.model.optimizer_hook import hook_optimizers
from shardwright.engine.model.optimizer_states import hook_optimizer_states
from shardwright.engine.model.pools import model_options
from shardwright.engine.tensors.extension import is_extended
from shardwright.engine.tensors.parameter import has_no_values, refuse_while_deferring
from shardwright.engine.tensors.ranks import Ranks
from shardwright.engine.tensors.same_object import refuse_uses
from shardwright.engine.tensors.tensor_parallel import data_parallel
from shardwright.engine.unit.owning import take_over
from shardwright.engine.unit.unit import Unit

#: Not ``list[nn.Module]``, because type checkers would not accept a ``list[nn.Linear]``.
_M = TypeVar("_M", bound="nn.Module | list[Any]")


def fully_shard(
    module: _M,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: ShardPlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
    offload_policy: OffloadPolicy = OffloadPolicy(),
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    ignored_modules: Iterable[nn.Module] | None = None,
    strategy: str | NamedStrategy | Strategy | None = None,
    layout: str | NamedLayout | Ragged = "per_parameter",
    memory: str | NamedMemory | Allocator = "dynamic",
    prefetch: int | str = 1,
    strict: bool = False,
    sync_module_states: bool = False,
    check_module_states: bool = False,
) -> _M:
    """Shard the parameters of ``module`` over a device mesh, in place. The default strategy is ZeRO-3, also called
    FSDP.

    The parameters below ``module`` that no earlier call owns become one *unit*: gathered together before the
    module's forward, released after it, gathered again for backward, their gradients reduced together. Call it
    bottom-up, on each block and at last on the whole model. Between steps every parameter is a ``DTensor``, and the
    same object as before, so what holds it stays right.

    Each rank cuts its part from its own copy of the model, so the copies must be equal: build the model with the same
    seed on every rank, or pass ``sync_module_states``. This call communicates only with ``sync_module_states`` or
    ``check_module_states``. It makes process groups only if ``reshard_after_forward`` is a number.

    Args:
        module: a module, or a list of modules that form one unit (say the final norm and the output layer).
        mesh: ``DeviceMesh`` of one dimension, or of two: replicas outside, shards inside (HSDP). Default: all ranks, on
            the accelerator if there is one, else on the CPU. If its ranks do not ascend along every axis, as in
            ``[1, 0]``, the engine uses a mesh of the same ranks that do. Parameters may already be DTensors on other
            axes of the same larger mesh (tensor, sequence and expert parallelism); each rank's part of them is then cut
            again.
        reshard_after_forward: True: release the full parameters after forward and gather them again for backward.
            False: keep them. None: True, but False for the root. An integer k: keep one k-th, so that backward gathers
            only among k neighbouring ranks, say those of one host; k must divide the number of ranks over which
            parameters are gathered.
        shard_placement_fn: ``Shard(dim)`` for a parameter, or None for ``Shard(0)``. The number of ranks need not
            divide the dimension. Or a :class:`ShardPlacementResult`, for a parameter on another mesh than the rest. In
            torch's class of that name, ``dp_mesh_dims`` of ``mesh_info`` names the data-parallel dimensions of that
            mesh.
        mp_policy: dtypes of computation, reduction and outputs; a :class:`PrecisionPolicy` has more fields. Default: no
            dtype changes.
        offload_policy: ``CPUOffloadPolicy(pin_memory=True)``, or :class:`Offload`, which says whether parameters and
            gradients, or the optimizer state, are in the CPU's memory between uses. On a CPU mesh it changes nothing.
        ignored_params: parameters that stay unchanged, in all modules.
        ignored_modules: modules whose parameters and buffers stay unchanged, also in modules below them: they are not
            cut, moved, cast, compared or broadcast. Pass them to every call on a module that contains them.
        strategy: what is sharded over each axis of the mesh: a :class:`Strategy`, or "ddp", "zero1", "zero2", "zero3",
            "hsdp", "hfsdp", or a registered name (docs/extending.md). Default: "zero3" on one axis, "hsdp" on two.
        layout: "per_parameter" cuts each parameter along one dimension, as FSDP2 does. With "ragged", "element" or a
            :class:`Ragged` parameters share segments, which are cut between rows, blocks of rows or elements, with
            little padding. Or a registered name.
        memory: on the root: "dynamic", torch's allocator for every lease; "double_buffer" or "max_pool", slots for the
            units that are being used and prefetched, of one size or of several; "arena", one block for all that the
            engine leases, planned from the first step; a registered name; or an :class:`Allocator`. See docs/memory.md.
        prefetch: on the root: how many units are gathered ahead, or how many bytes, such as "512 MiB".
        strict: on the root: if a step leases memory outside the plan, raise an error instead of a warning.
        sync_module_states: broadcast the parameters and buffers of this call from the first rank of the mesh, before
            they are cut. For models that every rank builds with values. Pass it to every call of a model.
        check_module_states: compare the parameters and buffers of this call over the ranks, by hash. If they differ,
            every rank raises an error that names the tensors and ranks. For deferred tensors the recorded operations
            and generator states are compared. The results of a layout's function are compared, too. Pass it to every
            call of a model.
        dp_mesh_dims: a :class:`DataParallelMeshDims` that names the dimensions of ``mesh`` to shard over and to
            replicate over; several names become one dimension. Every parameter must then be a DTensor on ``mesh``,
            replicated on these dimensions. The module sees DTensors on ``mesh``, unless ``shard_placement_fn`` gives a
            parameter another mesh. Default: all dimensions of ``mesh`` are data-parallel.

    Returns:
        The same module (or list), whose class is now a subclass ``FSDP<Class>`` of it and of :class:`FSDPModule`.

    Raises:
        ValueError: names an argument, module or parameter that cannot be sharded, or two names of one memory. Nothing
            has changed then.
        NotImplementedError: names an option that this version does not support.

    Arguments that ``torch.distributed.fsdp.fully_shard`` of torch 2.13 also has mean the same here. As there,
    ``fully_shard.state(module)`` returns the state that torch's own code reads.
    """
    refuse_while_deferring("fully_shard")
    options = model_options(memory, prefetch, strict)
    for name, value, expected in (
        ("mp_policy", mp_policy, MixedPrecisionPolicy),
        ("offload_policy", offload_policy, OffloadPolicy),
    ):
        if not isinstance(value, expected):
            raise ValueError(
                f"{name} must be a torch.distributed.fsdp.{expected.__name__}, got {value!r} "
                f"({type(value).__name__})"
            )
    modules = _check_modules(module)
    mesh = mesh if mesh is not None else _default_mesh()
    ranks = _ranks(mesh, dp_mesh_dims, strategy)
    offload = offload_of(offload_policy)
    left_out = _check_ignored(modules, ignored_modules)
    _refuse_torchs(modules, left_out)
    ignored = ignored_params or set()
    untouched = [*ignored, *parameters_of(left_out)]
    _refuse_scripted(modules, untouched)
    each = [ranks, *_ranks_of_some(meshes_asked(modules, untouched, shard_placement_fn), strategy, ranks)]
    parameters_of_units = [
        find_parameters(modules, untouched, r, shard_placement_fn, sibling=r is not ranks) for r in each
    ]
    for r, unit_parameters in zip(each, parameters_of_units, strict=True):
        if r.spmd is not None:
            _refuse_cut(unit_parameters)
    units = [
        Unit(
            modules,
            ranks=r,
            settings=Settings(_reshard_after_forward(reshard_after_forward, strategy, r, unit_parameters)),
            arguments=Arguments(
                as_precision(mp_policy), mp_policy, shard_placement_fn, layout_of(layout), offload
            ),
            ignored=ignored,
            ignored_modules=left_out,
        )
        for r, unit_parameters in zip(each, parameters_of_units, strict=True)
    ]
    unit = units[0]
    unit.options = options
    for u, unit_parameters in zip(units, parameters_of_units, strict=True):
        u.values.synced, u.values.checked = sync_module_states, check_module_states
        _same_start(u, modules, unit_parameters, layout)
    sharers = sharers_of(modules, parameters_of_units)
    undo = Undo(modules, parameters_of_units)
    try:
        take_over(units, parameters_of_units, undo.exchanged)
        _move_buffers(modules, left_out, ranks.device)
        hook_optimizers()
        see_uses()
        hook_optimizer_states()
        hook_backward()
        install(unit, modules)
        _refuse_sharers(sharers, unit)
    except BaseException:
        undo()
        raise
    return module


fully_shard.state = state_of  # type: ignore[attr-defined]


# -- arguments -------------------------------------------------------------------------------------------------------


def _reshard_after_forward(
    value: bool | int | None,
    strategy: str | NamedStrategy | Strategy | None,
    ranks: Ranks,
    unit_parameters: UnitParameters,
) -> bool | int | None:
    """True, False, None, or the number of ranks that keep parameters together after forward: neither 1 nor all."""
    if value is None or value is False:
        return value
    if not isinstance(value, int):
        raise ValueError(
            f"reshard_after_forward must be True, False, None or a number of ranks, got {value!r}"
        )
    if ranks.replicates_parameters:
        raise ValueError(
            f"reshard_after_forward={value} releases full parameters, but strategy {strategy or ranks.strategy!r} "
            "keeps them until the optimizer's step. Leave it at None, or use a strategy that shards parameters."
        )
    if value is True:
        return True
    size = ranks.comm.world_size
    if value < 1 or size % value:
        raise ValueError(
            f"reshard_after_forward={value} must divide the {size} ranks over which parameters are gathered"
        )
    if 1 < value < size:
        for name, parameter, *_ in unit_parameters.owned:
            if is_extended(local_of(parameter) if isinstance(parameter, DTensor) else parameter):
                raise NotImplementedError(
                    f"parameter {name!r} ({type(parameter).__name__}) has fsdp_pre_all_gather, so it is gathered over "
                    f"all ranks; pass True or False, not reshard_after_forward={value}"
                )
        return value
    return value > 1  # 1 rank keeps everything; all ranks keep only their shards


def _check_modules(module: nn.Module | list[nn.Module]) -> list[nn.Module]:
    modules = list(module) if isinstance(module, (list, tuple)) else [module]
    if not modules:
        raise ValueError("fully_shard needs at least one module, got an empty list")
    for each in modules:
        if not isinstance(each, nn.Module):
            raise ValueError(f"fully_shard expects nn.Module, got {type(each).__name__}")
        places = [i for i, other in enumerate(modules) if other is each]
        if len(places) > 1:
            raise ValueError(
                f"fully_shard got one {type(each).__name__} at places {places} of its list. List each module once."
            )
        if isinstance(each, (nn.ModuleList, nn.ModuleDict)) and type(each).forward is nn.Module.forward:
            raise ValueError(
                f"fully_shard needs modules that are called; {type(each).__name__} has no forward. Call fully_shard "
                "on each of its children, or pass them as a list."
            )
        if isinstance(each, torch.jit.ScriptModule):
            raise ValueError(
                f"fully_shard got a ScriptModule ({type(each).__name__}), whose parameters TorchScript holds, so "
                "shardwright cannot replace them. Shard the Python module that it was made from."
            )
        if _is_lazy(type(each).forward):
            raise ValueError(
                f"The forward of {type(each).__name__} is a generator or coroutine: its body runs after the call has "
                "returned, when the weights are already released. Let forward return its results, or shard the "
                "modules that it calls."
            )
        if isinstance(each, FSDPModule):
            unit: Unit = each.__dict__[UNIT]
            names = ", ".join(repr(p.name) for p in unit.parameters) or "none"
            raise ValueError(
                f"fully_shard was already applied to this {original_class(type(each)).__name__}: it is unit "
                f"{unit.name!r}, with parameters {names}. Apply it once, also to a module with several names in the "
                "model."
            )
    below = {id(child): each for each in modules for child in each.modules() if child is not each}
    for each in modules:
        if id(each) in below:
            raise ValueError(
                f"fully_shard got a {type(each).__name__} that is a part of the {type(below[id(each)]).__name__} in "
                "the same list; pass only the outer module"
            )
    return modules


def _is_lazy(forward: Any) -> bool:
    kinds = inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction
    return any(is_kind(forward) for is_kind in kinds)


def _refuse_scripted(modules: list[nn.Module], untouched: Iterable[nn.Parameter]) -> None:
    """Raise if a ScriptModule inside holds parameters, because gathered ones could not replace them."""
    untouched_ids = {id(p) for p in untouched}
    for top in modules:
        for name, module in top.named_modules():
            if isinstance(module, torch.jit.ScriptModule) and any(
                id(p) not in untouched_ids for p in module.parameters()
            ):
                raise ValueError(
                    f"Module {name!r} of {type(top).__name__} is a ScriptModule with parameters, which TorchScript "
                    "holds, so shardwright cannot replace them. Use the Python module that it was made from "
                    "(torch.compile makes it as fast), or pass it in ignored_modules and average its gradients "
                    "yourself."
                )


def _check_ignored(modules: list[nn.Module], ignored: Iterable[nn.Module] | None) -> list[nn.Module]:
    if isinstance(ignored, nn.Module):  # a module may be iterable
        raise ValueError(
            f"ignored_modules expects a collection of modules, got a {type(ignored).__name__}; put it in a set"
        )
    ignored_modules = list(ignored) if ignored is not None else []
    for each in ignored_modules:
        if not isinstance(each, nn.Module):
            raise ValueError(f"ignored_modules expects modules, got {type(each).__name__}")
    inside = {id(m) for top in ignored_modules for m in top.modules()}
    for each in modules:
        if id(each) in inside:
            raise ValueError(
                f"fully_shard got a {type(each).__name__} that is also in its ignored_modules; remove it from one of "
                "the two"
            )
    return ignored_modules


def _refuse_torchs(modules: list[nn.Module], ignored: list[nn.Module]) -> None:
    """Raise if torch shards or replicates a module inside."""
    left_out = {id(m) for top in ignored for m in top.modules()}
    for top in modules:
        for name, module in top.named_modules():
            by = sharded_or_replicated_by_torch(module) if id(module) not in left_out else None
            if by is not None and not isinstance(module, FSDPModule):
                raise ValueError(
                    f"fully_shard of a {type(top).__name__} found {name or 'itself'!r} ({type(module).__name__}). "
                    f"torch's {by} was applied to it, so its parameters belong to another engine. Apply "
                    "shardwright's fully_shard to it instead, or pass it in ignored_modules."
                )


_OF_A_RANK = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables of a launcher, which a process group needs."""


def _default_mesh() -> DeviceMesh:
    if not dist.is_initialized():
        if missing := [name for name in _OF_A_RANK if name not in os.environ]:
            raise RuntimeError(
                f"fully_shard: expected a program that is started as ranks, found no {missing[0]} in the environment. "
                "Start it with `torchrun --standalone --nproc-per-node 2 PROGRAM.py`, or call "
                "torch.distributed.init_process_group before"
            )
        dist.init_process_group()
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return make_mesh(accelerator.type if accelerator else "cpu", (dist.get_world_size(),))


def _check_mesh(mesh: DeviceMesh) -> None:
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(f"mesh must be a DeviceMesh, got {type(mesh).__name__}")
    if mesh.ndim not in (1, 2):
        raise ValueError(
            f"fully_shard expects a mesh of one dimension, or of two with replicas outside, got {mesh.ndim} dimensions "
            f"of shape {tuple(mesh.shape)}. Pass the data-parallel part of it, such as mesh['replicate', 'shard']."
        )
    if mesh.get_coordinate() is None:
        raise ValueError(f"rank {dist.get_rank()} is not in the mesh of ranks {mesh.mesh.tolist()}")


def _device_of(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


#: By name of the group, device and streams.
_communicators: weakref.WeakValueDictionary[tuple[str, torch.device, Streams], Communicator] = (
    weakref.WeakValueDictionary()
)


def _ranks(mesh: DeviceMesh, dims: Any, strategy: str | NamedStrategy | Strategy | None) -> Ranks:
    """The ranks of a mesh, or of the dimensions that ``dims`` names."""
    spmd = None
    if dims is not None:
        if not isinstance(dims, DataParallelMeshDims):
            raise ValueError(f"dp_mesh_dims must be a DataParallelMeshDims, got {dims!r}")
        if not isinstance(mesh, DeviceMesh):
            raise ValueError(f"mesh must be a DeviceMesh, got {type(mesh).__name__}")
        mesh, spmd = data_parallel(mesh, dims)
        if strategy is None and dims.shard is None:
            strategy = "ddp"
    _check_mesh(mesh)
    device = _device_of(mesh)
    return Ranks(
        mesh,
        resolve(strategy, mesh.ndim),
        lambda group: _communicator(group, device),
        spmd,
    )


def _refuse_cut(unit_parameters: UnitParameters) -> None:
    for name, parameter, _, parallel in unit_parameters.owned:
        if isinstance(parameter, DTensor) and is_cut(parameter, parallel):
            raise ValueError(
                f"parameter {name!r} of shape {tuple(parameter.shape)}, a DTensor placed {parameter.placements} on "
                f"{parameter.device_mesh}, is cut over dimensions that dp_mesh_dims names: expected Replicate() there"
            )


def _ranks_of_some(
    infos: list[Any], strategy: str | NamedStrategy | Strategy | None, whole: Ranks
) -> list[Ranks]:
    """The ranks of parameters with another mesh by shard_placement_fn, each mesh once."""
    ranks_by_mesh = {whole.mesh: whole}
    for info in infos:
        dims = getattr(info, "dp_mesh_dims", None)  # torch's mesh_info of a whole mesh has dp_mesh_dims
        _check_mesh(info.mesh)
        if dims is None and whole.is_of(info.mesh):
            continue
        if info.mesh.ndim != whole.mesh.ndim and strategy is not None:
            raise ValueError(
                f"strategy {strategy!r} is for the {whole.mesh.ndim} dimensions of {whole.mesh}; shard_placement_fn "
                f"gives a parameter {info.mesh}. Leave strategy at None, or call fully_shard separately on the "
                "module with this parameter."
            )
        ranks = _ranks(info.mesh if dims is None else info.spmd_mesh, dims, strategy)
        first = ranks_by_mesh.setdefault(ranks.mesh, ranks)
        if first.spmd != ranks.spmd:
            raise ValueError(
                f"shard_placement_fn gives one parameter the data-parallel mesh {ranks.mesh} as a part of "
                f"{_whole(ranks)}; another parameter, or the arguments of fully_shard, have it as a part of "
                f"{_whole(first)}. All parameters of a call must be on the same larger mesh: call fully_shard "
                "separately on the modules that differ."
            )
    return [ranks for ranks in ranks_by_mesh.values() if ranks is not whole]


def _whole(ranks: Ranks) -> str:
    return "no other, without dp_mesh_dims" if ranks.spmd is None else str(ranks.spmd.mesh)


def _communicator(group: dist.ProcessGroup | None, device: torch.device) -> Communicator:
    """The communicator of a group and device. Units keep it alive."""
    key = (group.group_name if group is not None else "", device, streams_for(device))
    comm = _communicators.get(key)
    if (
        comm is None or comm.group is not group
    ):  # a new group after destroy_process_group may have the old name
        comm = _communicators[key] = Communicator(group, device)
    return comm


def _same_start(
    unit: Unit, modules: list[nn.Module], unit_parameters: UnitParameters, layout: str | NamedLayout | Ragged
) -> None:
    """If requested, broadcast the parameters and buffers of the new unit, or compare them over the ranks."""
    for name, is_asked_for in (("synced", unit.values.synced), ("checked", unit.values.checked)):
        for module in (m for top in modules for m in top.modules()) if is_asked_for else ():
            inner: Unit | None = module.__dict__.get(UNIT)
            if inner is not None and inner.parameters and not getattr(inner.values, name):
                option = {"synced": "sync_module_states", "checked": "check_module_states"}[name]
                raise ValueError(
                    f"{option} covers only the parameters of its own call, and {inner.name!r} inside was sharded "
                    f"without it: each rank has cut its own copy, unchecked. Pass {option}=True to every fully_shard "
                    "of the model."
                )
    if unit.values.synced or unit.values.checked:
        states = states_of(modules, unit_parameters, unit.watch.ignored_modules())
        if unit.values.synced:
            sync_states(unit.mesh, unit.ranks.device, states, unit.name)
        if unit.values.checked:
            check_states(unit.mesh, states, unit.name)
            ragged = unit.arguments.layout
            if ragged is not None and callable(ragged.granule):
                name = repr(layout.name if isinstance(layout, NamedLayout) else layout)
                check_layout(unit.mesh, ragged, name, unit_parameters, unit.name)


# -- modules ----------------------------------------------------------------------------------------------------------


def _refuse_sharers(sharers: list[Sharer], unit: Unit) -> None:
    for sharer in sharers:
        refuse_uses(
            sharer.tensor,
            f"{sharer.name!r} was a view of parameter {sharer.parameter!r} of unit {unit.name!r}, or its .data. The "
            "parameter was sharded since, so this tensor has old values, in memory that the model no longer uses. Make "
            "it from the parameter in forward, or give it a copy (clone()) before fully_shard.",
        )


def _move_buffers(modules: list[nn.Module], ignored: list[nn.Module], device: torch.device) -> None:
    stays = {id(b) for top in ignored for b in top.buffers()}
    for top in modules:
        for _, module in own_modules(top):
            for name, buffer in module._buffers.items():
                if buffer is None or id(buffer) in stays:
                    continue
                if not has_no_values(buffer) and buffer.device != device:
                    module._buffers[name] = convert_buffer(buffer, lambda b: b.to(device))
