"""Lets the parameter objects that a module had before ``fully_shard`` become its sharded parameters.

Lists, optimizers, closures and sets of ``id``s that hold them then hold the sharded parameters. Python allows no object
to become one of a larger layout, and a DTensor has two slots more than a parameter. So this file makes classes without
the slots. It knows no units.
"""

from __future__ import annotations

import functools
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any, NamedTuple

import torch
from torch import nn

from shardwright.engine.compat.autograd import gradient_hooks, refuse_backward, share_gradient_hooks
from shardwright.engine.compat.modes import quick_attributes
from shardwright.engine.compat.tensors import (
    exchange,
    moved_into,
    objects_become_sharded,
    set_class,
    tree_leaves,
)

#: They belong to a class and its layout, not to what its objects do.
_OF_LAYOUT = {"__slots__", "__new__", "__module__", "__qualname__", "__doc__", "__annotations__"}
#: Attributes of an object without slots that are slots elsewhere.
BODY = frozenset({"_local_tensor", "_spec", "spec"})
_ACTS_AS = "_shardwright_acts_as"
#: Set on the class that a sharded parameter has while its unit holds gradients of micro-batches.
HOLDS = "_shardwright_holds"
#: Set on a parameter object that could not become the sharded one: a :class:`Taken`.
TAKEN = "_shardwright_taken_by"
#: Set on a tensor of which every use is refused: the message.
_REFUSAL = "_shardwright_refusal"
_became = 0  #: how many objects have become sharded parameters


class Taken(NamedTuple):
    """The sharded parameter that replaced a parameter, and a name for messages."""

    label: str
    sharded: nn.Parameter


_acting: list[Any] = []  #: the classes that :func:`acting_class` has made


def acting_classes() -> list[Any]:
    """Return the classes of all sharded parameters that were made by :func:`acting_class`."""
    return _acting


@functools.cache
def acting_class(face: type, base: type) -> type:
    """Return a subclass of ``base`` whose objects act as objects of ``face``, a class of sharded parameters.

    It has the methods of ``face``, and ``isinstance(object, face)`` is True, because Python also asks an object for its
    ``__class__``. Its objects are laid out as those of ``base``, with attributes in the place of slots.

    Raises:
        TypeError: ``base`` has a metaclass that does not allow it.
    """
    namespace: dict[str, Any] = {}
    for kind in reversed(face.__mro__[: face.__mro__.index(torch.Tensor)]):
        if kind is not nn.Parameter:
            namespace.update(
                (name, value)
                for name, value in vars(kind).items()
                if name not in _OF_LAYOUT
                and not isinstance(value, (MemberDescriptorType, GetSetDescriptorType))
            )
    namespace |= {"__class__": face, "__module__": face.__module__, "__doc__": face.__doc__, _ACTS_AS: face}
    made: Any = _metaclass(type(face), type(base))(face.__name__, (base,), namespace)
    # torch's stager of asynchronous checkpoints copies the attributes that are named there.
    made.__slots__ = face.__slots__  # type: ignore[attr-defined]
    _acting.append(made)
    return made  # type: ignore[no-any-return]


def _metaclass(one: type, other: type) -> type:
    if issubclass(one, other):
        return one
    return other if issubclass(other, one) else type(one.__name__, (one, other), {})


def acts(tensor: torch.Tensor) -> bool:
    """Return whether a sharded parameter has no slots."""
    return hasattr(type(tensor), _ACTS_AS)


def base_of(kind: type) -> type:
    """Return the user's class of a parameter: that of which the classes here are made, or ``nn.Parameter``.

    A class that computes each operation itself (``__torch_dispatch__``) describes tensors of other tensors. The sharded
    parameter is none of these: its local tensor is.
    """
    if hasattr(kind, HOLDS):
        kind = kind.__bases__[0]
    if hasattr(kind, _ACTS_AS):
        return kind.__bases__[0]
    plain = kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__  # type: ignore[attr-defined]
    return kind if plain and kind is not torch.Tensor else nn.Parameter


def full_class(face: type, base: type) -> type:
    """Return the class of a full parameter: ``face``, or a subclass of it and of the user's class ``base``."""
    if base is nn.Parameter or base.__basicsize__ != nn.Parameter.__basicsize__:
        return face
    return _full_class(face, base)


@functools.cache
def _full_class(face: type, base: type) -> type:
    try:
        return _metaclass(type(face), type(base))(face.__name__, (face, base), {"__slots__": ()})  # type: ignore[no-any-return]
    except TypeError:  # a class that forbids subclasses, for example
        return face


