"""Gradients of numbers and whole tensors that a program reads from sharded parameters: their mean over the ranks.

In data-parallel training every rank has the whole parameter, and each rank's loss may weigh a penalty by its own
factor. The parameter's gradient is the mean over the ranks. Here each rank has a part of the parameter. So the gradient
of a value that a rank reads is averaged before it reaches the parts. This file knows no units and optimizers.
"""

from __future__ import annotations

import functools
import weakref
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwright.engine.comm import Communicator, HostFlag, Streams
from shardwright.engine.comm.notes import noted
from shardwright.engine.compat.dtensor import local_of
from shardwright.engine.compat.modes import is_transformed
from shardwright.engine.compat.tensors import tree_leaves
from shardwright.engine.tensors.naming import parameter_of
from shardwright.engine.tensors.numbers.hooks import average_gradient, tracked
from shardwright.engine.tensors.numbers.reading import GRADIENT, KINDS, VALUE, agree_to_read_over

#: Set on a tensor that was computed from sharded parameters: a hash of the operations and numbers that made it.
RECIPE = "_shardwright_recipe"
#: True on a tensor that was computed from numbers that this rank has read: it may differ from the other ranks'.
OWN = "_shardwright_own"
#: By streams of an accelerator: a flag that is set if ranks averaged gradients of different values, or joined such
#: values. A flag holds its streams weakly, because a value that holds its key would keep both.
_differs: weakref.WeakKeyDictionary[Streams, HostFlag] = weakref.WeakKeyDictionary()


def is_own(tensor: torch.Tensor) -> bool:
    return OWN in tensor.__dict__


def mark_own(results: Any) -> Any:
    for made in results if isinstance(results, (list, tuple)) else (results,):
        if isinstance(made, torch.Tensor) and type(made) is not torch.Tensor:
            made.__dict__[OWN] = True
    return results


def has_gradient(results: Any) -> bool:
    """Return whether an operation has results through which gradients pass. Those of a comparison have none."""
    return any(
        isinstance(t, torch.Tensor) and (t.is_floating_point() or t.is_complex())
        for t in tree_leaves(results)
    )


_aten = torch.ops.aten
#: Their result is a sum that is not reduced yet if both numbers are such sums
SUMS = {_aten.add.Tensor, _aten.add_.Tensor, _aten.sub.Tensor, _aten.sub_.Tensor}


def only_sums(func: Any, args: Any, kwargs: Any, kind: type[torch.Tensor], linear: set[Any]) -> bool:
    """Return whether an operation of numbers of class ``kind`` does no more than add and subtract them.

    The gradient of the result is then that of each number, or the negative of it. ``linear`` has the operations of one
    number of which this is true. A sum with 0, from which Python's ``sum`` starts, is one, too.
    """
    if func in SUMS:
        numbers = all(isinstance(t, kind) or (type(t) is int and t == 0) for t in args[:2])
        return numbers and kwargs.get("alpha", 1) == 1
    return func.overloadpacket in linear


# -- recipes ---------------------------------------------------------------------------------------------------------


