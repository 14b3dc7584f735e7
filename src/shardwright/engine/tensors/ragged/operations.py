"""The operations of ragged tensors: a table from torch's operators to our functions.

Element-wise operations run on local tensors. Reductions end in one all-reduce. Operations without an entry raise an
error.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from shardwright.engine.comm.notes import noted
from shardwright.engine.compat.autograd import in_backward, increment_version
from shardwright.engine.compat.callers import refusal
from shardwright.engine.compat.dtensor import all_reduce_traced, is_traced
from shardwright.engine.compat.tensors import foreach_norm
from shardwright.engine.tensors.edits.by_position import BY_POSITION, edit
from shardwright.engine.tensors.naming import parameter_of
from shardwright.engine.tensors.numbers.reading import agree_to_read
from shardwright.engine.tensors.ragged.spec import RaggedSpec
from shardwright.engine.tensors.ragged.tensor import (
    HANDLERS,
    Handler,
    RaggedTensor,
    described,
    device_of,
    part_of,
    refuse,
)

aten = torch.ops.aten


def _mixed(func: Any, spec: RaggedSpec | None, tensor: torch.Tensor) -> NoReturn:
    what = f"a {type(tensor).__name__} of shape {tuple(tensor.shape)}"
    if isinstance(tensor, RaggedTensor):
        what = described(tensor) + (f" and {tensor.spec}" if spec is not None else "")
    beside = "plain tensors" if spec is None else str(spec)
    if spec is not None and (parameter := parameter_of(spec)):
        beside += f", the cut of parameter {parameter}"
    raise refusal(
        f"{func} expects ragged tensors that are all cut in the same way, 0-d tensors and numbers, found {what} "
        f"beside {beside}. Cut it in the same way with RaggedTensor.from_full(tensor, like.spec), or use "
        ".full_tensor() of both."
    )


def _unwrap(func: Any, spec: RaggedSpec | None, arg: Any) -> Any:
    if isinstance(arg, RaggedTensor):
        if arg.spec is spec or arg.spec == spec:
            return arg._local_tensor
    elif not isinstance(arg, torch.Tensor) or spec is None or arg.dim() == 0:
        return arg
    elif _adds_gradients(func, spec, arg):
        return part_of(arg, spec)
    return _mixed(func, spec, arg)


def _adds_gradients(func: Any, spec: RaggedSpec, other: torch.Tensor) -> bool:
    """Return whether autograd adds the whole gradient of a sum or mean to a ragged one of the same tensor."""
    return (
        func in _SUMS and in_backward() and type(other) is torch.Tensor and other.shape == spec.global_shape
    )


def _spec_of(args: Sequence[Any]) -> RaggedSpec | None:
    for arg in args:
        if isinstance(arg, RaggedTensor):
            return arg.spec
    return None


def _pointwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    spec = _spec_of(args)
    form = kwargs.get("memory_format")
    if spec is None or form not in (None, torch.contiguous_format, torch.preserve_format):
        refuse(func, (args, kwargs))
    if torch.is_grad_enabled():
        for arg in args:
            # Some of torch's formulas make a whole gradient.
            if isinstance(arg, RaggedTensor) and arg.is_leaf and not is_traced(arg._local_tensor):
                arg.cut_own_gradient()
    return RaggedTensor(
        func(
            *[_unwrap(func, spec, arg) for arg in args],
            **{key: _unwrap(func, spec, arg) for key, arg in kwargs.items()},
        ),
        spec,
    )


def _pointwise_into(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an element-wise operation in place, or into ``out``."""
    target = kwargs.get("out", args[0])
    if not isinstance(target, RaggedTensor):
        other = _first_ragged(args)
        if target is args[0] and _adds_gradients(func, other.spec, target):
            return func(target, other.full_tensor(), *args[2:], **kwargs)
        _mixed(func, None, other)
    spec = target.spec
    func(
        *[_unwrap(func, spec, arg) for arg in args],
        **{key: _unwrap(func, spec, arg) for key, arg in kwargs.items()},
    )
    _edited([target])
    return target


def _edited(targets: Sequence[Any]) -> None:
    """Increase the version counters of local tensors, because operations below autograd do not."""
    locals_ = [t._local_tensor for t in targets if isinstance(t, RaggedTensor)]
    increment_version([t for t in locals_ if not t.is_inference()])


def _first_ragged(args: Sequence[Any]) -> RaggedTensor:
    return next(arg for arg in args if isinstance(arg, RaggedTensor))


