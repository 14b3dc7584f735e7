"""Tensors and their subclasses: how one is made, takes the place of another object, and computes on many at once.

Also here are torch's functions for nested containers of tensors, the hooks and buffers of modules, and a watch over
reads of values. DTensors are in ``dtensor.py``, the memory beneath tensors in ``storages.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import MemberDescriptorType
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _python_dispatch
from torch.utils._pytree import (
    tree_flatten as tree_flatten,
    tree_leaves as tree_leaves,
    tree_map as tree_map,
    tree_map_only as tree_map_only,
    tree_unflatten as tree_unflatten,
)

from shardwright.engine.compat.dtensor import subclasses_dispatch
from shardwright.engine.compat.probe import probe

#: ``chunk_cat(tensors, dim, num_chunks, out=)``: pads, cuts, casts and packs rank-major in one pass.
chunk_cat: Callable[..., torch.Tensor] = probe(torch, "_chunk_cat")

#: Whether a tensor's class has ``__tensor_flatten__``: it is made of other tensors.
is_made_of_tensors: Callable[[torch.Tensor], bool] = probe(_python_dispatch, "is_traceable_wrapper_subclass")

foreach_copy_ = probe(torch, "_foreach_copy_")
foreach_mul_ = probe(torch, "_foreach_mul_")
foreach_norm = probe(torch, "_foreach_norm")

#: The operation that sets several tensors to zero.
foreach_zero = probe(torch.ops.aten, "_foreach_zero_", "default")

_foreach_clamp_min_ = probe(torch, "_foreach_clamp_min_")
_foreach_clamp_max_ = probe(torch, "_foreach_clamp_max_")


def foreach_clamp_(tensors: list[torch.Tensor], most: float) -> None:
    """Clamp each tensor to [-most, most] in place."""
    _foreach_clamp_min_(tensors, -most)
    _foreach_clamp_max_(tensors, most)


#: The class of an operation with a schema, as graphs of torch.fx have them.
OpOverload: Any = probe(torch._ops, "OpOverload")


#: Name in ``torch.nn.init`` of the function that fills a tensor with truncated normal numbers
fill_truncated_normal = "_no_grad_trunc_normal_"
probe(torch.nn.init, fill_truncated_normal)

#: ``make_subclass(kind, tensor)``: the tensor's memory as an instance of a subclass.
make_subclass: Callable[..., Any] = probe(torch.Tensor, "_make_subclass")

#: ``make_wrapper(kind, shape, dtype=, device=, ...)``: an instance of a subclass, without memory of its own.
make_wrapper: Callable[..., Any] = probe(torch.Tensor, "_make_wrapper_subclass")


def tensor_without_memory(kind: type, meta: torch.Tensor, device: torch.device) -> Any:
    """Return a tensor of class ``kind`` over the storage of ``meta`` that reports ``device`` as its device.

    torch calls the class's ``__torch_dispatch__`` for every operation, also to ask for the device (``prim.device``).
    """
    return make_subclass(kind, meta, False, dispatch_device=True, device_for_backend_keys=device)


def generator_key(generator: torch.Generator) -> int:
    """Return a key of a generator. Operations get new Python objects for one generator, and all have the same key."""
    return generator._cdata  # type: ignore[attr-defined,no-any-return]


def set_data(tensor: torch.Tensor, new: torch.Tensor) -> None:
    """Do what ``tensor.data = new`` does to a plain tensor, whatever the class of ``tensor`` makes of it."""
    torch.Tensor.data.__set__(tensor, new)  # type: ignore[attr-defined]


#: Sets an object's class, even where its class gives another one as ``__class__`` (``tensors/same_object.py``).
set_class: Callable[[Any, type], None] = object.__dict__["__class__"].__set__
_exchange_tensors = getattr(torch._C, "_swap_tensor_impl", None)
_EMPTY = torch.empty(0, device="cpu")
#: Whether an object that is laid out as ``nn.Parameter`` can become a sharded tensor.
objects_become_sharded = subclasses_dispatch and _exchange_tensors is not None


def exchange(one: torch.Tensor, other: torch.Tensor) -> None:
    """Exchange tensor, class and attributes of two Python objects. References to the objects stay.

    Unlike with ``torch.utils.swap_tensors``, weak references and graphs may refer to them. A graph keeps the tensor,
    not the object. Both objects must have the same gradient hooks, which stay where they are.

    Raises:
        RuntimeError, TypeError: the objects are laid out differently, or C++ refers to a tensor weakly. Nothing has
            changed then.
    """
    if _exchange_tensors is None:
        raise RuntimeError(f"torch {torch.__version__} cannot exchange tensors")
    kinds = type(one), type(other)
    slots = [name for name in DTensor.__slots__ if all(_is_slot(kind, name) for kind in kinds)]
    set_class(one, kinds[1])
    try:
        set_class(other, kinds[0])
        _exchange_tensors(one, other)
    except BaseException:
        set_class(one, kinds[0])
        set_class(other, kinds[1])
        raise
    one.__dict__, other.__dict__ = other.__dict__, one.__dict__
    for name in slots:
        values = getattr(one, name), getattr(other, name)
        setattr(one, name, values[1])
        setattr(other, name, values[0])


def _is_slot(kind: type, name: str) -> bool:
    return isinstance(getattr(kind, name, None), MemberDescriptorType)


def moved_into(kind: type, source: Any) -> Any:
    """Return an object of class ``kind``, laid out as a plain tensor, that is the tensor ``source``.

    ``source`` is an empty tensor afterwards. Its slots are attributes of the result.
    """
    assert _exchange_tensors is not None
    made = make_subclass(torch.Tensor, _EMPTY)
    attributes = {**vars(source), **{name: getattr(source, name) for name in type(source).__slots__}}
    _exchange_tensors(made, source)
    made.__dict__.update(attributes)
    set_class(made, kind)
    return made


_HOOKS = (
    "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks", "_post_accumulate_grad_hooks",
)  # fmt: skip


def hook_count(model: torch.nn.Module) -> int:
    """Return the number of hooks on the modules and parameters of a model."""
    owners = (*model.modules(), *model.parameters())
    return sum(len(getattr(owner, name, None) or ()) for owner in owners for name in _HOOKS)


def is_persistent(module: torch.nn.Module, buffer: str) -> bool:
    """Return whether state dicts have this buffer of the module."""
    return buffer not in module._non_persistent_buffers_set


#: Whether a tensor is a view of another.
is_view: Callable[[torch.Tensor], bool] = probe(torch.Tensor, "_is_view")


@contextmanager
def watch_reads(on_read: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Call ``on_read`` inside the context with each tensor whose values torch reads without an operation.

    ``tolist`` and ``numpy`` read so, and ``tensor_split`` reads the tensor by whose values it divides another one.
    """
    with ExitStack() as stack:
        places: tuple[Any, ...] = (torch, torch.Tensor)
        for place in places:
            plain_split = place.tensor_split

            def split(tensor: Any, *args: Any, plain: Any = plain_split, **kwargs: Any) -> Any:
                for each in (*args, *kwargs.values()):
                    if isinstance(each, torch.Tensor):
                        on_read(each)
                return plain(tensor, *args, **kwargs)

            place.tensor_split = split
            stack.callback(setattr, place, "tensor_split", plain_split)
        for name in ("tolist", "numpy"):
            plain = getattr(torch.Tensor, name)

            def read(tensor: torch.Tensor, *args: Any, plain: Any = plain, **kwargs: Any) -> Any:
                on_read(tensor)
                return plain(tensor, *args, **kwargs)

            setattr(torch.Tensor, name, read)
            stack.callback(setattr, torch.Tensor, name, plain)
        yield
