"""DTensors and meshes: how one is made from a local tensor, changed in place, and what torch keeps private of it.

Meshes are joined, flattened and traced back to the mesh from which they were sliced. The collectives here are those of
DTensor, which torch.compile can record. The engine's own are in ``engine/comm``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.distributed import _functional_collectives
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, _dtensor_spec, placement_types

from shardwright.engine.compat.probe import probe

_DTensorSpec, _TensorMeta = probe(_dtensor_spec, "DTensorSpec"), probe(_dtensor_spec, "TensorMeta")


def _subclasses_dispatch() -> bool:
    # Elsewhere C++ takes every DTensor past Python, and what stands there only says so.
    code = DTensor.__torch_dispatch__.__code__
    return not any("should not actually get called" in str(constant) for constant in code.co_consts)


#: Whether torch calls ``__torch_dispatch__`` of subclasses of DTensor, which torch 2.11 does not
subclasses_dispatch = _subclasses_dispatch()


#: Returns the local tensor itself, while ``to_local`` of a parameter makes a new view at every call.
local_of: Callable[[Any], torch.Tensor] = operator.attrgetter("_local_tensor")


def made_of(kind: Any, parts: dict[str, torch.Tensor], context: Any, like: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor of class ``kind`` and ``like``'s shape from parts as of its ``__tensor_flatten__``."""
    stride = torch.empty(like.shape, device="meta").stride()
    return kind.__tensor_unflatten__(parts, context, like.shape, stride)  # type: ignore[no-any-return]


def dtensor_of(
    local: torch.Tensor, mesh: Any, placements: Any, shape: torch.Size, stride: tuple[int, ...]
) -> DTensor:
    """Return ``local`` as a DTensor. It stays on its device, even if the mesh has another device (it was offloaded)."""
    if local.device.type == mesh.device_type or local.is_meta:
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
    meta = _TensorMeta(shape, tuple(stride), local.dtype)
    spec = _DTensorSpec(mesh, tuple(placements), tensor_meta=meta)
    return DTensor(local, spec, requires_grad=local.requires_grad)  # type: ignore[call-arg]


_AsyncCollectiveTensor = probe(_functional_collectives, "AsyncCollectiveTensor")


#: The operations by which DTensor communicates. torch looks each one up here when it calls it.
functional_collectives: Any = torch.ops._c10d_functional
_functional_all_reduce = probe(_functional_collectives, "all_reduce")
_REDUCTIONS = {dist.ReduceOp.SUM: "sum", dist.ReduceOp.MAX: "max", dist.ReduceOp.MIN: "min"}


def is_traced(local: torch.Tensor) -> bool:
    """Return whether torch.compile traces operations on this tensor."""
    return isinstance(local, (FakeTensor, FunctionalTensor))


def all_reduce_traced(local: torch.Tensor, op: Any, group: Any) -> torch.Tensor:
    """Return the sum over a group as a part of the graph that torch.compile traces.

    Other all-reduces are carried out while a graph is traced, and never when it runs.
    """
    return waited(_functional_all_reduce(local, _REDUCTIONS[op], group))


def waited(local: torch.Tensor) -> torch.Tensor:
    """Return the local tensor, after a collective of DTensor that may still be making it."""
    return local.wait() if isinstance(local, _AsyncCollectiveTensor) else local


def replicates_implicitly() -> bool:
    """Return whether DTensor takes plain tensors for replicated ones, inside torch's ``implicit_replication()``."""
    return bool(getattr(DTensor._op_dispatcher, "_allow_implicit_replication", False))


#: ``Shard`` of a dimension that a mesh dimension further right has cut before.
StridedShard = probe(placement_types, "_StridedShard")
_concatenate = probe(DeviceMesh, "_concatenate")


def concatenated(*meshes: DeviceMesh) -> DeviceMesh:
    """Return the mesh with the dimensions of these meshes, in this order. They must be parts of one mesh.

    Raises:
        RuntimeError: they are not, or they overlap.
    """
    return _concatenate(list(meshes))


_flatten = probe(DeviceMesh, "_flatten")


def flattened(mesh: DeviceMesh) -> DeviceMesh:
    """Return a mesh of one dimension over the same ranks. All of them must call it."""
    return _flatten(mesh)


_root_mesh = probe(DeviceMesh, "_get_root_mesh")


def root_mesh_of(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh from which this one was sliced, or this one."""
    return _root_mesh(mesh)


def rebind(dtensor: DTensor, new: DTensor) -> None:
    """Give the object ``dtensor`` the shape, dtype, local tensor and placements of ``new``."""
    # An assignment to ``.data`` changes the outside of a wrapper subclass only.
    torch.Tensor.data.__set__(dtensor, new)  # type: ignore[attr-defined]
    dtensor._local_tensor = new._local_tensor
    dtensor._spec = new._spec
