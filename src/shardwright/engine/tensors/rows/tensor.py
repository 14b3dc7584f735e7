"""The sharded tensor of layouts that cut rows: a DTensor whose edits are noticed and whose numbers are global.

This file knows no units and modules.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from shardwright.engine.compat.autograd import in_backward, increment_version
from shardwright.engine.compat.callers import refusal
from shardwright.engine.compat.dtensor import (
    StridedShard,
    dtensor_of,
    local_of,
    rebind,
    subclasses_dispatch,
    waited,
)
from shardwright.engine.compat.storages import storage_key
from shardwright.engine.compat.tensors import tree_leaves, tree_map
from shardwright.engine.tensors.edits.by_position import BY_POSITION, Step, can_edit, edit, refuse, views
from shardwright.engine.tensors.edits.unset import begin_edit, mark_of, unmark
from shardwright.engine.tensors.gathering import gathers_plainly, replicated, whole
from shardwright.engine.tensors.naming import EDITED, gathered_dtype, note_origin
from shardwright.engine.tensors.numbers.averaging import (
    agree_on_value,
    average,
    average_read,
    has_gradient,
    is_own,
    mark_own,
    note_recipe,
    only_sums,
    recipe_of,
)
from shardwright.engine.tensors.numbers.drawing import agree_to_draw
from shardwright.engine.tensors.numbers.hooks import (
    average_gradient,
    cut_gradient,
    forget_hooks,
    refuse_loss_in_place,
    tracked,
)
from shardwright.engine.tensors.rows.operations import (
    OF_OPTIMIZERS,
    by_parts,
    can_use_wholes,
    is_collective,
    label,
    on_wholes,
    real as is_real,
    refuse_operation,
    way_out_of_clipping,
    written_arguments,
)
from shardwright.engine.tensors.rows.partial import (
    EXTREMES,
    JOINS,
    LINEAR,
    LINEAR_BY_TORCH,
    NORMS,
    SUMMED,
    adds_partial,
    agree_to_reduce,
    alike,
    reduce_in_place,
    reduced,
    whole_number,
    with_neutral,
)
from shardwright.engine.tensors.sharded import BESIDE_PLAIN, Attempt, NotGathered, Sharded

_aten = torch.ops.aten
_detach = _aten.detach.default
_RANDOM = torch.Tag.nondeterministic_seeded
_STARTS = {_aten.add.Tensor, _aten.sub.Tensor}
#: They compute with a rank's own data. torch would treat a plain tensor of one element as equal on every rank.
_ON_DATA = {
    _aten.embedding.default, _aten._embedding_bag.default, _aten.mm.default, _aten.addmm.default,
    _aten.convolution.default,
}  # fmt: skip


class _EqualsDTensor(type(DTensor)):  # type: ignore[misc]
    """torch's modes that count collectives or memory check ``kind == DTensor``, which would skip a subclass."""

    def __eq__(cls, other: object) -> bool:
        return other is DTensor or cls is other

    __hash__ = type.__hash__


