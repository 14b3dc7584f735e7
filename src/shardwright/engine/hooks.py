"""How the engine listens to a model: tensors found in inputs and outputs, and marks in the autograd graph.

What happens when a hook fires is the unit's business. Graph hooks hold their visit strongly, so a graph that outlives
its model still finds its weights; nothing here refers to a module.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch

TensorMap = Callable[[torch.Tensor], torch.Tensor]


def map_tensors(function: TensorMap, tree: Any) -> Any:
    """``tree`` with ``function`` applied to every tensor in tuples, named tuples, lists, dicts and dataclasses.

    Returns the same object where nothing changed, so a caller's containers keep their identity.
    """
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, (tuple, list)):
        items = [map_tensors(function, item) for item in tree]
        if all(new is old for new, old in zip(items, tree, strict=True)):
            return tree
        if isinstance(tree, tuple) and hasattr(tree, "_fields"):
            return type(tree)(*items)
        return type(tree)(items)
    if isinstance(tree, Mapping):
        changed = {key: map_tensors(function, value) for key, value in tree.items()}
        if all(changed[key] is tree[key] for key in tree):
            return tree
        copy = dict(tree) if type(tree) is dict else _copy_mapping(tree)
        for key, value in changed.items():
            copy[key] = value
        return copy
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        fields = {f.name: getattr(tree, f.name) for f in dataclasses.fields(tree) if f.init}
        changed = {name: map_tensors(function, value) for name, value in fields.items()}
        if all(changed[name] is fields[name] for name in fields):
            return tree
        return dataclasses.replace(tree, **changed)
    return tree


def _copy_mapping(tree: Mapping[Any, Any]) -> Any:
    copy = getattr(tree, "copy", None)
    return copy() if copy is not None else dict(tree)


class Visit(Protocol):
    """One unit's part in one root call."""

    def before_backward(self) -> None: ...

    def after_backward(self) -> None: ...


class _AfterBackward(torch.autograd.Function):
    """The identity on a unit's inputs; its backward runs when the unit's own backward has produced their gradients."""

    @staticmethod
    def forward(ctx: Any, visit: Visit, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.visit = visit
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ctx.visit.after_backward()
        return (None, *gradients)


def mark_inputs(visit: Visit, args: Any, kwargs: Any) -> tuple[Any, Any, bool]:
    """Let ``visit`` hear when the gradients of these inputs are there. False if no input needs a gradient."""
    if len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor):
        if not args[0].requires_grad:
            return args, kwargs, False
        return _AfterBackward.apply(visit, args[0]), kwargs, True
    found: list[torch.Tensor] = []

    def find(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad:
            found.append(tensor)
        return tensor

    map_tensors(find, (args, kwargs))
    if not found:
        return args, kwargs, False
    marked = iter(_AfterBackward.apply(visit, *found))
    args, kwargs = map_tensors(lambda t: next(marked) if t.requires_grad else t, (args, kwargs))
    return args, kwargs, True


def mark_outputs(visit: Visit, output: Any) -> bool:
    """Let ``visit`` hear when backward reaches any of these outputs. False if none of them has a graph."""
    nodes: list[Any] = []

    def find(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.grad_fn is not None:
            nodes.append(tensor.grad_fn)
            # An in-place operation on a view rebuilds the view's node and drops hooks on it, not those on its base.
            if tensor._is_view() and tensor._base is not None and tensor._base.grad_fn is not None:
                nodes.append(tensor._base.grad_fn)
        return tensor

    map_tensors(find, output)
    for item in opaque_objects(output):
        map_tensors(find, vars(item))

    def before(gradients: Any) -> None:
        visit.before_backward()

    for node in nodes:
        node.register_prehook(before)
    return bool(nodes)


def opaque_objects(tree: Any) -> Iterator[Any]:
    """Objects of other classes in an output, which may hold tensors in their attributes."""
    if isinstance(tree, (tuple, list)):
        for item in tree:
            yield from opaque_objects(item)
    elif isinstance(tree, Mapping):
        yield from opaque_objects(list(tree.values()))
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        yield from opaque_objects([getattr(tree, field.name) for field in dataclasses.fields(tree)])
    elif not isinstance(tree, torch.Tensor) and hasattr(tree, "__dict__"):
        yield tree


def refuse_opaque(output: Any, where: str) -> None:
    """Raise if ``output``, in which no graph was found, may hide one in an object that cannot be looked into."""
    for item in opaque_objects(output):
        raise TypeError(
            f"The output of {where} must be tensors, in tuples, lists, dicts or dataclasses, so that backward can "
            f"be followed; found a {type(item).__name__}. Return its tensors, or make it a dataclass."
        )
