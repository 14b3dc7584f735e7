"""``fully_shard``: checks its arguments, cuts parameters, installs hooks.

What a step does is in ``unit.py`` and ``root.py``. Options of later versions are refused here by name.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor, Shard

from shardwright._torch import DataParallelMeshDims
from shardwright.comm import Communicator
from shardwright.engine import epoch
from shardwright.engine.module import FSDPModule, fsdp_class
from shardwright.engine.parameter import TAKEN, UNIT_OF, ManagedParameter, Slot, build, full_view, local_view
from shardwright.engine.root import UNIT, attach, before_optimizer_step
from shardwright.engine.unit import Unit
from shardwright.layout import TensorSpec, plan_unit
from shardwright.memory import Slab

ShardPlacementFn = Callable[[nn.Parameter], Shard | None]


_M = TypeVar("_M", bound="nn.Module | list[nn.Module]")


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
    strategy: str = "zero3",
    layout: str = "per_parameter",
    memory: str = "dynamic",
    prefetch: int = 1,
    strict: bool = False,
) -> _M:
    """Shard the parameters of ``module`` over a device mesh, in place: ZeRO-3, also called FSDP.

    The parameters below ``module`` that no earlier call owns become one *unit*: gathered together before the
    module's forward, released after it, gathered again for backward, their gradients reduced together. Call it
    bottom-up, on each block and at last on the whole model. Between steps every parameter is a ``DTensor``; build
    the optimizer after sharding.

    Nothing is communicated and no communicator is created here: each rank cuts its part out of its own copy, so the
    copies must be equal (build the model with the same seed on every rank).

    Args:
        module: a module, or a list of modules that form one unit (say the final norm and the output layer).
        mesh: 1-D ``DeviceMesh``. Default: all ranks, on the accelerator if there is one, else on the CPU.
        reshard_after_forward: True: release the full parameters after forward and gather them again for backward.
            False: keep them. None: True, but False for the root.
        shard_placement_fn: ``Shard(dim)`` for a parameter, or None for ``Shard(0)``. Any dimension, even or not.
        mp_policy: dtypes of computation, reduction and outputs. Default: none is changed.
        offload_policy: only ``OffloadPolicy()``, which offloads nothing.
        ignored_params: parameters that are left as they are, everywhere.
        dp_mesh_dims, strategy, layout, memory, prefetch, strict: only their defaults in this version.

    Returns:
        The same module (or list), whose class is now a subclass ``FSDP<Class>`` of it and of :class:`FSDPModule`.

    Raises:
        ValueError: an argument or parameter that cannot be sharded, named.
        NotImplementedError: an option that this version does not honour yet, named.

    The signature is that of ``torch.distributed.fsdp.fully_shard`` in torch 2.13.
    """
    _refuse_later_options(
        reshard_after_forward, offload_policy, dp_mesh_dims, strategy, layout, memory, prefetch, strict
    )
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
    _check_mesh(mesh)
    device = _device_of(mesh)
    owned = _find_parameters(modules, ignored_params or set())
    unit = Unit(
        modules,
        mesh=mesh,
        comm=_communicator(mesh.get_group(), device),
        policy=mp_policy,
        reshard_after_forward=cast("bool | None", reshard_after_forward),
        attach=attach,
    )
    if owned:
        _shard_parameters(unit, owned, mesh, device, shard_placement_fn)
    _move_buffers(modules, device)
    epoch.install(before_optimizer_step)
    for each in modules:
        setattr(each, UNIT, unit)
        _install_hooks(each, unit)
        each.__class__ = fsdp_class(type(each))
    return module


# -- arguments -------------------------------------------------------------------------------------------------------


def _refuse_later_options(
    reshard_after_forward: Any,
    offload_policy: Any,
    dp_mesh_dims: Any,
    strategy: Any,
    layout: Any,
    memory: Any,
    prefetch: Any,
    strict: Any,
) -> None:
    later = {
        "offload_policy=CPUOffloadPolicy()": isinstance(offload_policy, CPUOffloadPolicy),
        "dp_mesh_dims": dp_mesh_dims is not None,
        f"strategy={strategy!r}": strategy != "zero3",
        f"layout={layout!r}": layout != "per_parameter",
        f"memory={memory!r}": memory != "dynamic",
        f"prefetch={prefetch!r}": prefetch != 1,
        f"strict={strict!r}": strict is not False,
        f"reshard_after_forward={reshard_after_forward!r} (a group size)": isinstance(
            reshard_after_forward, int
        )
        and not isinstance(reshard_after_forward, bool),
    }
    for option, asked in later.items():
        if asked:
            raise NotImplementedError(
                f"fully_shard does not support {option} in this version. Leave it at its default."
            )
    if not (reshard_after_forward is None or isinstance(reshard_after_forward, bool)):
        raise ValueError(f"reshard_after_forward must be True, False or None, got {reshard_after_forward!r}")


def _check_modules(module: nn.Module | list[nn.Module]) -> list[nn.Module]:
    modules = list(module) if isinstance(module, (list, tuple)) else [module]
    if not modules:
        raise ValueError("fully_shard needs at least one module, got an empty list")
    for each in modules:
        if not isinstance(each, nn.Module):
            raise ValueError(f"fully_shard expects nn.Module, got {type(each).__name__}")
        if isinstance(each, (nn.ModuleList, nn.ModuleDict)) and type(each).forward is nn.Module.forward:
            raise ValueError(
                f"fully_shard needs modules that are called; {type(each).__name__} has no forward. Shard its "
                "children, each on its own, or pass them as a list."
            )
        if isinstance(each, FSDPModule):
            raise ValueError(f"fully_shard was already applied to this {type(each).__name__}; apply it once")
    below = {id(child): each for each in modules for child in each.modules() if child is not each}
    for each in modules:
        if id(each) in below:
            raise ValueError(
                f"fully_shard got a {type(each).__name__} that lies inside the {type(below[id(each)]).__name__} of "
                "the same list; pass only the outer one"
            )
    return modules


def _default_mesh() -> DeviceMesh:
    if not dist.is_initialized():
        dist.init_process_group()
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return init_device_mesh(accelerator.type if accelerator else "cpu", (dist.get_world_size(),))


def _check_mesh(mesh: DeviceMesh) -> None:
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(f"mesh must be a DeviceMesh, got {type(mesh).__name__}")
    if mesh.ndim == 2:
        raise NotImplementedError(
            f"fully_shard does not support a 2-D mesh (HSDP), here of shape {tuple(mesh.shape)}, in this version. "
            "Pass a 1-D mesh, such as mesh['shard']."
        )
    if mesh.ndim != 1:
        raise ValueError(
            f"fully_shard expects a 1-D mesh, got {mesh.ndim} dimensions of shape {tuple(mesh.shape)}"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(f"rank {dist.get_rank()} is not in the mesh of ranks {mesh.mesh.tolist()}")


def _device_of(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


_communicators: weakref.WeakValueDictionary[tuple[str, torch.device], Communicator] = (
    weakref.WeakValueDictionary()
)


def _communicator(group: dist.ProcessGroup, device: torch.device) -> Communicator:
    """One per group and device, so that the units of a model share their side streams; units keep it alive."""
    key = (group.group_name, device)
    comm = _communicators.get(key)
    if (
        comm is None or comm.group is not group
    ):  # a group made after destroy_process_group may have the old name
        comm = _communicators[key] = Communicator(group, device)
    return comm


# -- parameters ------------------------------------------------------------------------------------------------------

Owned = list[tuple[str, nn.Parameter, list[Slot]]]


def _find_parameters(modules: list[nn.Module], ignored: set[nn.Parameter]) -> Owned:
    """Parameters below ``modules`` that no inner unit owns, each once, with every name that tied weights have."""
    found: dict[int, tuple[str, nn.Parameter, list[Slot]]] = {}
    ignored_ids = {id(p) for p in ignored}
    for position, top in enumerate(modules):
        prefix = f"{position}." if len(modules) > 1 else ""
        for module_name, module in _own_modules(top):
            for name, parameter in module._parameters.items():
                if parameter is None or id(parameter) in ignored_ids:
                    continue
                full_name = f"{prefix}{module_name}.{name}" if module_name else f"{prefix}{name}"
                _check_parameter(full_name, module, parameter)
                entry = found.setdefault(id(parameter), (full_name, parameter, []))
                entry[2].append(Slot.of(module, name))
    return list(found.values())


def _own_modules(top: nn.Module) -> list[tuple[str, nn.Module]]:
    """``top`` and the modules below it, but nothing at or below a module that is sharded already."""
    found: list[tuple[str, nn.Module]] = []
    seen: set[int] = set()
    todo = [("", top)]
    while todo:
        name, module = todo.pop()
        if id(module) in seen or (module is not top and hasattr(module, UNIT)):
            continue
        seen.add(id(module))
        found.append((name, module))
        below = [(f"{name}.{n}" if name else n, m) for n, m in module._modules.items() if m is not None]
        todo.extend(reversed(below))
    return found


def _check_parameter(name: str, module: nn.Module, parameter: nn.Parameter) -> None:
    if isinstance(parameter, nn.parameter.UninitializedParameter):
        raise ValueError(f"parameter {name!r} is not initialised. Run one forward of the lazy module first.")
    where = f"parameter {name!r} of shape {tuple(parameter.shape)}"
    owner = getattr(parameter, TAKEN, None)
    if owner is not None:
        raise ValueError(
            f"{where} is shared with {owner!r}, which an earlier fully_shard call owns. Tied weights must be in one "
            "unit: pass both modules in one call, fully_shard([module_a, module_b])."
        )
    if hasattr(parameter, UNIT_OF):
        raise ValueError(
            f"{where} belongs to a unit already: an outer module was sharded before this one. Call fully_shard "
            "on inner modules first."
        )
    if isinstance(parameter, DTensor):
        raise NotImplementedError(
            f"{where} is a DTensor already. fully_shard does not yet compose with tensor parallelism; shard it first "
            "or pass it in ignored_params."
        )
    if isinstance(parameter, nn.parameter.UninitializedParameter):
        raise ValueError(
            f"{where} is not initialised. Run one forward, or give the lazy module its sizes, first."
        )
    if parameter.is_meta:
        raise NotImplementedError(
            f"{where} is on the meta device. This version shards parameters that hold values: build the model on the "
            "CPU or the device, then call fully_shard."
        )
    if parameter.ndim == 0:
        raise ValueError(
            f"{where}: a 0-d parameter cannot be sharded. Make it 1-d, or pass it in ignored_params."
        )
    if not parameter.is_contiguous():
        raise NotImplementedError(
            f"{where} is not contiguous, with strides {parameter.stride()}. Make it contiguous before fully_shard."
        )
    if getattr(module, "sparse", False) and isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        raise ValueError(
            f"{where}: sparse gradients cannot be reduced. Build the embedding with sparse=False."
        )


def _placement_dim(fn: ShardPlacementFn | None, name: str, parameter: nn.Parameter) -> int:
    placement = fn(parameter) if fn is not None else None
    if placement is None:
        return 0
    if not isinstance(placement, Shard):
        raise ValueError(
            f"shard_placement_fn must return Shard or None, got {placement!r} for parameter {name!r}. "
            "Placements on another mesh are not supported in this version."
        )
    dim = placement.dim + parameter.ndim if placement.dim < 0 else placement.dim
    if not 0 <= dim < parameter.ndim:
        raise ValueError(
            f"shard_placement_fn returned {placement} for parameter {name!r} of shape {tuple(parameter.shape)}, which "
            f"has {parameter.ndim} dimensions"
        )
    return dim


def _shard_parameters(
    unit: Unit, owned: Owned, mesh: DeviceMesh, device: torch.device, placement_fn: ShardPlacementFn | None
) -> None:
    """Cut each parameter, make both of its forms, and put the sharded one into the modules."""
    specs = [
        TensorSpec(
            name,
            tuple(parameter.shape),
            parameter.dtype,
            (unit.policy.param_dtype or parameter.dtype)
            if parameter.is_floating_point()
            else parameter.dtype,
            _placement_dim(placement_fn, name, parameter),
        )
        for name, parameter, _ in owned
    ]
    comm = unit.comm
    layout = plan_unit(specs, comm.world_size)
    shard = torch.zeros(layout.shard_nbytes, dtype=torch.uint8, device=device)
    slab = Slab(layout.slab_nbytes, device)
    slab.lease()  # views are made over memory that is there
    on_gradient = _gradient_listener(unit)
    parameters: list[ManagedParameter | None] = [None] * len(owned)
    with torch.no_grad():
        for run in layout.runs:
            size = run.storage_dtype.itemsize
            flat = shard[run.shard_bytes :][: run.shard_numel * size].view(run.storage_dtype)
            for segment in run.segments:
                spec, (_, original, slots) = specs[segment.index], owned[segment.index]
                rows = segment.rows_of(comm.rank)
                local = local_view(flat, segment.shard_offset, rows, segment, spec)
                start = min(comm.rank * segment.rows, segment.size)
                local.copy_(original.narrow(spec.dim, start, rows))
                full = full_view(slab, run, segment, spec)
                parameters[segment.index] = build(
                    original, spec, tuple(slots), mesh=mesh, local=local, full=full, on_gradient=on_gradient
                )
    slab.release()
    managed = cast("list[ManagedParameter]", parameters)
    unit.own(layout, shard, slab, managed)
    ref = weakref.ref(unit)
    for parameter, (_, original, _) in zip(managed, owned, strict=True):
        setattr(original, TAKEN, f"{parameter.name} of {unit.name}")
        setattr(parameter.sharded, UNIT_OF, ref)
        for slot in parameter.slots:
            slot.show(parameter.sharded)


def _gradient_listener(unit: Unit) -> Callable[[torch.Tensor], None]:
    ref = weakref.ref(unit)  # the parameter holds this hook and the unit holds the parameter

    def on_gradient(parameter: torch.Tensor) -> None:
        owner = ref()
        if owner is not None:
            owner.on_gradient()

    return on_gradient


def _move_buffers(modules: list[nn.Module], device: torch.device) -> None:
    for top in modules:
        for _, module in _own_modules(top):
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device != device and not buffer.is_meta:
                    module._buffers[name] = buffer.to(device)


# -- hooks ---------------------------------------------------------------------------------------------------------


def _install_hooks(module: nn.Module, unit: Unit) -> None:
    module.register_forward_pre_hook(unit.before_forward, prepend=True, with_kwargs=True)
    module.register_forward_hook(unit.after_forward)
    ref = weakref.ref(unit)

    def at_rest(*_: Any) -> None:
        owner = ref()
        if owner is not None and owner.parameters:
            owner.release()

    for _, child in _own_modules(module):
        child.register_state_dict_pre_hook(at_rest)
        child.register_load_state_dict_pre_hook(at_rest)
