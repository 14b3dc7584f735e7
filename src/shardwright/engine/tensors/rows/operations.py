"""Operations on sharded tensors: which of them DTensor computes from the ranks' parts, and all others from wholes.

Operations run below autograd, one of torch's operators at a time, so each of them can be right by itself. DTensor's
rules are used for the operators named here, whose results a table of all operations of torch has confirmed. For every
other operator each rank gathers the whole arguments and computes the whole result. This file knows no units.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

import torch
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from shardwright.engine.comm import Communicator
from shardwright.engine.compat.autograd import in_backward, increment_version
from shardwright.engine.compat.dtensor import dtensor_of, local_of, rebind, replicates_implicitly, waited
from shardwright.engine.compat.tensors import tree_leaves, tree_map
from shardwright.engine.tensors.edits.by_position import refuse, with_part
from shardwright.engine.tensors.edits.unset import FILLING
from shardwright.engine.tensors.gathering import gathered
from shardwright.engine.tensors.naming import parameter_behind, parameter_of
from shardwright.engine.tensors.numbers.reading import BESIDE, NUMBER, agree_to_read

_aten = torch.ops.aten
_RANDOM = torch.Tag.nondeterministic_seeded
#: Operators that are not by element, and that DTensor computes from parts.
_BY_PARTS = {
    _aten.sum, _aten.mean, _aten.linalg_vector_norm, _aten.max, _aten.min, _aten.amax, _aten.amin, _aten.argmax,
    _aten.argmin, _aten.any, _aten.all, _aten.nansum,
    _aten.clone, _aten.copy_, _aten._to_copy, _aten.fill_, _aten.zero_, _aten.zeros_like, _aten.ones_like,
    _aten.full_like, _aten.empty_like, _aten.new_empty, _aten.new_zeros, _aten.new_ones, _aten.new_full,
    _aten.new_empty_strided, _aten.stack, _aten.cat, _aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm, _aten.equal,
    _aten.is_same_size, _aten.is_pinned, _aten.where,
}  # fmt: skip
_RESHAPES = {_aten.view, _aten._unsafe_view}
#: Operators on lists of parameters and their states, with which optimizers step.
OF_OPTIMIZERS = ("_foreach_", "_fused_", "_amp_")
#: Reads whose plain arguments are positions.
_BY_POSITION = {_aten.index, _aten.index_select, _aten.gather, _aten.take, _aten.masked_select}
#: With them torch's clip_grad_norm_ gets all gradients at once.
_OF_CLIPPING = {
    _aten._foreach_norm.Scalar,
    _aten.stack.default,
    _aten._foreach_mul_.Tensor,
    _aten.mul_.Tensor,
}
_TORCHS = {"aten", "prims"}


def real(tensor: Any) -> bool:
    """Return whether a tensor is sharded and holds values, which it does not while a compiler traces."""
    return (
        isinstance(tensor, DTensor) and type(waited(local_of(tensor))) is torch.Tensor and not tensor.is_meta
    )


def by_parts(func: Any, args: Any) -> bool:
    """Return whether DTensor's rule for an operator is right."""
    # torch reduces all dimensions if the list of them is empty, DTensor none.
    if _RANDOM in func.tags or (len(args) > 1 and isinstance(args[1], (list, tuple)) and not args[1]):
        return False
    packet = func.overloadpacket
    if packet in _RESHAPES and not args[0].numel():
        return False  # DTensor's rule may not end
    # DTensor writes a rank's own number into ``out``, without a sum over the ranks.
    has_out = any(argument.is_out for argument in func._schema.arguments)
    return (
        func.is_view
        or func is _aten._unsafe_view.default
        or torch.Tag.pointwise in func.tags
        or (packet in _BY_PARTS and not has_out)
        or packet.__name__.startswith(OF_OPTIMIZERS)
    )