class Exchanged(NamedTuple):
    """A parameter object that has become a sharded one.

    Attributes:
        parameter: the object.
        before: another object, which is what ``parameter`` was.
        refusal: the handle of the hook that refuses a backward through graphs from before, if there can be any.
        hooks: the object's own gradient hooks, and what they contained.
    """

    parameter: nn.Parameter
    before: torch.Tensor
    refusal: Any
    hooks: tuple[Any, dict[int, Any] | None]

    def undo(self) -> None:
        if self.refusal is not None:
            self.refusal.remove()
        exchange(self.parameter, self.before)
        hooks, content = self.hooks
        if hooks is not None and content is not None:
            hooks.clear()
            hooks.update(content)
        self.parameter._backward_hooks = hooks


def keep_object(
    original: nn.Parameter, sharded: nn.Parameter, label: str, has_values: bool
) -> tuple[nn.Parameter, Exchanged | None]:
    """Let the object ``original`` be the tensor ``sharded``, and return it with a record that can undo this.

    If that is impossible, because of the layout of its class or an old version of torch, return another object that is
    ``sharded``, and None. Either way gradient hooks stay, and a backward through a graph from before raises an error.
    ``sharded`` itself must not be used afterwards.
    """
    hooks = gradient_hooks(original)
    content = None if hooks is None else hooks.copy()
    refusal = None
    if has_values:  # graphs over others compute nothing
        refusal = refuse_backward(
            original,
            f"Parameter {label} was sharded between a forward and its backward. The gradient of this backward would "
            "be lost, because it is that of the whole parameter, which no longer exists. Run the backward before "
            "fully_shard, or the forward after it.",
        )
    if objects_become_sharded and type(original).__basicsize__ == nn.Parameter.__basicsize__:
        base = base_of(type(original))
        try:
            kind = acting_class(type(sharded), base)
        except TypeError:
            kind = acting_class(type(sharded), nn.Parameter)
        sharded = moved_into(kind, sharded)
    share_gradient_hooks(original, sharded)
    if objects_become_sharded:
        try:
            exchange(original, sharded)
        except (TypeError, RuntimeError):
            return sharded, None
        global _became
        _became += 1
        return original, Exchanged(original, sharded, refusal, (hooks, content))
    return sharded, None


def count_of_objects() -> int:
    """Return how many parameter objects have become sharded ones. It tells whether an optimizer's may have."""
    return _became


# -- tensors of which every use is refused -----------------------------------------------------------------------------

_PROPERTIES = ("shape", "dtype", "device", "layout", "ndim", "is_leaf", "is_meta", "requires_grad")
#: The reads that such a tensor still answers, because they describe it and use no values.
_DESCRIBES = {
    *(getattr(torch.Tensor, name).__get__ for name in _PROPERTIES),
    torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.stride, torch.Tensor.__repr__,
    torch.Tensor.is_floating_point, torch.Tensor.is_complex, torch.is_floating_point, torch.is_complex,
}  # fmt: skip


def refuse_uses(old: torch.Tensor, message: str) -> None:
    """Let every use of ``old`` raise RuntimeError. Its memory and attributes stay."""
    old.__dict__[_REFUSAL] = message
    set_class(old, _refusing_class(type(old)))


def refuse_old_object(old: nn.Parameter, taken: Taken) -> None:
    """Let every use of ``old``, which could not become the sharded parameter, raise an error that names it."""
    old.__dict__[TAKEN] = taken
    why = f"its class {type(old).__name__} has another layout than nn.Parameter"
    if not objects_become_sharded:
        why = f"torch {torch.__version__} does not allow it"
    refuse_uses(
        old,
        f"Parameter {taken.label!r} was used through its old object, from before fully_shard. The object could not "
        f"become the sharded parameter, because {why}, so this use would have no effect on the model. Take the "
        "parameter from the model after fully_shard. For an optimizer, call "
        "shardwright.fully_shard_optimizer(optimizer) after fully_shard, or build it from model.parameters() then.",
    )


@functools.cache
def _refusing_class(kind: type) -> type:
    namespace = {"__slots__": (), "__torch_function__": classmethod(_refuse), "__module__": kind.__module__}
    return type(kind)(kind.__name__, (kind,), namespace)  # type: ignore[no-any-return]


def _refuse(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    if func in _DESCRIBES:
        with quick_attributes():
            return func(*args, **(kwargs or {}))
    for each in tree_leaves((args, kwargs)):
        if isinstance(each, torch.Tensor):
            refuse_if_old(each)
    raise AssertionError(f"{func} got no old object of a parameter")


def is_refused(tensor: torch.Tensor) -> bool:
    return _REFUSAL in tensor.__dict__


def refuse_if_old(tensor: torch.Tensor) -> None:
    """Raise if uses of this object are refused."""
    message = tensor.__dict__.get(_REFUSAL)
    if message is not None:
        raise RuntimeError(message)
