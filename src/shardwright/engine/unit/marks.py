"""Hooks into a model: this file finds tensors in inputs and outputs, and puts marks into the autograd graph.

The unit acts when a hook runs. Graph hooks hold their visit, so a graph that outlives its model still finds its
weights. Nothing here refers to a module.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from shardwright.engine.base.visit import Visit
from shardwright.engine.compat.autograd import next_sequence_number, sequence_number
from shardwright.engine.compat.dtensor import waited
from shardwright.engine.compat.fully_shard import SHARDED_MARKS
from shardwright.engine.compat.tensors import is_view
from shardwright.engine.tensors.direct import is_watched
from shardwright.engine.unit.containers import refuse_cycle, with_items, with_values

TensorMap = Callable[[torch.Tensor], torch.Tensor]


def map_tensors(function: TensorMap, tree: Any, mutable: bool = True) -> Any:
    """``tree`` with ``function`` applied to every tensor in tuples, named tuples, lists, dicts and dataclasses.

    Returns the same object if nothing changed, so a caller's containers keep their identity. Otherwise a container of a
    user's class becomes another one of its class, with its attributes, and its constructor does not run. With
    ``mutable`` False lists and mappings are not replaced, because the caller must see later changes of them.

    Raises:
        ValueError: a container contains itself.
    """
    try:
        return _map(function, tree, mutable)
    except RecursionError:
        refuse_cycle(tree)
        raise


def _map(function: TensorMap, tree: Any, mutable: bool) -> Any:
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if not mutable and isinstance(tree, (list, Mapping)):
        return tree
    if isinstance(tree, (tuple, list)):
        items = [_map(function, item, mutable) for item in tree]
        if all(new is old for new, old in zip(items, tree, strict=True)):
            return tree
        return with_items(tree, items)
    if isinstance(tree, Mapping):
        changed = {key: _map(function, value, mutable) for key, value in tree.items()}
        if all(changed[key] is tree[key] for key in tree):
            return tree
        return with_values(tree, changed)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        fields = {f.name: getattr(tree, f.name) for f in dataclasses.fields(tree) if hasattr(tree, f.name)}
        changed = {name: _map(function, value, mutable) for name, value in fields.items()}
        if all(changed[name] is fields[name] for name in fields):
            return tree
        result = copy.copy(tree)  # not dataclasses.replace, which runs __post_init__ again
        for name, value in changed.items():
            object.__setattr__(result, name, value)
        return result
    return tree


def map_arguments(function: TensorMap, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments of a call with ``function`` applied to every tensor in them."""
    if len(args) == 1 and not kwargs:
        return (map_tensors(function, args[0]),), kwargs
    return map_tensors(function, (args, kwargs))  # type: ignore[no-any-return]