class ShardedTensor(Sharded, DTensor, metaclass=_EqualsDTensor):
    """A sharded parameter, a gradient, a view of one or its ``.data``, or a result of operations on them.

    Every edit increases the local tensor's version counter. A DTensor's operations run on local tensors below autograd,
    so nothing else increases it. ``item``, ``float``, ``bool`` and ``tolist`` return the number of the whole tensor, so
    every rank must call them. Sums and norms stay Partial until then. Pickles are pickles of plain DTensors.
    """

    __slots__ = ()
    _kind = "sharded"
    _edited: torch.Tensor  #: the parameter's local tensor, if this is a view of the parameter

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if func is _aten._local_scalar_dense.default:
            return whole_number(args[0]).item()
        if func.overloadpacket.__name__.startswith(OF_OPTIMIZERS) and not torch.is_grad_enabled():
            return cls._run(func, types, args, kwargs)
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        sharded = [t for t in tensors if isinstance(t, DTensor)]
        if (in_backward() and not torch.is_grad_enabled()) or not all(map(is_real, sharded)):
            return cls._run(func, types, args, kwargs)
        if not _reads_numbers(func, args, kwargs, sharded):
            recorded = tracked(sharded)
            if recorded and func not in _ON_DATA:
                _agree_on_factors(func, sharded, tensors)
            result = cls._run(func, types, args, kwargs)
            if recorded:
                note_recipe(func, args, kwargs, result)
            return result
        if _is_plain(func, args, tensors):
            return func(*tree_map(_number_of, args), **tree_map(_number_of, kwargs))
        read = functools.partial(_read, func._schema.is_mutable)
        result = cls._run(func, types, tree_map(read, args), tree_map(read, kwargs))
        for t in sharded if has_gradient(result) else ():
            average_number(t)  # type: ignore[arg-type]
        return result if func._schema.is_mutable and not tracked(sharded) else mark_own(result)

    @classmethod
    def _run(cls, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func in _STARTS and type(args[1]) is int and args[1] == 0 and not args[0].dim():
            return as_sharded(
                args[0]._as_dtensor(clone=True)
            )  # the first number of Python's ``sum``: it stays Partial
        if _RANDOM in func.tags and args and isinstance(args[0], DTensor):
            agree_to_draw(func, args[0], kwargs)
        edited = begin_edit(func, args, kwargs) if func._schema.is_mutable else []
        if torch.Tag.inplace_view in func.tags and is_real(args[0]):
            result = _change_shape(func, args, kwargs)
        elif func.overloadpacket in BY_POSITION and is_real(args[0]):
            result = _edit_by_position(func, args, kwargs)
        else:
            result = cls._operate(func, types, args, kwargs)
        for local in edited:
            unmark(local)
        return result

    @classmethod
    def _operate(cls, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if in_backward() and not func._schema.is_mutable and _is_of_numbers(args, kwargs):
            return _with_wholes(func, args, kwargs)
        if func in _ON_DATA and any(type(t) is torch.Tensor for t in args) and not in_backward():
            return _beside_plain(func, args, kwargs, RuntimeError("each rank may have another value"))
        if func in SUMMED and is_real(args[0]):
            ShardedTensor.cut_own_gradient(args[0])  # which may be a plain DTensor
        if func is _detach and any(p.is_partial() for p in args[0].placements):
            return _detached(args[0])
        if func in EXTREMES or func in NORMS:
            args = with_neutral(func, args)
        elif func in LINEAR_BY_TORCH:
            args = (reduced(args[0], sums_stay=True), *args[1:])
        elif func in JOINS:
            if any(type(t) is torch.Tensor for t in args[0]) and not in_backward():
                _refuse_mixed(func, args[0], RuntimeError("each rank may have another value"))
            args = (alike(args[0]), *args[1:])
        elif func.is_view and isinstance(args[0], ShardedTensor):
            reduce_in_place(args[0])  # what is written into the view is the whole tensor's
        elif func.overloadpacket not in LINEAR and not adds_partial(func, args, kwargs):
            # DTensor would divide by a rank's own part of a sum, for example.
            written = args[0] if func._schema.is_mutable and args else None
            if isinstance(written, ShardedTensor):
                reduce_in_place(written)
            args = tuple(reduced(t) if isinstance(t, DTensor) else t for t in args)
        result = _computed(func, types, args, kwargs)
        if func._schema.is_mutable:
            many = bool(args) and isinstance(args[0], (list, tuple))
            edits = [t for t, _ in written_arguments(func, args, kwargs) if isinstance(t, ShardedTensor)]
            counters = [t.__dict__.get(EDITED, local_of(t)) for t in edits]
            # Operations on one tensor increase the counter of its wrapper; operations on lists do not.
            counters += edits if many else []
            increment_version([t for t in counters if not t.is_inference()])
            return result
        if (func.is_view or func is _aten._unsafe_view.default) and isinstance(args[0], ShardedTensor):
            return _as_views(func, args, kwargs, result)
        source = next((t for t in tree_leaves((args, kwargs)) if isinstance(t, ShardedTensor)), None)
        for made in _plain(result):
            made.__class__ = ShardedTensor
            if source is not None:
                note_origin(made, source)
        return result

    @staticmethod
    def __tensor_unflatten__(*parts: Any) -> DTensor:
        """Return a tensor of this class, as torch.compile expects when its graph runs."""
        return as_sharded(DTensor.__tensor_unflatten__(*parts))

    def full_tensor(self, *, grad_placements: Any = None) -> torch.Tensor:
        """Return the whole tensor on every rank, with graph, as with a DTensor. Every rank of the mesh must call it."""
        if grad_placements is not None:
            return super().full_tensor(grad_placements=grad_placements)
        if tracked([self]):
            agree_to_reduce(self)
        result = whole(self) if gathers_plainly(self) else super().full_tensor()
        _average_of_plain(self, result, range(self.device_mesh.ndim))
        return result

    def to_local(self, *, grad_placements: Any = None) -> torch.Tensor:
        """Return this rank's part, with graph. Its gradient is averaged over the axes that replicate it."""
        result = super().to_local(grad_placements=grad_placements)
        if grad_placements is None:
            _average_of_plain(self, result, [a for a, p in enumerate(self.placements) if p.is_replicate()])
        return result

    def redistribute(
        self, device_mesh: Any = None, placements: Sequence[Placement] | None = None, **kwargs: Any
    ) -> DTensor:
        everywhere = placements is not None and all(p.is_replicate() for p in placements)
        own = device_mesh is None or device_mesh == self.device_mesh
        if everywhere and own and not kwargs and gathers_plainly(self) and not self.requires_grad:
            return as_sharded(replicated(self))
        return as_sharded(super().redistribute(device_mesh, placements, **kwargs))

    def _check_data(self, value: torch.Tensor) -> None:
        if (
            not isinstance(value, DTensor)
            or value.shape != self.shape
            or value.device_mesh != self.device_mesh
        ):
            raise refusal(
                f".data of a sharded tensor of shape {tuple(self.shape)} accepts only a DTensor of the same shape on "
                f"the same mesh, got a {type(value).__name__} of shape {tuple(value.shape)}. Distribute it with "
                "torch.distributed.tensor.distribute_tensor, or use copy_ under no_grad."
            )

    def become(self, other: Any) -> None:
        if other.placements != self.placements:
            forget_hooks(self)
        rebind(self, other)

    def cut_own_gradient(self) -> None:
        cut_gradient(self, functools.partial(_cut_again, self.device_mesh, self.placements))

    def _copy(self) -> DTensor:
        return as_sharded(self._as_dtensor(clone=True))

    def tolist(self) -> Any:
        return whole_number(self).tolist()

    def __format__(self, form: str) -> str:
        return format(self.item(), form) if form and not self.dim() else object.__format__(self, form)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._as_dtensor().__reduce_ex__(protocol)

    def _as_dtensor(self, clone: bool = False) -> DTensor:
        local = local_of(self).detach()
        local = local.clone() if clone else local
        return dtensor_of(local, self.device_mesh, self.placements, self.shape, self.stride())


class ShardedCopy(ShardedTensor):  # type: ignore[metaclass]
    """A view of a sharded tensor with gathered elements, so it has separate memory.

    An in-place operation on it also changes its base. If the base has changed, a read gathers the elements again, so
    every rank must read, as every rank must take the view.
    """

    __slots__ = ()
    _viewed: ShardedTensor
    _steps: tuple[Step, ...]  #: from the base to this view
    _seen: int  #: the counter of the base's local tensor when elements were gathered

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            written = args[0] if "out" not in kwargs and args else kwargs.get("out")
            if isinstance(written, ShardedCopy):
                if not written.numel():
                    return written
                if written is not args[0] or not can_edit(func):
                    refuse(func, written)
                if _RANDOM in func.tags:
                    agree_to_draw(func, written._viewed, kwargs)
                begin_edit(func, args, kwargs)
                _refresh([*args[1:], kwargs])
                edit(written._viewed, written._steps, func, args, kwargs)
                return _written(written)
            if isinstance(written, (list, tuple)) and any(isinstance(t, ShardedCopy) for t in written):
                refuse(func, next(t for t in written if isinstance(t, ShardedCopy)))
        _refresh([args, kwargs])
        return super().__torch_dispatch__(func, types, args, kwargs)

    def full_tensor(self, **kwargs: Any) -> torch.Tensor:
        _refresh(self)
        return super().full_tensor(**kwargs)

    def to_local(self, **kwargs: Any) -> torch.Tensor:
        _refresh(self)
        return super().to_local(**kwargs)

    def redistribute(self, *args: Any, **kwargs: Any) -> DTensor:
        _refresh(self)
        return super().redistribute(*args, **kwargs)


def _counter(base: ShardedTensor) -> torch.Tensor:
    return base.__dict__.get(EDITED, local_of(base))  # type: ignore[no-any-return]


def _version(base: ShardedTensor) -> int:
    counter = _counter(base)
    return 0 if counter.is_inference() else counter._version


def _written(view: ShardedCopy) -> ShardedCopy:
    """Note that the base of a view was changed."""
    base = view._viewed
    counter = _counter(base)
    if counter is not local_of(base) and not counter.is_inference():
        increment_version([counter])
    unset = mark_of(counter)
    if unset is not None:
        if view.numel() == unset.numel:
            unmark(counter)
        else:
            unset.in_parts = True
    view._seen = -1
    return view


def _refresh(arguments: Any) -> None:
    """Gather the elements of views again if their base has changed."""
    for view in tree_leaves(arguments):
        if isinstance(view, ShardedCopy) and view._seen != _version(view._viewed):
            fresh: Any = views(view._viewed, view._steps)
            view._local_tensor, view._spec = local_of(fresh), fresh._spec
            view._seen = _version(view._viewed)


def _detached(number: DTensor) -> DTensor:
    """Return a Partial tensor without its graph. ``detach`` of torch 2.15 would reduce a norm."""
    local = local_of(number).detach()
    return as_sharded(dtensor_of(local, number.device_mesh, number.placements, number.shape, number.stride()))


def _as_views(func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """Make the results of a view operation views of its argument.

    They are over the same memory, or have the steps by which edits are repeated on the base.
    """
    base: Any = args[0]
    viewed = local_of(base)
    many = isinstance(result, (list, tuple))
    for number, each in enumerate(result if many else (result,)):
        if not isinstance(each, DTensor):
            continue
        made: Any = each
        made._local_tensor = waited(local_of(made))
        made._edited = base.__dict__.get(EDITED, viewed)
        note_origin(made, base)
        if BESIDE_PLAIN in base.__dict__:
            made.__dict__[BESIDE_PLAIN] = base.__dict__[BESIDE_PLAIN]
        if type(base) is not ShardedCopy and (not is_real(made) or _shares_order(made, base)):
            made.__class__ = ShardedTensor
            if func is _detach:
                made._local_tensor = viewed  # the same object, since below autograd counters are not shared
            continue
        made.__class__ = ShardedCopy
        step = Step(func, tuple(args[1:]), kwargs, number if many else None)
        is_copy = isinstance(base, ShardedCopy)
        made._viewed, made._steps = (
            (base._viewed, (*base._steps, step)) if is_copy else (_alias(base), (step,))
        )
        made._seen = _version(made._viewed)
    return result


def _alias(tensor: ShardedTensor) -> ShardedTensor:
    """Return another tensor over the same memory, as ``detach`` does."""
    alias: Any = tensor._as_dtensor()
    alias.__class__ = ShardedTensor
    alias._local_tensor = local_of(tensor)
    alias._edited = tensor.__dict__.get(EDITED, local_of(tensor))
    return alias  # type: ignore[no-any-return]


def _shares_order(view: DTensor, base: DTensor) -> bool:
    """Return whether a view shares memory with its base, and this rank's part of it is one range of elements.

    Newer versions of torch flatten a tensor that is cut along an inner dimension into a tensor that is cut in stripes.
    """
    if any(isinstance(p, StridedShard) and p not in base.placements for p in view.placements):
        return False
    return storage_key(local_of(view)) == storage_key(local_of(base))


def _cut_again(mesh: DeviceMesh, placements: Sequence[Placement], gradient: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a tensor with these placements that was summed or added to a plain loss."""
    if gradient is None:  # of a tensor without elements
        return gradient
    if not isinstance(gradient, DTensor):
        gradient = DTensor.from_local(gradient, mesh, (Replicate(),) * mesh.ndim, run_check=False)
    if any(p.is_partial() for p in placements):
        return gradient
    return gradient.redistribute(placements=placements)


def _reads_numbers(func: Any, args: Any, kwargs: Any, sharded: Sequence[DTensor]) -> bool:
    """Return whether an operation makes values of this rank: of numbers alone, which it does not only add.

    A number (a tensor without dimensions) may be Partial. A rank reads the whole number before it multiplies it by a
    factor, because the factor may be the rank's own.
    """
    if not sharded or any(t.dim() and not is_own(t) for t in sharded):
        return False
    if any(map(is_own, sharded)):
        return True
    return not (func.is_view or only_sums(func, args, kwargs, DTensor, LINEAR))


def _is_plain(func: Any, args: Any, tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether an operation of numbers has a plain result, because of plain tensors such as a loss.

    Raises:
        NotImplementedError: the result would be written into a number.
    """
    plain = [t for t in tensors if not isinstance(t, DTensor)]
    losses = [t for t in plain if t.requires_grad] if torch.is_grad_enabled() else []
    if func._schema.is_mutable:
        into_plain = bool(plain) and args[0] is plain[0]
        if losses and not into_plain:
            refuse_loss_in_place(func)
        return into_plain
    return bool(losses) or any(t.dim() for t in plain)


def _mean(mesh: DeviceMesh, recipe: int, gradient: torch.Tensor) -> torch.Tensor:
    """Return the mean over the ranks of the gradient of a number."""
    if not isinstance(gradient, DTensor):
        return average(gradient, mesh, recipe)
    if any(p.is_shard() for p in gradient.placements):
        return gradient  # it is averaged already
    placements = tuple(Replicate() if p.is_partial() else p for p in gradient.placements)
    local = DTensor.to_local(DTensor.redistribute(gradient, placements=placements))
    mean = average(local, mesh, recipe)
    return as_sharded(
        DTensor.from_local(
            mean, mesh, placements, run_check=False, shape=gradient.shape, stride=gradient.stride()
        )
    )


def average_number(number: ShardedTensor) -> None:
    """Average the gradient of a number that a rank is about to read."""
    if not is_own(number):
        average_gradient(number, functools.partial(_mean, number.device_mesh, recipe_of(number)))


def _average_of_plain(tensor: ShardedTensor, plain: torch.Tensor, axes: Iterable[int]) -> None:
    """Average the gradient of a plain tensor that was read from a sharded one."""
    if plain.requires_grad and is_real(tensor):
        average_read(plain, tensor, tensor.device_mesh, axes)


def _read(in_place: bool, value: Any) -> Any:
    """Return a number as the whole number, for an operation of this rank, and any other value unchanged."""
    if not isinstance(value, ShardedTensor):
        return value
    if in_place:
        reduce_in_place(value)
    return reduced(value)


def _number_of(value: Any) -> Any:
    """Return a number as a plain tensor, with the graph of the sharded one. Other values are unchanged."""
    if not isinstance(value, ShardedTensor):
        return value
    value.__dict__[BESIDE_PLAIN] = value.dtype  # backward joins it with this rank's gradients
    average_number(value)
    value.cut_own_gradient()
    return whole_number(value)


def _agree_on_factors(func: Any, sharded: Sequence[DTensor], tensors: Sequence[torch.Tensor]) -> None:
    """Raise if the ranks join parts of a sharded tensor with different numbers."""
    mesh = next(t for t in sharded if t.requires_grad).device_mesh
    for t in tensors:
        if is_own(t) or (not t.dim() and not isinstance(t, DTensor)):
            plain = local_of(t) if isinstance(t, DTensor) else t
            try:
                agree_on_value(plain, mesh)
            except RuntimeError as error:
                raise RuntimeError(f"{label(sharded)} in {func}: {error}") from error


def _computed(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of an operator: by DTensor's rule from parts if that is right, or from whole tensors."""
    leaves = tree_leaves((args, kwargs))
    if func is not _detach and torch.is_grad_enabled():
        for t in leaves:
            if isinstance(t, ShardedTensor) and t.is_leaf and t.requires_grad and is_real(t):
                t.cut_own_gradient()
    if (
        in_backward()
        and any(BESIDE_PLAIN in t.__dict__ for t in leaves if isinstance(t, ShardedTensor))
        and any(type(t) is torch.Tensor and t.numel() != 1 for t in leaves)
    ):
        return _with_wholes(func, args, kwargs)
    if in_backward() and func is _aten.add.Tensor and _adds_own_gradient(*args[:2]):
        mine, other = args[:2] if isinstance(args[1], DTensor) else args[1::-1]
        return func(_cut_mean(mine, other), other)
    if not by_parts(func, args) and can_use_wholes(func, args, kwargs):
        return on_wholes(func, args, kwargs)
    try:
        return DTensor.__torch_dispatch__(func, types, args, kwargs)  # type: ignore[arg-type]
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        # For example with parts of different sizes, or with plain tensors of the whole shape.
        if can_use_wholes(func, args, kwargs):
            return on_wholes(func, args, kwargs)
        holds_values = args and isinstance(args[0], ShardedTensor) and is_real(args[0])
        if holds_values and func._schema.is_mutable and "out" not in kwargs and can_edit(func):
            edit(args[0], (), func, args, kwargs)
            return args[0]
        if not all(is_real(t) for t in leaves if isinstance(t, DTensor)):
            raise
        if "mixed torch.Tensor and DTensor" in str(error):
            return _beside_plain(func, args, kwargs, error)
        refuse_operation(func, leaves, error)


def _is_of_numbers(args: Any, kwargs: Any) -> bool:
    """Return whether backward joins this rank's numbers with those of sharded tensors: a loss times a penalty."""
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    return not any(t.dim() for t in tensors) and any(type(t) is torch.Tensor for t in tensors)


def _beside_plain(func: Any, args: Any, kwargs: Any, error: Exception) -> Any:
    """Run an operation of this rank's plain tensors and of parameters whose unit is gathered now. The result is plain.

    For example a loss that uses the output layer's weight after the root's forward. Modules show sharded parameters
    then, and in FSDP2 full ones.
    """
    sharded = [t for t in tree_leaves((args, kwargs)) if isinstance(t, ShardedTensor)]
    dtypes = [gathered_dtype(t.__dict__.get(EDITED, local_of(t))) for t in sharded]
    written = any(isinstance(t, DTensor) for t, _ in written_arguments(func, args, kwargs))
    if (
        Attempt.running
        or None in dtypes
        or written
        or func.namespace != "aten"
        or not all(map(is_real, sharded))
    ):
        _refuse_mixed(func, tree_leaves((args, kwargs)), error)
    for t, dtype in zip(sharded, dtypes, strict=True):
        t.__dict__[BESIDE_PLAIN] = dtype
        average_number(t)
        t.cut_own_gradient()
    return _with_wholes(func, args, kwargs)


def _with_wholes(func: Any, args: Any, kwargs: Any) -> Any:
    """Run the operation on plain tensors: for a sharded one on the whole, in the dtype in which modules compute."""

    def whole_of(value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        full = whole_number(value)
        return full.to(value.__dict__.get(BESIDE_PLAIN, full.dtype))

    return func(*tree_map(whole_of, args), **tree_map(whole_of, kwargs))


def _adds_own_gradient(one: Any, other: Any) -> bool:
    """Return whether backward adds a gradient of this rank's own, which is whole, to one that is sharded."""
    plain = [t for t in (one, other) if type(t) is torch.Tensor]
    return (
        len(plain) == 1
        and plain[0].dim() > 0
        and one.shape == other.shape
        and is_real(other if plain[0] is one else one)
    )


def _cut_mean(gradient: torch.Tensor, like: DTensor) -> torch.Tensor:
    mesh = like.device_mesh
    mean = average(gradient, mesh, recipe_of(like))
    return _cut_again(mesh, like.placements, mean)


def _change_shape(func: Any, args: Any, kwargs: Any) -> Any:
    """Change a shape in place. DTensor would change an alias of the tensor."""
    target = args[0]
    form = getattr(_aten, func.overloadpacket.__name__.rstrip("_"), None)
    view = getattr(form, func._overloadname, None) or getattr(form, "int", None)  # transpose's
    if view is None:
        refuse(func, target)
    made: Any = view(*args, **kwargs)
    shares = type(made) is ShardedTensor and storage_key(local_of(made)) == storage_key(local_of(target))
    # A parameter that is no longer over its unit's memory is a replaced one, which the unit takes over.
    owns = EDITED not in target.__dict__ or isinstance(target, torch.nn.Parameter)
    if shares or (owns and made.numel() == target.numel()):
        if not shares:
            target.__dict__.pop(EDITED, None)
        rebind(target, made)
        return target
    refuse(func, target)


def _edit_by_position(func: Any, args: Any, kwargs: Any) -> Any:
    target = args[0]
    if not isinstance(target, ShardedTensor):
        refuse(func, target)
    edit(target, (), func, args, kwargs)
    counter = _counter(target)
    if counter is not local_of(target) and not counter.is_inference():
        increment_version([counter])
    return target


def as_class(kind: type[Any], tensor: Any) -> Any:
    tensor.__class__ = kind
    return tensor


def as_sharded(tensor: DTensor) -> DTensor:
    """Return the same object as a ``ShardedTensor``, with global numbers and noticed edits.

    torch 2.11 does not call subclasses of DTensor for operations, so there the tensor is returned unchanged. Its
    numbers are then those of DTensors. ``detach`` would also return no subclass, so no subclass could become a
    parameter.
    """
    if subclasses_dispatch and type(tensor) is DTensor:
        tensor.__class__ = ShardedTensor
    return tensor


def _plain(result: Any) -> Iterator[Any]:
    """Yield the plain DTensors among the results of an operation."""
    for each in result if isinstance(result, (list, tuple)) else (result,):
        if type(each) is DTensor:
            yield each


def _refuse_mixed(func: Any, arguments: Iterable[Any], error: Exception) -> NoReturn:
    """Raise for a sharded parameter beside a plain tensor. Mostly a module was called outside its unit's forward."""
    if is_collective(func):
        refuse_operation(func, arguments, error)
    raise NotGathered(
        f"{label(arguments)} is sharded, but {func} got it together with a plain tensor ({error}), and the weights of "
        "its unit are not gathered now. Move this use into the forward of a sharded module, or into a method that you "
        "register with sw.register_fsdp_forward_method(module, name). To use a weight after forward, in a loss for "
        "example, call unshard() on the module of its unit before each such use. If a module was called outside the "
        "forward of its unit, apply fully_shard to it before the outer module. Or make the plain tensor a DTensor, or "
        "edit full parameters inside `with shardwright.unsharded(model):`." + way_out_of_clipping(func)
    ) from error