def recipe_of(tensor: torch.Tensor) -> int:
    """Return a hash that is equal on ranks that have computed the tensor in the same way from the same parameters."""
    recipe: int | None = tensor.__dict__.get(RECIPE)
    if recipe is None:
        name = parameter_of(local_of(tensor)) if hasattr(tensor, "_local_tensor") else ""
        recipe = zlib.crc32(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
    return recipe


def note_recipe(func: Any, args: Any, kwargs: Any, results: Any) -> None:
    """Give results of an operation on sharded tensors their recipe."""
    parts = [str(func)]
    for value in tree_leaves((args, kwargs)):
        if isinstance(value, torch.Tensor):
            parts.append(str(recipe_of(value)))
        elif value is None or isinstance(value, (bool, int, float, complex, str, torch.dtype)):
            parts.append(repr(value))
    recipe = zlib.crc32(" ".join(parts).encode())
    for number, made in enumerate(results if isinstance(results, (list, tuple)) else (results,)):
        if isinstance(made, torch.Tensor) and type(made) is not torch.Tensor:
            made.__dict__[RECIPE] = recipe + number


# -- collectives -----------------------------------------------------------------------------------------------------


def groups_of(mesh: DeviceMesh, axes: Iterable[int] | None = None) -> list[dist.ProcessGroup]:
    """Return the groups of the mesh's axes (default: all) with several ranks."""
    return [
        mesh.get_group(axis) for axis in (range(mesh.ndim) if axes is None else axes) if mesh.size(axis) > 1
    ]


def average(
    gradient: torch.Tensor, mesh: DeviceMesh, recipe: int, axes: Iterable[int] | None = None
) -> torch.Tensor:
    """Return the mean of a plain gradient over the ranks of a mesh. Each rank must call this for the same value.

    Args:
        gradient: this rank's, of any shape; it may have a graph.
        mesh, axes: the ranks: those along these axes of the mesh (default: all axes).
        recipe: :func:`recipe_of` the value whose gradient it is. Ranks with different recipes raise.

    Raises:
        RuntimeError: on gloo: the ranks average gradients of different values, or another rank does something else.
    """
    return _averaged(gradient, groups_of(mesh, axes), torch.device(mesh.device_type), recipe)


def _averaged(
    gradient: torch.Tensor, groups: Sequence[dist.ProcessGroup], device: torch.device, recipe: int
) -> torch.Tensor:
    if not groups:
        return gradient
    if is_transformed(gradient):
        raise RuntimeError(
            "A gradient of a value that was computed from sharded parameters is averaged over the ranks, one backward "
            "at a time, and this one is batched (is_grads_batched=True, or torch.vmap). Call autograd once for each "
            "row."
        )
    return _Average.apply(gradient, groups, device, recipe)  # type: ignore[no-any-return]


def average_read(
    read: torch.Tensor, source: torch.Tensor, mesh: DeviceMesh, axes: Iterable[int] | None = None
) -> None:
    """Average the gradient of the plain tensor ``read``, which this rank has read from the sharded ``source``."""
    if tracked([read]) and not is_own(source):
        mean = functools.partial(average, mesh=mesh, recipe=recipe_of(source), axes=axes)
        average_gradient(read, mean)


class _Average(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradient: torch.Tensor, *context: Any) -> torch.Tensor:  # type: ignore[override]
        ctx.context = context
        return _average(gradient, *context)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return _averaged(gradient, *ctx.context), None, None, None


def _average(
    gradient: torch.Tensor, groups: Sequence[dist.ProcessGroup], device: torch.device, recipe: int
) -> torch.Tensor:
    # Shape and dtype of the collective follow from the value alone: each rank may have made its gradient in another
    # way. In a wider dtype the mean of equal numbers has their bits.
    part = gradient.detach()
    wide = torch.promote_types(part.dtype, torch.float32 if part.dim() else torch.float64)
    if part.dtype.is_complex:
        part, wide = torch.view_as_real(part.resolve_conj()), torch.float64
    mean = part.to(device=device, dtype=wide, copy=True).contiguous()
    for group in groups:
        comm = Communicator(group, device)
        agree_to_read_over(comm, GRADIENT, str(recipe))
        if not comm.exchanges:
            _compare(comm, recipe)
        with noted("all-reduce of a gradient", group):
            dist.all_reduce(mean, group=group)
        mean /= comm.world_size
    if gradient.dtype.is_complex:
        mean = torch.view_as_complex(mean)
    return mean.to(device=gradient.device, dtype=gradient.dtype)


def _compare(comm: Communicator, number: int) -> None:
    """Compare a number over the ranks, on an accelerator, whose host must not wait."""
    mine = torch.full((1,), number, dtype=torch.int64, device=comm.device)
    rows = comm.gather_row(mine)
    _flag_of(comm).set_after((rows != mine).any())


def _flag_of(comm: Communicator) -> HostFlag:
    flag = _differs.get(comm.streams)
    if flag is None:
        flag = _differs[comm.streams] = HostFlag(weakref.proxy(comm.streams), comm.device, "download")
    return flag


def agree_on_value(value: torch.Tensor, mesh: DeviceMesh) -> None:
    """Raise if ranks are about to multiply (or otherwise join) their parts of a tensor with different numbers."""
    device = torch.device(mesh.device_type)
    for group in groups_of(mesh):
        comm = Communicator(group, device)
        if comm.exchanges:
            agree_to_read_over(comm, VALUE, str(value.detach().tolist()))
        else:
            bits = value.detach().to(device).reshape(-1).view(torch.uint8)
            _flag_of(comm).set_after((comm.gather_row(bits) != bits).any())


def check_values() -> None:
    """Raise if the ranks of an accelerator have averaged gradients, or joined values, that do not belong together."""
    if any([flag.read() for flag in _differs.values()]):
        raise RuntimeError(
            "The ranks have diverged: they computed different penalties (values of sharded parameters outside "
            f"forward), or in different orders. {KINDS[GRADIENT].way_out}"
        )


def values_replayed() -> None:
    """Note that a CUDA graph that may have averaged gradients was put on the current stream."""
    for flag in _differs.values():
        flag.set_by_graph()