def _foreach(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation on lists, which may contain plain tensors, or the fused step of an optimizer."""
    lists = next(arg for arg in args if isinstance(arg, (list, tuple)))
    specs = [t.spec if isinstance(t, RaggedTensor) else None for t in lists]

    def unwrap(arg: Any) -> Any:
        if not isinstance(arg, (list, tuple)):
            return _unwrap(func, None, arg)  # one tensor for all of them cannot be ragged
        if len(arg) != len(specs):  # torch raises for it, if it is not an empty list that is left out
            return [_unwrap(func, None, a) for a in arg]
        return [_unwrap(func, spec, a) for a, spec in zip(arg, specs, strict=True)]

    result = func(*[unwrap(arg) for arg in args], **{key: unwrap(arg) for key, arg in kwargs.items()})
    if result is None:  # in place, which increases no counter of a wrapper
        increment_version([t for t in lists if isinstance(t, RaggedTensor) and not t.is_inference()])
        _edited(lists)
        return None
    return [t if spec is None else RaggedTensor(t, spec) for t, spec in zip(result, specs, strict=True)]


def _foreach_copy_(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for target, source in zip(args[0], args[1], strict=True):
        target.copy_(source, *args[2:], **kwargs)


def _copy_(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target, source = args[0], args[1]
    if not isinstance(target, RaggedTensor):
        refuse(f"{func} into a {type(target).__name__} of shape {tuple(target.shape)}", args)
    func(target._local_tensor, part_of(source, target.spec), *args[2:], **kwargs)
    _edited([target])
    return target


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, size = args
    if list(size) != list(tensor.shape):
        refuse(f"{func} to {list(size)}", tensor)
    return RaggedTensor(tensor._local_tensor, tensor.spec)


def _alias(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    if torch.is_inference_mode_enabled() and not tensor.is_inference():
        # A tensor made now would be an inference tensor, which cannot share a version counter (DTensor fails so).
        with torch.inference_mode(False):
            return RaggedTensor(tensor._local_tensor, tensor.spec)
    return RaggedTensor(tensor._local_tensor, tensor.spec)


def _new(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``new_zeros`` or similar. The result is cut like this tensor if it has its shape, and else plain."""
    tensor, size = args[0], args[1]
    if list(size) != list(tensor.shape):
        return func(tensor._local_tensor, *args[1:], **kwargs)
    return RaggedTensor(
        func(tensor._local_tensor, tensor._local_tensor.shape, *args[2:], **kwargs), tensor.spec
    )


def _masked_assign(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``tensor[mask] = number``, which is element-wise. Rprop uses it."""
    target, indices, values = args[0], args[1], args[2]
    one = len(indices) == 1 and isinstance(indices[0], RaggedTensor) and indices[0].dtype == torch.bool
    if not one or not isinstance(target, RaggedTensor) or values.dim() or args[3:] or kwargs:
        return _by_position(func, args, kwargs)
    target._local_tensor.masked_fill_(_unwrap(func, target.spec, indices[0]), values)
    _edited([target])
    return target


def _by_position(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an in-place operation whose arguments are positions in the whole tensor."""
    if not isinstance(args[0], RaggedTensor) or "out" in kwargs:
        refuse(func, (args, kwargs))
    edit(args[0], (), func, args, kwargs)
    return args[0]


def _local(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the local tensor's answer to a question about memory."""
    return func(args[0]._local_tensor, *args[1:], **kwargs)


def _reduce(value: torch.Tensor, op: Any, spec: RaggedSpec) -> torch.Tensor:
    """Return the all-reduced value of the ranks that cut. It may be ``value`` itself, changed in place."""
    if not spec.groups:
        return value
    moved = value.to(device_of(spec, value))
    if is_traced(moved):
        for group in spec.groups:
            moved = all_reduce_traced(moved, op, group)
        return moved.to(value.device)
    agree_to_read(spec.groups, moved.device, f"{op} {value.dtype} {tuple(value.shape)}")
    for group in spec.groups:
        with noted("all-reduce of a tensor", group):
            dist.all_reduce(moved, op, group=group)
    return moved.to(value.device)


def _everything(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RaggedTensor:
    """Return the tensor of a reduction. Raises unless it reduces over all dimensions."""
    tensor: RaggedTensor = args[0]
    dims = args[1] if len(args) > 1 else kwargs.get("dim")
    dims = [dims] if isinstance(dims, int) else dims
    ndim = tensor.dim()
    if (
        (dims and {d % max(ndim, 1) for d in dims} != set(range(max(ndim, 1))))
        or args[2:]
        or kwargs.get("keepdim")
    ):
        refuse(func, (args, kwargs))
    return tensor


def _sum(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    tensor = _everything(func, args, kwargs)
    local = tensor._local_tensor
    if not is_traced(local):
        tensor.cut_own_gradient()
    floating = local.dtype.is_floating_point or local.dtype.is_complex
    dtype = kwargs.get("dtype") or (local.dtype if floating else torch.int64)
    wide = torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype
    total = _reduce(local.sum(dtype=wide), dist.ReduceOp.SUM, tensor.spec)
    return (total / tensor.numel() if func in _MEANS else total).to(dtype)


def _spread(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Return the variance or the standard deviation of all elements, about the mean of all."""
    tensor = _everything(func, args, kwargs)
    local = tensor._local_tensor
    if not local.dtype.is_floating_point:
        refuse(func, (args, kwargs))
    local_wide = local.to(torch.promote_types(local.dtype, torch.float32))
    mean = _reduce(local_wide.sum(), dist.ReduceOp.SUM, tensor.spec) / tensor.numel()
    squares = _reduce((local_wide - mean).square_().sum(), dist.ReduceOp.SUM, tensor.spec)
    correction = kwargs.get("correction")
    variance = squares / max(tensor.numel() - (1 if correction is None else correction), 0)
    return (variance.sqrt() if func is aten.std.correction else variance).to(local.dtype)


def _count(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    tensor = _everything(func, args, kwargs)
    return _reduce(tensor._local_tensor.count_nonzero(), dist.ReduceOp.SUM, tensor.spec)


def _extreme(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    tensor = _everything(func, args, kwargs)
    local, largest = tensor._local_tensor, func in _LARGEST
    if not tensor.numel():
        raise IndexError(f"{func} of a tensor without elements")
    floating = local.dtype.is_floating_point
    wide = torch.promote_types(local.dtype, torch.float32) if floating else torch.int64
    if local.numel():
        mine = (local.amax() if largest else local.amin()).to(wide)
    else:
        bound = math.inf if floating else torch.iinfo(wide).max
        mine = torch.tensor(-bound if largest else bound, dtype=wide, device=local.device)
    return _extremes(mine[None], largest, tensor.spec)[0].to(local.dtype)


def _extremes(values: torch.Tensor, largest: bool, spec: RaggedSpec) -> torch.Tensor:
    """Return the largest or smallest values of the ranks. A result is NaN if any rank has NaN there.

    The collectives' own maximum and minimum may lose NaN.
    """
    op = dist.ReduceOp.MAX if largest else dist.ReduceOp.MIN
    if not values.dtype.is_floating_point:
        return _reduce(values, op, spec)
    nan = values.isnan()
    flags = nan.to(values.dtype) if largest else -nan.to(values.dtype)
    numbers = values.masked_fill(nan, -math.inf if largest else math.inf)
    numbers, flags = _reduce(torch.stack([numbers, flags]), op, spec)
    return numbers.masked_fill(flags != 0, math.nan)


def _any(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    tensor = _everything(func, args, kwargs)
    mine = func(tensor._local_tensor).to(torch.int32)
    op = dist.ReduceOp.MAX if func is aten.any.default else dist.ReduceOp.MIN
    return _reduce(mine, op, tensor.spec).bool()


def _equal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    spec = _spec_of(args)
    assert spec is not None
    same = func(*[_unwrap(func, spec, arg) for arg in args], **kwargs)
    device = _first_ragged(args).device
    return bool(_reduce(torch.tensor(int(same), device=device), dist.ReduceOp.MIN, spec))


def _vector_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    order = args[1] if len(args) > 1 else kwargs.pop("ord", 2)
    _everything(func, (args[0], *args[2:]), kwargs)
    return _norms([args[0]], float(order), kwargs.get("dtype"))[0]


def _foreach_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    return _norms(list(args[0]), float(order), args[2] if len(args) > 2 else kwargs.get("dtype"))


def _norms(tensors: list[torch.Tensor], order: float, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """Return the global norm of each tensor, with one all-reduce for all that are cut alike.

    Norms of plain tensors are this rank's.
    """
    local_tensors = [t._local_tensor if isinstance(t, RaggedTensor) else t for t in tensors]
    wide = functools.reduce(torch.promote_types, {t.dtype for t in local_tensors}, torch.float32)
    filled = [t for t in local_tensors if t.numel()]
    filled_norms = iter(foreach_norm(filled, order, wide) if filled else ())
    empty = math.inf if order == -math.inf else 0.0  # torch has no maximum of an empty tensor
    norms = [
        next(filled_norms).double() if t.numel() else t.new_full((), empty, dtype=torch.float64)
        for t in local_tensors
    ]
    groups: dict[tuple[dist.ProcessGroup, ...], list[int]] = {}
    for i, t in enumerate(tensors):
        if isinstance(t, RaggedTensor):
            groups.setdefault(t.spec.groups, []).append(i)
    for members in groups.values():
        spec = tensors[members[0]].spec  # type: ignore[attr-defined]
        stacked = torch.stack([norms[i] for i in members])  # doubles: powers and roots round no more
        if math.isinf(order):
            stacked = _extremes(stacked, order > 0, spec)
        elif order == 0:
            stacked = _reduce(stacked, dist.ReduceOp.SUM, spec)
        else:
            stacked = _reduce(stacked.pow_(order), dist.ReduceOp.SUM, spec).pow_(1 / order)
        for i, norm in zip(members, stacked, strict=True):
            norms[i] = norm
    return [n.to((dtype or t.dtype).to_real()) for n, t in zip(norms, tensors, strict=True)]


def _weight_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute weight norm or its backward: every rank gathers the whole tensors, computes, and keeps its own part.

    The norms are over rows or columns, and a rank's part may end within one.
    """
    likes = args[:2] if func is aten._weight_norm_interface.default else args[1:3]
    if not all(isinstance(like, RaggedTensor) for like in likes):
        refuse(func, args)
    results = func(*[arg.full_tensor() if isinstance(arg, RaggedTensor) else arg for arg in args], **kwargs)
    return tuple(RaggedTensor.from_full(made, like.spec) for made, like in zip(results, likes, strict=True))


def _unscale(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Run GradScaler's check. If one rank finds a value that is not finite, all ranks must know it."""
    tensors, found_inf, scale = args
    func([_unwrap(func, t.spec, t) if isinstance(t, RaggedTensor) else t for t in tensors], found_inf, scale)
    for spec in {t.spec.groups: t.spec for t in tensors if isinstance(t, RaggedTensor)}.values():
        found_inf.copy_(_reduce(found_inf, dist.ReduceOp.MAX, spec))


#: Each element of the result depends only on the same element of the arguments, also in in-place and multi-tensor
#: forms.
_ELEMENTWISE = """
    abs acos acosh add addcdiv addcmul asin asinh atan atan2 atanh bitwise_and bitwise_not bitwise_or bitwise_xor ceil
    clamp clamp_max clamp_min copysign cos cosh deg2rad div eq erf erfc erfinv exp exp2 expm1 fill floor floor_divide
    fmax fmin fmod frac ge gt heaviside hypot isinf isnan isneginf isposinf le lerp lgamma log log10 log1p log2
    logaddexp logical_and logical_not logical_or logical_xor lt masked_fill maximum minimum mul nan_to_num ne neg
    nextafter pow rad2deg reciprocal relu remainder round rsqrt rsub sgn sigmoid sign signbit sin sinh sqrt square sub
    tan tanh trunc where xlogy zero
    clone _to_copy empty_like zeros_like ones_like full_like _pin_memory
"""
_FUSED = "_fused_adam_ _fused_adamw_ _fused_sgd_ _fused_adagrad_"
_SUMS = {aten.add.Tensor, aten.add_.Tensor}
_MEANS = {aten.mean.default, aten.mean.dim}
_LARGEST = {aten.max.default, aten.amax.default}


def _overloads(name: str) -> list[Any]:
    packet = getattr(aten, name, None)
    return [getattr(packet, overload) for overload in packet.overloads()] if packet is not None else []


def _table() -> dict[Any, Handler]:
    table: dict[Any, Handler] = {}
    for name in _ELEMENTWISE.split():
        for func in _overloads(name) + _overloads(f"{name}_"):
            table[func] = _pointwise_into if func._schema.is_mutable else _pointwise
        for func in _overloads(f"_foreach_{name}") + _overloads(f"_foreach_{name}_"):
            table[func] = _foreach
    for name in _FUSED.split():
        table.update(dict.fromkeys(_overloads(name), _foreach))
    table.pop(aten.where.default, None)  # this one gives indices
    for packet in BY_POSITION:
        places = [getattr(packet, overload) for overload in packet.overloads()]
        table.update({func: _by_position for func in places if "out" not in func._overloadname})
    for name in ("new_empty", "new_zeros", "new_ones", "new_full"):
        table[getattr(aten, name).default] = _new
    return table | {
        aten.detach.default: _alias,
        aten.alias.default: _alias,
        aten.view.default: _view,
        aten.is_pinned.default: _local,
        aten.copy_.default: _copy_,
        aten._foreach_copy_.default: _foreach_copy_,
        aten.index_put_.default: _masked_assign,
        aten.sum.default: _sum,
        aten.sum.dim_IntList: _sum,
        aten.mean.default: _sum,
        aten.mean.dim: _sum,
        aten.count_nonzero.default: _count,
        aten.std.correction: _spread,
        aten.var.correction: _spread,
        aten.max.default: _extreme,
        aten.min.default: _extreme,
        aten.amax.default: _extreme,
        aten.amin.default: _extreme,
        aten.any.default: _any,
        aten.all.default: _any,
        aten.equal.default: _equal,
        aten.allclose.default: _equal,
        aten.linalg_vector_norm.default: _vector_norm,
        aten._weight_norm_interface.default: _weight_norm,
        aten._weight_norm_interface_backward.default: _weight_norm,
        aten._foreach_norm.Scalar: _foreach_norm,
        aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
    }


HANDLERS.update(_table())
