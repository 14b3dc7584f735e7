"""Sharded parameters without values: the allowed in-place operations, and the operations that give values.

An operation that writes every element gives values. An operation that reads missing values, or writes only some
elements, raises an error before it runs. This file does not know the units of parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch

from shardwright.engine.compat.dtensor import local_of
from shardwright.engine.compat.storages import storage_key
from shardwright.engine.compat.tensors import tree_leaves

_aten = torch.ops.aten
#: They write every element of their first argument and read none of it.
FILLING = {
    _aten.normal_, _aten.uniform_, _aten.zero_, _aten.fill_, _aten.copy_, _aten.random_, _aten.exponential_,
    _aten.cauchy_, _aten.log_normal_, _aten.geometric_, _aten.bernoulli_,
}  # fmt: skip
_FILLING_MANY = {_aten._foreach_zero_, _aten._foreach_copy_}
_MARK = "_shardwright_unset"  #: on the local tensor of a parameter without values
_marks: weakref.WeakSet[Unset] = weakref.WeakSet()


class Unset:
    """The mark of a parameter without values.

    Attributes:
        name: for messages.
        numel: of the whole parameter.
        in_parts: whether views of it were filled, so that some of its elements may have values.
        version: the version of the local tensor at the mark.
    """

    __slots__ = ("__weakref__", "in_parts", "name", "numel", "version")

    def __init__(self, name: str, numel: int) -> None:
        self.name = name
        self.numel = numel
        self.in_parts = False
        self.version = 0
        _marks.add(self)


def mark(local: torch.Tensor, unset: Unset) -> None:
    """Mark ``local`` as the local tensor of a parameter without values."""
    unset.version = local._version
    local.__dict__[_MARK] = unset


@torch.no_grad()
def blank(local: torch.Tensor) -> None:
    """Fill a local tensor without values with NaN or the like, so that later values can be recognised."""
    if not local.is_meta and local.dtype != torch.bool:
        local.fill_(_blank_of(local.dtype))


def _blank_of(dtype: torch.dtype) -> float | int:
    return torch.nan if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).min + 90


def mark_of(local: torch.Tensor) -> Unset | None:
    return local.__dict__.get(_MARK)  # type: ignore[no-any-return]


def unmark(local: torch.Tensor) -> None:
    """Remove the mark, because the parameter has values now."""
    local.__dict__.pop(_MARK, None)


def carry_mark(old: torch.Tensor, new: torch.Tensor) -> None:
    """Move the mark of the local tensor ``old``, if it has one, to ``new``, which replaces it."""
    if (unset := mark_of(old)) is not None:
        mark(new, unset)


def has_values(local: torch.Tensor) -> bool | None:
    """Return whether a marked local tensor has got values since :func:`blank` filled it. None: this cannot be seen.

    Collectives into a local tensor increase no version counter, so this looks at the elements. Elements that were only
    edited, as by ``mul_``, are still NaN.
    """
    if local.is_meta or not local.numel() or local.dtype == torch.bool:
        return None
    if not (local.is_floating_point() or local.is_complex()):
        return True if local.ne(_blank_of(local.dtype)).any().item() else None
    unset = mark_of(local)
    if unset is not None and unset.in_parts:
        return not local.isnan().any().item()
    # Mostly the first element is enough.
    return not (local[(0,) * local.ndim].isnan().item() and local.isnan().all().item())


def _received_values(local: torch.Tensor, unset: Unset) -> bool:
    """Return whether a marked local tensor got values without its parameter, as through ``to_local()``."""
    filled = has_values(local)
    return local._version != unset.version if filled is None else filled


def begin_edit(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the local tensors that get values from an operation in place, or with ``out=``, on sharded tensors.

    Must be called before the operation.

    Raises:
        RuntimeError: it reads a parameter without values, or changes only some of its elements.
    """
    if not _marks or torch.Tag.inplace_view in func.tags:
        return []
    filled: list[torch.Tensor] = []
    packet, schema = func.overloadpacket, func._schema.arguments
    for position, argument in enumerate(schema):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        fills = is_written and (argument.is_out or packet in FILLING or packet in _FILLING_MANY)
        for tensor, local, unset in _marked(value):
            if not fills:
                if _received_values(local, unset):
                    unmark(local)
                    continue
                raise RuntimeError(
                    f"{packet.__name__} {'changes' if is_written else 'reads'} {unset.name}, which holds no values "
                    "yet, since it was sharded deferred or on the meta device. Call shardwright.materialize(model) "
                    "or load_pretrained first, or overwrite all of it (zero_, copy_, normal_)."
                )
            if storage_key(local_of(tensor)) != storage_key(local):
                continue  # a view that is a copy
            if tensor.numel() == unset.numel:
                filled.append(local)
            else:
                unset.in_parts = True
    return filled


def _marked(value: Any) -> Iterator[tuple[Any, torch.Tensor, Unset]]:
    for tensor in tree_leaves(value):
        if isinstance(tensor, torch.Tensor) and hasattr(tensor, "to_local"):
            local: torch.Tensor = tensor.__dict__.get(
                "_edited", local_of(tensor)
            )  # of the parameter, for its views
            unset = mark_of(local)
            if unset is not None:
                yield tensor, local, unset
