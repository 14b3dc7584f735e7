"""Numbers of ragged tensors: sums, norms and others, and parameters without dimensions.

A rank that computes with a number reads it. From then on the result is the rank's own, and the gradient of the number
is averaged over the ranks (``averaging.py``).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from shardwright.engine.compat.modes import disabled_torch_function
from shardwright.engine.compat.tensors import make_subclass, tree_leaves, tree_map
from shardwright.engine.tensors.numbers.averaging import (
    agree_on_value,
    average,
    has_gradient,
    is_own,
    mark_own,
    note_recipe,
    only_sums,
    recipe_of,
)
from shardwright.engine.tensors.numbers.hooks import average_gradient
from shardwright.engine.tensors.ragged.spec import RaggedSpec

_aten = torch.ops.aten
_DETACHED = {_aten.detach.default, _aten.alias.default}
_LINEAR = {_aten.clone, _aten.neg, _aten.detach, _aten.alias}


class Number(torch.Tensor):
    """A number of ragged tensors that nobody has read yet. Operations on it have plain results."""

    __slots__ = ()
    _plain: torch.Tensor
    _spec: RaggedSpec  #: of a tensor whose number it is

    __torch_function__ = disabled_torch_function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not all(issubclass(kind, (Number, torch.nn.Parameter)) for kind in types):
            return NotImplemented
        if func in _DETACHED or func is _aten._local_scalar_dense.default:
            return func(plain_of(args[0]))
        numbers = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Number)]
        stays = is_sum_of_numbers(func, args, kwargs, Number)
        result = func(*tree_map(plain_of, args), **tree_map(plain_of, kwargs))
        if not stays and has_gradient(result):
            for number in numbers:
                read_number(number)
        if func._schema.is_mutable and isinstance(args[0], Number):
            if stays:
                note_recipe(func, args, kwargs, args[0])
            else:
                mark_own(args[0])
            return args[0]
        return as_number(result, func, args, kwargs, numbers[0]._spec) if stays else result

    # torch refuses these for subclasses.

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        return self._plain

    def tolist(self) -> Any:
        return self._plain.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        return self._plain.clone().requires_grad_(self.requires_grad).numpy(force=force)

    def __format__(self, form: str) -> str:
        return self._plain.__format__(form)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain.clone().requires_grad_(self.requires_grad).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise RuntimeError(
            "Only tensors that are leaves of the graph can be deep-copied; detach this number first."
        )


def as_number(result: torch.Tensor, func: Any, args: Any, kwargs: Any, spec: RaggedSpec) -> torch.Tensor:
    """Return the plain ``result`` of an operation on ragged tensors or numbers as a :class:`Number`."""
    number: Any = make_subclass(Number, result)
    number._plain, number._spec = result, spec
    note_recipe(func, args, kwargs, number)
    return number  # type: ignore[no-any-return]


def plain_of(value: Any) -> Any:
    """Return the plain tensor of a number, and any other value unchanged."""
    return value._plain if isinstance(value, Number) else value


def is_sum_of_numbers(func: Any, args: Any, kwargs: Any, kind: type[torch.Tensor]) -> bool:
    """Return whether an operation adds numbers of a class, none of which was computed by this rank alone."""
    own = any(is_own(t) for t in args[:2] if isinstance(t, kind))
    return not own and only_sums(func, args, kwargs, kind, _LINEAR)


def read_number(number: Any) -> None:
    """Average the gradient of a number, or of a parameter without dimensions, that a rank is about to read."""
    if not is_own(number):
        spec = number._spec if isinstance(number, Number) else number.spec
        average_gradient(number, functools.partial(_mean, spec, recipe_of(number)))


def _mean(spec: RaggedSpec, recipe: int, gradient: Any) -> Any:
    if hasattr(gradient, "spec"):
        return type(gradient)(average(gradient._local_tensor, spec.mesh, recipe), gradient.spec)
    return average(gradient, spec.mesh, recipe)


def agree_on_factors(tensors: Sequence[torch.Tensor], spec: RaggedSpec) -> None:
    """Raise if the ranks join parts of a ragged tensor with different numbers."""
    for t in tensors:
        if not t.dim() and (type(t) is torch.Tensor or is_own(t)):
            plain = getattr(t, "_local_tensor", plain_of(t))
            agree_on_value(plain, spec.mesh)
