"""Sees operations on sharded parameters, so that those that need whole weights get them.

Modules show sharded parameters while their unit does not run. A program that calls parts of a unit, or that takes a
weight into a function of its own, computes with these objects. ``model/direct_uses.py`` then gathers the unit for the
operation.

torch asks the class of a tensor before each operation (``__torch_function__``), also before it reads an attribute. That
would make optimizers slow. So the classes of sharded parameters are asked only from the begin of a forward to the begin
of its backward, and in a backward only if forwards have used weights in this way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from shardwright.engine.compat.autograd import saves_for_checkpoint
from shardwright.engine.compat.callers import called_by_parameter, inside_function, read_by_program
from shardwright.engine.compat.dtensor import subclasses_dispatch
from shardwright.engine.compat.modes import (
    UnsupportedOperatorException,
    disabled_torch_function,
    infers_shapes,
    quick_attributes,
)
from shardwright.engine.compat.tensors import set_class, tree_leaves
from shardwright.engine.tensors.parameter import Managed, RaggedParameter, ShardedParameter, unit_of
from shardwright.engine.tensors.same_object import acting_classes
from shardwright.engine.tensors.sharded import Attempt, NotGathered, Sharded

Compute = Callable[[Any, Any, Any], Any]

_ATTRIBUTE: Any = type(getattr(torch.Tensor, "grad").__get__)  # noqa: B009
_DATA = getattr(torch.Tensor, "data").__get__  # noqa: B009
#: Attributes that are operations.
_OPERATIONS = {getattr(torch.Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "real", "imag", "data")}
_FORM = {getattr(torch.Tensor, name).__get__ for name in ("dtype", "device", "is_cuda", "is_cpu")}
#: Functions whose results have elements of their first argument, in another shape or dtype.
_SAME_ELEMENTS = {
    "T", "mT", "H", "mH", "data", "t", "transpose", "permute", "movedim", "view", "reshape", "flatten", "unflatten",
    "squeeze", "unsqueeze", "contiguous", "detach", "to", "type", "float", "double", "half", "bfloat16", "view_as",
    "expand", "expand_as", "broadcast_to", "repeat", "chunk", "split", "narrow", "select", "unbind", "__getitem__",
}  # fmt: skip
#: Functions with which programs keep values, as for a checkpoint. While no call runs, their results are not noted.
_KEEPS = {"detach", "clone", "cpu", "data"}
#: Functions of graphs and hooks, which take the parameter itself.
_OF_GRAPH = {
    "backward", "grad", "register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "retain_grad",
}  # fmt: skip
#: Functions that only ask their other arguments for a shape, dtype or device.
_LIKE = {"to", "type_as", "expand_as", "view_as", "reshape_as"}
#: Functions that make a tensor with the form of another.
_NEW = {
    "zeros_like", "empty_like", "ones_like", "full_like", "new_zeros", "new_empty", "new_ones", "new_full",
}  # fmt: skip
#: Functions that draw numbers. Computed again, they would draw others.
_RANDOM = {
    "dropout", "alpha_dropout", "feature_alpha_dropout", "bernoulli", "multinomial", "rand_like", "randn_like",
    "randint_like", "rrelu", "gumbel_softmax",
}  # fmt: skip
_DEEPEST = 50  #: steps from parameters to a tensor that are computed again
#: torch's words where it refuses a sharded tensor beside a plain one, on versions that do not call our classes.
_MIXED = "mixed torch.Tensor and DTensor"


class How(NamedTuple):
    """A record of how a tensor was computed from sharded parameters.

    If the tensor meets this rank's own data, it is computed again from whole weights.
    """

    function: Any
    args: Any
    kwargs: Any
    with_graph: bool
    depth: int  #: steps from the parameters
    versions: list[int]  #: of the sharded tensors among the arguments, whose later edits it does not see


#: Set on a tensor that was computed from sharded parameters: a :class:`How`.
HOW = "_shardwright_how"


class _Watch:
    """Whether operations on sharded parameters are seen, and what computes those that need whole weights.

    Attributes:
        compute: gathers weights for a function and returns its result. Called with the function and its arguments.
        runs: returns whether a call of the model of a unit runs, or a backward.
        shows: returns whether programs see the full forms of a unit's parameters, in a call or when it is recomputed.
        any_call_runs: returns whether a call of any model runs.
        used: whether any operation has needed whole weights in this process.
    """

    def __init__(self) -> None:
        self.compute: Compute | None = None
        self.runs: Callable[[Any], bool] = lambda unit: False
        self.shows: Callable[[Any], bool] = lambda unit: False
        self.any_call_runs: Callable[[], bool] = lambda: False
        self.used = False
        self._on = False

    def begin(self) -> None:
        """See the operations from now on."""
        if not self._on and self.compute is not None:
            self._on = True
            _ask(_FUNCTION)

    def end(self) -> None:
        """No longer see them."""
        if self._on:
            self._on = False
            _ask(disabled_torch_function)


watch = _Watch()


def _ask(function: Any) -> None:
    for kind in (ShardedParameter, RaggedParameter, *acting_classes()):
        kind.__torch_function__ = function


def _see(function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """Compute a function of torch of which an argument is a sharded parameter, or was computed from one."""
    kwargs = kwargs or {}
    with quick_attributes():
        name = getattr(function, "__name__", "")
        if name in _OF_GRAPH:
            return function(*args, **kwargs)
        if infers_shapes(types):
            _leave_graph(function, args, kwargs)
            return function(*args, **kwargs)
        if type(function) is _ATTRIBUTE and function not in _OPERATIONS:
            return function(_as_shown(args[0]) if function in _FORM else args[0], *args[1:])
        if name == "detach" and called_by_parameter():
            _forget(args[0])  # ``nn.Parameter(...)`` expects the class of a tensor that nothing watches
        needs_whole, result = _on_parts(function, args, kwargs)
    if not needs_whole:
        return result
    assert watch.compute is not None
    return watch.compute(function, args, kwargs)


def _leave_graph(function: Any, args: Any, kwargs: Any) -> None:
    """Let torch.compile run an operation that may need whole weights outside of its graph."""
    leaves = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    sharded = [t for t in leaves if isinstance(t, Sharded)]
    if sharded and (watch.any_call_runs() or _meets_others(leaves, sharded)):
        raise UnsupportedOperatorException(function)


def _as_shown(tensor: Any) -> Any:
    """Return the tensor whose dtype and device a program sees: in a running call the full form of a parameter."""
    unit = unit_of(tensor) if isinstance(tensor, Managed) else None
    if unit is None or not watch.shows(unit):
        return tensor
    if not read_by_program(2):
        return tensor
    return unit.managed(tensor).full


def _on_parts(function: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
    """Compute a function on sharded tensors, unless it needs whole ones. Returns whether it does, and the result."""
    leaves = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    ours = [t for t in leaves if is_watched(t)]
    running = any(watch.runs(unit) for unit in _units(ours))
    writes = _writes(function, args, kwargs)
    name = getattr(function, "__name__", "")
    same_elements = function in _OPERATIONS or name in _SAME_ELEMENTS
    if running and ours and (name in _RANDOM or _depth(ours) >= _DEEPEST):
        return True, None
    if not writes and (running or saves_for_checkpoint()) and _meets_others(leaves, ours):
        return True, None  # a checkpoint would keep what an attempt with parts saves
    if _makes_buffer(function, args) and not torch.is_grad_enabled() and (running or inside_function()):
        return True, None
    if writes and not isinstance(args[0], Managed) and _meets_others([t for t in leaves if t.dim()], ours):
        raise NotGathered(
            f"{name} writes this rank's own data into a tensor that was computed "
            "from a sharded parameter, of which this rank has only a part. Make the tensor from a shape, as by "
            "torch.zeros(weight.shape), or write `new = old + data`."
        )
    try:
        Attempt.running = not writes
        result = function(*args, **kwargs)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        refused = isinstance(error, (NotGathered, NotImplementedError)) or _MIXED in str(error)
        refused |= torch.is_inference_mode_enabled()  # where torch makes no views of sharded tensors
        needed = same_elements or torch.is_inference_mode_enabled() or _meets_others(leaves, ours)
        if not writes and (running or (refused and needed)):
            return True, None
        raise
    finally:
        Attempt.running = False
    if running and args and result is args[0] and not writes and _computes_in_other_dtype(result):
        return True, None  # such as ``weight.float()``: nothing to do for the parts, and a cast of the whole
    if writes:
        for t in ours:
            _forget(t)  # it no longer is what was computed
    elif running or (name not in _KEEPS and function != _DATA and _depth(ours) < _DEEPEST):
        _note(function, args, kwargs, result, ours, leaves)
    return False, result


_FUNCTION = staticmethod(_see)


def asks_for_form(function: Any, args: Any) -> bool:
    """Return whether a function asks a sharded parameter only for its shape, dtype or device."""
    like = getattr(function, "__name__", "") in _LIKE and bool(args) and not is_watched(args[0])
    return like or _makes_buffer(function, args)


def _makes_buffer(function: Any, args: Any) -> bool:
    """Return whether a function makes a tensor of a weight's form, as for a gradient that it adds up itself."""
    return getattr(function, "__name__", "") in _NEW and bool(args) and is_watched(args[0])