class _AfterBackward(torch.autograd.Function):
    """The identity on a unit's inputs. Its backward runs after the unit's backward has produced their gradients."""

    @staticmethod
    def forward(ctx: Any, visit: Visit, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.visit = visit
        # torch.compile would treat a tensor that is still being communicated as one without a graph.
        return tuple(map(waited, inputs))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ctx.visit.after_backward()
        return (None, *gradients)

    @staticmethod
    def jvp(ctx: Any, visit: None, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        # Views, because the outputs are views of the inputs.
        return tuple([None if t is None else t.view_as(t) for t in tangents])


def mark_inputs(visit: Visit, args: Any, kwargs: Any) -> tuple[Any, Any, bool, int]:
    """Let ``visit`` hear when the gradients of these inputs exist.

    Also returns whether any input needs a gradient, and the number of the first autograd node of the call. One marked
    input is enough, since its node runs after all nodes of the call. So lists and dicts, which the call may extend, are
    not changed.
    """
    tensors: dict[int, torch.Tensor] = {}  # a tensor that occurs twice stays one tensor

    def find(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad and not is_watched(tensor):  # a mark would hide how it was computed
            tensors[id(tensor)] = tensor
        return tensor

    if len(args) == 1 and not kwargs and type(args[0]) is torch.Tensor:
        return _mark_input(visit, args[0])
    for value in (*args, *kwargs.values()):
        map_tensors(find, value, mutable=False)
    if not tensors:
        return args, kwargs, False, next_sequence_number()
    results = _AfterBackward.apply(visit, *tensors.values())
    if not isinstance(results, tuple):
        results = (results,)
    marked = dict(zip(tensors, results, strict=True))

    def exchange(value: Any) -> Any:
        return map_tensors(lambda t: marked.get(id(t), t), value, mutable=False)

    args = tuple(exchange(value) for value in args)
    kwargs = {key: exchange(value) for key, value in kwargs.items()}
    return args, kwargs, True, sequence_number(results[0])


def _mark_input(visit: Visit, tensor: torch.Tensor) -> tuple[Any, Any, bool, int]:
    """:func:`mark_inputs` of a call whose only input is a plain tensor: a node of torch takes less time than ours."""
    if not tensor.requires_grad:
        return (tensor,), {}, False, next_sequence_number()
    marked = tensor[...]  # an alias, unlike a view it has no operation in backward
    node: Any = marked.grad_fn
    node.register_hook(visit.after_backward)  # after the hooks of an output, which may be this input
    return (marked,), {}, True, node._sequence_nr()


def mark_outputs(visit: Visit, output: Any, entry: int) -> bool:
    """Let ``visit`` hear when backward reaches any of these outputs. False if none of them has a graph.

    ``entry`` is the number that :func:`mark_inputs` returned.
    """
    nodes: list[Any] = []

    def find(tensor: torch.Tensor) -> torch.Tensor:
        # Tensors from before this call, such as inputs that it returns, are not marked.
        if tensor.grad_fn is not None and sequence_number(tensor) >= entry:
            nodes.append(tensor.grad_fn)
            # An in-place operation on a view makes a new node and loses the view's hooks, but not those of its base.
            base = tensor._base if is_view(tensor) else None
            if base is not None and base.grad_fn is not None and sequence_number(base) >= entry:
                nodes.append(base.grad_fn)
        return tensor

    if type(output) is torch.Tensor:
        find(output)
    else:
        map_tensors(find, output)
        for tensor in hidden_tensors(output):
            find(tensor)
    for node in nodes:
        node.register_prehook(visit.before_backward)
        visit.marked.add(node._sequence_nr())
    return bool(nodes)


def opaque_objects(tree: Any) -> Iterator[Any]:
    """Objects of other classes in an output, which may hold tensors."""
    if isinstance(tree, (tuple, list)):
        for item in tree:
            yield from opaque_objects(item)
    elif isinstance(tree, Mapping):
        yield from opaque_objects(list(tree.values()))
        if hasattr(tree, "__dict__"):
            yield from opaque_objects(list(vars(tree).values()))
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        yield from opaque_objects([getattr(tree, field.name) for field in dataclasses.fields(tree)])
    elif not isinstance(tree, _PLAIN):
        yield tree


#: Classes that contain no tensor of a graph, or that refer to objects outside the output.
_PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes, range, slice, type),
    *(torch.Tensor, torch.dtype, torch.device, torch.Size, torch.layout, torch.Generator),
    *(nn.Module, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, weakref.ref, enum.Enum),
)
_DEPTH = 8  #: depth of the search for hidden tensors


def hidden_tensors(output: Any) -> Iterator[torch.Tensor]:
    """Tensors in attributes of objects of other classes, such as a cache of keys and values, at any depth."""
    if type(output) is torch.Tensor:
        return
    seen: set[int] = set()
    try:
        todo = [(item, 0) for item in opaque_objects(output)]
    except RecursionError:
        refuse_cycle(output)
        raise
    while todo:
        item, depth = todo.pop()
        if id(item) in seen or depth > _DEPTH:
            continue
        seen.add(id(item))
        for value in _inside(item):
            if isinstance(value, torch.Tensor):
                yield value
            elif not isinstance(value, _PLAIN):
                todo.append((value, depth + 1))


def _inside(item: Any) -> Iterator[Any]:
    if isinstance(item, Mapping):
        yield from item.values()
    elif isinstance(item, (tuple, list, set, frozenset, deque)):
        yield from item
    yield from getattr(item, "__dict__", {}).values()
    for cls in type(item).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(item, name):
                yield getattr(item, name)


class StashedTensors:
    """Tensors that modules keep in attributes. They may be views of weights, whose memory ends with the call.

    Attributes:
        looks: in so many further calls the engine looks for such views. Programs that keep them do so from the first.
    """

    def __init__(self, modules: list[nn.Module]) -> None:
        self.looks = 3
        self._modules = [weakref.ref(m) for m in modules]
        self._sizes: list[int] = []  #: numbers of the modules' attributes when :attr:`_names` was made
        self._names: list[tuple[weakref.ref[nn.Module], list[str]]] = []  #: attributes that may have tensors
        self._buffers: list[dict[str, torch.Tensor | None]] = []

    def find(self) -> list[torch.Tensor]:
        """All such tensors."""
        tensors: list[torch.Tensor] = []
        sizes = [len(module.__dict__) for ref in self._modules if (module := ref()) is not None]
        if sizes != self._sizes:
            self._look(sizes)
        for ref, names in self._names:
            module = ref()
            for name in names if module is not None else ():
                value: Any = module.__dict__.get(name)
                kind = type(value)
                if kind in _NO_CONTAINER:
                    continue
                if kind is torch.Tensor:
                    tensors.append(value)
                elif isinstance(value, (list, tuple, dict, deque)) and 0 < len(value) <= _LONGEST:
                    if kind is tuple and type(value[0]) in _NO_CONTAINER:
                        continue  # a shape or the like
                    tensors.extend(hidden_tensors([_Opaque(value)]))
        if any(self._buffers):
            tensors.extend(t for buffers in self._buffers for t in buffers.values() if t is not None)
        return tensors

    def _look(self, sizes: list[int]) -> None:
        """Find the attributes that may have tensors, because modules have got other attributes."""
        self._names, self._buffers = [], []
        for ref in self._modules:
            module = ref()
            if module is not None:
                constants = getattr(type(module), "__constants__", ())  # such as in_features
                settings = _OF_EVERY_MODULE.union((constants,) if isinstance(constants, str) else constants)
                if names := [name for name in module.__dict__ if name not in settings]:
                    self._names.append((ref, names))
                self._buffers.append(module._buffers)
        self._sizes = sizes


class _Opaque:
    """Makes a container opaque, so that the search looks into it at any depth."""

    def __init__(self, content: Any) -> None:
        self.content = content


#: Frequent classes of modules' attributes. They are compared first, since isinstance takes longer.
_NO_CONTAINER = frozenset({int, float, bool, str, type(None), torch.Size, torch.dtype, torch.device})
_LONGEST = 1000  #: longer containers are tables, not losses; a search in each forward would be slow
_OF_EVERY_MODULE = frozenset(nn.Module().__dict__) | {"_shardwright_unit", *SHARDED_MARKS}