def can_use_wholes(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether every rank has, or can gather, the same whole arguments of an operator of torch.

    In a backward plain tensors beside sharded ones mostly come from torch's formulas. :func:`on_wholes` compares them.
    """
    if func.namespace not in _TORCHS:
        return False
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    sharded = [t for t in tensors if isinstance(t, DTensor)]
    if not all(map(real, sharded)) or len({t.device_mesh for t in sharded}) != 1:
        return False
    written = list(written_arguments(func, args, kwargs))
    plain = [t for t in tensors if not isinstance(t, DTensor)]
    if not {id(t) for t in plain}.isdisjoint(id(each) for each, _ in written):
        return False
    if len(sharded) == sum(only_out and isinstance(t, DTensor) for t, only_out in written):
        return True  # nothing sharded is read
    if func.overloadpacket in _BY_POSITION:
        return isinstance(args[0], DTensor)
    return all(t.numel() == 1 for t in plain) or in_backward() or replicates_implicitly()


def written_arguments(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, bool]]:
    """Yield the tensors that an operator writes, each with whether the operator reads nothing of it."""
    if not func._schema.is_mutable:
        return
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            unread = argument.is_out or (position == 0 and func.overloadpacket in FILLING)
            for tensor in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(tensor, torch.Tensor):
                    yield tensor, unread


@torch.no_grad()
def on_wholes(func: Any, args: Any, kwargs: Any) -> Any:
    """Run the operator on whole arguments, on every rank.

    Results are replicated, and written arguments keep their cuts.

    Results of a random operator with the shape of its first argument are cut like it. Ranks with different seeds then
    still have parts of one tensor each.
    """
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    sharded = [t for t in tensors if isinstance(t, DTensor)]
    written = {id(t): unread for t, unread in written_arguments(func, args, kwargs)}
    mesh = sharded[0].device_mesh
    read = [t for t in sharded if not written.get(id(t))]
    if read:
        _agree(func, read, [t for t in tensors if not isinstance(t, DTensor)] if in_backward() else [])
    wholes: dict[int, torch.Tensor] = {}
    parts: dict[int, torch.Tensor] = {}
    for t in sharded:
        if id(t) in wholes:
            continue
        if id(t) not in written or not _is_cut(t):
            wholes[id(t)] = _strided_as(t, gathered(t).to(local_of(t).device))
            continue
        wholes[id(t)], parts[id(t)] = with_part(t, func)
        if not written[id(t)]:
            wholes[id(t)].copy_(gathered(t))

    def whole_of(value: Any) -> Any:
        return wholes[id(value)] if isinstance(value, DTensor) else value

    try:
        result = func(*tree_map(whole_of, args), **tree_map(whole_of, kwargs))
    except RuntimeError as error:
        refuse_operation(func, sharded, error)
    everywhere = (Replicate(),) * mesh.ndim
    targets = {}
    for t in sharded:
        if id(t) not in written:
            continue
        whole = wholes[id(t)]
        targets[id(whole)] = t
        if id(t) in parts and whole.shape == t.shape:
            local_of(t).copy_(parts[id(t)])
        elif parameter_of(local_of(t)) or local_of(t).is_inference():
            refuse(func, t)
        else:
            rebind(t, dtensor_of(whole, mesh, everywhere, whole.shape, whole.stride()))
        if not local_of(t).is_inference():
            increment_version([local_of(t)])
    like = args[0] if _RANDOM in func.tags and args and isinstance(args[0], DTensor) else None

    def wrapped(made: Any) -> Any:
        if not isinstance(made, torch.Tensor) or made.layout is not torch.strided:
            return made
        if id(made) in targets:
            return targets[id(made)]
        if like is not None and made.shape == like.shape and _is_cut(like):
            return distribute_tensor(made, mesh, like.placements, src_data_rank=None)
        return dtensor_of(made, mesh, everywhere, made.shape, made.stride())

    return tree_map(wrapped, result)


def _is_cut(tensor: DTensor) -> bool:
    """Return whether each rank has elements of the tensor, and not numbers to be added to those of other ranks."""
    return not any(p.is_partial() for p in tensor.placements)


def _strided_as(tensor: DTensor, whole: torch.Tensor) -> torch.Tensor:
    shape, stride = tensor.shape, tensor.stride()
    repeats = any(step == 0 and size > 1 for step, size in zip(stride, shape, strict=True))
    if whole.stride() == stride or not whole.numel() or repeats:
        return whole
    return whole.new_empty_strided(tensor.shape, tensor.stride()).copy_(whole)


def _agree(func: Any, sharded: list[DTensor], plain: list[torch.Tensor]) -> None:
    """Meet all ranks that have parts of these tensors, because they are about to be gathered for one operator.

    Plain tensors beside them must be equal on all ranks of the mesh. On an accelerator, whose host does not wait, they
    are not compared.
    """
    mesh = sharded[0].device_mesh
    axes = [
        axis
        for axis in range(mesh.ndim)
        if mesh.size(axis) > 1 and (plain or not all(t.placements[axis].is_replicate() for t in sharded))
    ]
    device, groups = torch.device(mesh.device_type), [mesh.get_group(axis) for axis in axes]
    if any(Communicator(group, device).exchanges for group in groups):
        text = [str(func), *(f"{t.placements} {t.dtype} {t.shape}" for t in sharded), *map(_digest, plain)]
        try:
            agree_to_read(groups, device, " ".join(text), BESIDE if plain else NUMBER)
        except RuntimeError as error:
            error.add_note(f"The operation is {func}, on {label(sharded)}.")
            raise


def _digest(tensor: torch.Tensor) -> str:
    values = tensor.detach().cpu().contiguous()
    content = zlib.crc32(ctypes.string_at(values.data_ptr(), values.nbytes)) if values.numel() else 0
    return f"{tensor.dtype} {tuple(tensor.shape)} {content}"


def label(arguments: Iterable[Any]) -> str:
    """Return the subject of an error: the parameter among the arguments, or the sharded tensor."""
    sharded = [t for t in arguments if isinstance(t, DTensor)]
    name = next(filter(None, map(parameter_behind, sharded)), "")
    return (
        f"Parameter {name}"
        if name
        else f"A tensor of shape {tuple(sharded[0].shape)}"
        if sharded
        else "A tensor"
    )


def is_collective(func: Any) -> bool:
    """Return whether the operator is a function of torch.distributed, such as broadcast."""
    return getattr(func, "namespace", "") in ("c10d", "_c10d_functional")


def way_out_of_clipping(func: Any) -> str:
    """Return a sentence for operators with which torch's clip_grad_norm_ gets all gradients at once."""
    if func not in _OF_CLIPPING:
        return ""
    return (
        " If this is torch's clip_grad_norm_, clip with sw.clip_grad_norm_, which takes plain gradients beside sharded "
        "ones, and gradients on several meshes."
    )


def refuse_operation(func: Any, arguments: Iterable[Any], error: Exception) -> NoReturn:
    """Raise for an operator that neither DTensor nor this engine can compute."""
    if is_collective(func):
        raise RuntimeError(
            f"{label(arguments)} is sharded, and the collective {func} takes plain tensors. Pass .to_local(), this "
            "rank's part, or .full_tensor(), called on every rank. A sharded model needs no DistributedDataParallel "
            "around it: fully_shard averages the gradients over the ranks of its mesh."
        ) from error
    raise RuntimeError(
        f"{label(arguments)} is sharded, and {func} cannot be computed from it ({type(error).__name__}: {error}). "
        "Pass .full_tensor(), called on every rank, or use the full parameters inside `with "
        "shardwright.unsharded(model):` or inside the forward of the module of its unit. For an operator of your own, "
        "register a rule with torch.distributed.tensor.experimental.register_sharding."
        + (way_out_of_clipping(func) if "same mesh" in str(error) else "")
    ) from error