def is_watched(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a sharded parameter of a unit, or was computed from some."""
    return isinstance(tensor, Managed) or HOW in tensor.__dict__


def _depth(tensors: Sequence[torch.Tensor]) -> int:
    """Return the most steps by which one of these tensors was computed from parameters."""
    return max((how.depth for t in tensors if (how := t.__dict__.get(HOW)) is not None), default=0)


def versions_of(tensors: Sequence[Any]) -> list[int]:
    """Return the version counters of the local tensors of sharded parameters, which edits increase.

    On torch 2.11 other operations increase them, too, so there nothing is compared.
    """
    if not subclasses_dispatch:
        return []
    return [
        0 if t._local_tensor.is_inference() else t._local_tensor._version
        for t in tensors
        if isinstance(t, Managed)
    ]


def _units(tensors: Sequence[torch.Tensor]) -> list[Any]:
    units: list[Any] = []
    for t in tensors:
        how = t.__dict__.get(HOW)
        if how is not None:
            units += _units([s for s in tree_leaves((how.args, how.kwargs)) if isinstance(s, torch.Tensor)])
        elif isinstance(t, Managed) and (unit := unit_of(t)) is not None:
            units.append(unit)
    return units


def _meets_others(leaves: Sequence[torch.Tensor], ours: Sequence[Any]) -> bool:
    """Return whether a tensor is among ``leaves`` that is no part of a sharded one: this rank's own data."""
    return any(not _is_cut_with(t, ours) for t in leaves)


def _is_cut_with(tensor: torch.Tensor, ours: Sequence[Any]) -> bool:
    if isinstance(tensor, Sharded):
        return True
    return isinstance(tensor, DTensor) and any(tensor.device_mesh == t.device_mesh for t in ours)


def _writes(function: Any, args: Any, kwargs: Any) -> bool:
    """Return whether a function writes into a sharded tensor."""
    name = getattr(function, "__name__", "")
    out = kwargs.get("out")
    if out is not None:
        return any(isinstance(t, Sharded | DTensor) for t in tree_leaves(out))
    writes = (name.endswith("_") and not name.endswith("__")) or (
        name.startswith("__i") and name.endswith("__")
    )
    first = tree_leaves(args[0])[:1] if args else []
    return (writes or name in ("__set__", "__setitem__")) and bool(first) and is_watched(first[0])


def _computes_in_other_dtype(tensor: Any) -> bool:
    """Return whether modules compute with a sharded parameter in another dtype than it is stored in."""
    unit = unit_of(tensor) if isinstance(tensor, Managed) else None
    return unit is not None and unit.managed(tensor).full.dtype != tensor.dtype


def _note(
    function: Any, args: Any, kwargs: Any, result: Any, ours: Sequence[Any], given: Sequence[Any]
) -> None:
    """Note how a sharded result was computed, so that it can be computed from whole weights.

    A number that was computed from larger parameters stays a number of the sharded ones, such as a penalty.
    """
    numbers = all(not t.dim() for t in ours)
    for place, each in enumerate(result if isinstance(result, (list, tuple)) else (result,)):
        if not isinstance(each, Sharded | DTensor) or any(each is t for t in given):
            continue
        if each.dim() or numbers:
            chosen = functools.partial(_chosen, function, place) if each is not result else function
            each.__dict__[HOW] = How(
                chosen, args, kwargs, torch.is_grad_enabled(), _depth(ours) + 1, versions_of(ours)
            )
            set_class(each, _watched_class(type(each)))


def _forget(tensor: torch.Tensor) -> None:
    """Forget how a tensor was computed."""
    if tensor.__dict__.pop(HOW, None) is not None:
        set_class(tensor, type(tensor).__bases__[0])


def _chosen(function: Any, place: int, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)[place]


@functools.cache
def _watched_class(kind: Any) -> Any:
    """Return a class of tensors computed from sharded parameters, whose operations are always seen."""
    namespace = {"__slots__": (), "__torch_function__": _FUNCTION, "__module__": kind.__module__}
    made: Any = type(kind)(kind.__name__, (kind,), namespace)
    made.__slots__ = kind.__slots__
    return made


def parameters_in(args: Any, kwargs: Any) -> list[Any]:
    """Return the sharded parameters among arguments, and those from which tensors among them were computed."""
    found: list[Any] = []
    for t in tree_leaves((args, kwargs)):
        if isinstance(t, torch.Tensor):
            how = t.__dict__.get(HOW)
            found += [t] if how is None and isinstance(t, Managed) else []
            found += parameters_in(how.args, how.kwargs) if how is not None else []
    return found


def whole(args: Any, kwargs: Any, full_of: Callable[[Any], torch.Tensor]) -> tuple[Any, Any]:
    """Return the arguments with whole weights instead of sharded parameters and of what was computed from them.

    ``full_of`` returns the whole weight of a sharded parameter.
    """

    def exchange(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            how = value.__dict__.get(HOW)
            if how is not None and value.grad_fn is not None and not how.with_graph:
                with (
                    quick_attributes()
                ):  # an output of a torch.autograd.Function, whose graph the record does not have
                    return value.full_tensor()  # type: ignore[attr-defined]
            if how is not None:
                return again(how)
            return full_of(value) if isinstance(value, Managed) and unit_of(value) is not None else value
        if type(value) in (list, tuple):
            return type(value)(exchange(each) for each in value)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(exchange, value))
        return {key: exchange(each) for key, each in value.items()} if type(value) is dict else value

    def again(how: How) -> Any:
        with quick_attributes():
            ours = [
                t
                for t in tree_leaves((how.args, how.kwargs))
                if isinstance(t, torch.Tensor) and is_watched(t)
            ]
            if versions_of(ours) != how.versions:
                raise NotGathered(
                    "A tensor that was computed from a sharded parameter was used with this rank's own data after the "
                    "parameter had been edited. Compute it again after the edit."
                )
        function = torch.Tensor.detach if how.function == _DATA else how.function
        with torch.set_grad_enabled(how.with_graph and torch.is_grad_enabled()):
            return function(*exchange(how.args), **exchange(how.kwargs))

    return exchange(args), exchange(kwargs)
