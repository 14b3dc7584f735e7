"""Key maps from transformers' own conversions between stored tensors and its models.

transformers renames weights, stores experts one by one and fuses projections. It has a list of such conversions for
each model. This file runs them on stand-ins for stored tensors. The result shows which parts of which tensors a rank
needs. This file does not import transformers: if the model has one of its classes, it is already imported.
"""

from __future__ import annotations

import copy
import importlib
import math
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwright.checkpoint.pretrained.files import FileTensor
from shardwright.checkpoint.pretrained.key_maps import (
    Joined,
    Slice,
    Stacked,
    TensorSource,
    Transposed,
    keys_of,
    views_of,
)
from shardwright.engine import FSDPModule, original_class


def transformers_key_map(
    model: nn.Module, names: Iterable[str], stored: Mapping[str, FileTensor]
) -> dict[str, TensorSource] | None:
    """Return the stored places of the tensors of these names, if the model is one of transformers (5 or later); else
    None.

    Raises:
        ValueError: a conversion that cannot be done part by part.
    """
    if not _is_of_transformers(model):
        return None
    try:
        conversion_mapping: Any = importlib.import_module("transformers.conversion_mapping")
        loading: Any = importlib.import_module("transformers.core_model_loading")
        transforms = conversion_mapping.get_model_conversion_mapping(_as_made(model))
    except (ImportError, AttributeError):  # transformers before version 5 stores tensors without conversions
        return None
    return _follow(loading, transforms, model, dict.fromkeys(names, True), stored)


def stored_key_map(model: nn.Module, shapes: Mapping[str, torch.Size]) -> dict[str, TensorSource] | None:
    """Return where transformers (5 or later) stores each tensor of one of its models; None for other models.

    :func:`transformers_key_map` finds the same for files that are there. A save has no files yet, so this function
    converts the model's shapes into the stored form first.

    Args:
        shapes: names and shapes of all tensors to store, tied ones under one name.

    Raises:
        ValueError: transformers computes values when it stores the model, so its stored tensors are no views.
    """
    if not _is_of_transformers(model):
        return None
    known = _stored_places.get(model)
    if known is not None and known[0] == shapes:
        return known[1]
    try:
        revert: Any = importlib.import_module("transformers.core_model_loading").revert_weight_conversion
    except (ImportError, AttributeError):  # transformers before version 5 stores tensors without conversions
        return None
    on_meta = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    try:
        reverted: dict[str, torch.Tensor] = revert(_as_made(model), on_meta)
        stored = {
            key: FileTensor(key, Path(), number, tensor.shape, tensor.dtype, tensor.detach)
            for number, (key, tensor) in enumerate(reverted.items())
        }
        places = transformers_key_map(model, shapes, stored) or {}
        places = {name: places.get(name, name) for name in shapes}
        forms = {
            name: views_of(source, lambda key: stored[key].on_meta())[0] for name, source in places.items()
        }
        if forms != dict(shapes) or {key for each in places.values() for key in keys_of(each)} != set(stored):
            raise ValueError("it changes tensors when it stores them")
    except Exception as error:
        raise ValueError(
            f"The stored form of {type(model).__name__} cannot be derived from transformers' conversions: {error}. "
            "Pass a key_map; key_map={} keeps the model's own names."
        ) from error
    _stored_places[model] = dict(shapes), places
    return places


#: Shapes and places of models that were stored before.
_stored_places: weakref.WeakKeyDictionary[
    nn.Module, tuple[dict[str, torch.Size], dict[str, TensorSource]]
] = weakref.WeakKeyDictionary()


def names_not_stored(model: nn.Module) -> frozenset[str]:
    """Return the tensors that transformers does not save for this model, because its constructor computes them."""
    if not _is_of_transformers(model):
        return frozenset()
    return frozenset(model._keys_to_ignore_on_save or ())  # type: ignore[arg-type]


def _is_of_transformers(model: nn.Module) -> bool:
    modeling = sys.modules.get("transformers.modeling_utils")
    return modeling is not None and isinstance(model, modeling.PreTrainedModel)


def _as_made(model: Any) -> Any:
    """Return a copy of a model in which modules have their original classes, whose names conversions use."""

    def plain(module: nn.Module) -> nn.Module:
        if not isinstance(module, FSDPModule):
            return module
        shell: nn.Module = object.__new__(original_class(type(module)))
        shell.__dict__.update(module.__dict__)
        return shell

    modules = [(name, plain(module)) for name, module in model.named_modules()]
    top = copy.copy(modules[0][1]) if modules[0][1] is model else modules[0][1]
    modules[0] = ("", top)
    top.__dict__["named_modules"] = lambda: iter(modules)
    return top


def _follow(
    loading: Any,
    transforms: list[Any],
    model: Any,
    names: dict[str, bool],
    stored: Mapping[str, FileTensor],
) -> dict[str, TensorSource]:
    """Process the stored tensors as ``transformers.core_model_loading.convert_and_load_state_dict_in_model`` does."""
    renamings = [t for t in transforms if isinstance(t, loading.WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, loading.WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    sources: dict[str, TensorSource] = {}
    collected: dict[str, Any] = {}
    prefix = model.base_model_prefix
    for key in sorted(stored, key=loading.dot_natural_key):
        name, pattern = loading.rename_source_key(key, renamings, converters, prefix, names)
        if name not in names and key in names:
            name, pattern = loading.rename_source_key(
                key, [], [], base_model_prefix=prefix, meta_state_dict=names
            )
        if name not in names:
            continue
        if pattern is None:
            sources.setdefault(name, key)
        else:
            converter = collected.setdefault(name, copy.deepcopy(by_pattern[pattern]))
            converter.add_tensor(name, key, pattern, _ShapeAndSource(key, stored[key].shape))
    for name, converter in collected.items():
        try:
            converted = converter.convert(name, model=model, config=model.config)
        except Exception as error:
            operations = ", ".join(type(o).__name__ for o in converter.operations)
            raise ValueError(
                f"transformers converts {sorted(converter.layer_targets[name])} to {name!r} by {operations}, which "
                f"failed: {error} Load the model with transformers' from_pretrained before it is sharded, or pass a "
                "key_map."
            ) from error
        for target, form in converted.items():
            form = form[0] if isinstance(form, list) else form
            sources.setdefault(target, form.source)
    return sources


class _ShapeAndSource:
    """A stand-in for a stored tensor, or for a tensor made of several: its shape and its source."""

    def __init__(self, source: TensorSource, shape: Iterable[int]) -> None:
        self.source = source
        self.shape = torch.Size(shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dim(self) -> int:
        return len(self.shape)

    def size(self, dim: int) -> int:
        return self.shape[dim]

    def contiguous(self) -> _ShapeAndSource:
        return self

    def permute(self, *dims: Any) -> _ShapeAndSource:
        order = tuple(d % self.ndim for d in (dims[0] if isinstance(dims[0], (tuple, list)) else dims))
        return _ShapeAndSource(Transposed(self.source, order), [self.shape[d] for d in order])

    def transpose(self, dim0: int, dim1: int) -> _ShapeAndSource:
        order = list(range(self.ndim))
        order[dim0], order[dim1] = order[dim1], order[dim0]
        return self.permute(order)

    def reshape(self, *shape: Any) -> _ShapeAndSource:
        raise NotImplementedError("reshape cannot be read in parts.")

    view = reshape

    def split(self, sizes: int | list[int], dim: int = 0) -> tuple[_ShapeAndSource, ...]:
        whole = self.shape[dim]
        dim %= self.ndim
        if isinstance(sizes, int):
            sizes = [min(sizes, whole - start) for start in range(0, whole, sizes)]
        if not isinstance(self.source, str):
            raise NotImplementedError("It cuts a tensor that it has made from several stored tensors.")
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        return tuple(
            _ShapeAndSource(Slice(self.source, start, n, dim), (*self.shape[:dim], n, *self.shape[dim + 1 :]))
            for start, n in zip(starts, sizes, strict=True)
        )

    def chunk(self, chunks: int, dim: int = 0) -> tuple[_ShapeAndSource, ...]:
        return self.split(math.ceil(self.shape[dim] / chunks), dim)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.stack:
            return _stack(*args, **kwargs)
        if func in (torch.cat, torch.concat):
            return _join(*args, **kwargs)
        if func in (torch.transpose, torch.permute, torch.split, torch.chunk):
            return getattr(args[0], func.__name__)(*args[1:], **kwargs)
        raise NotImplementedError(f"{getattr(func, '__name__', func)} cannot be read in parts.")


def _stack(forms: list[_ShapeAndSource], dim: int = 0) -> _ShapeAndSource:
    stacked = _ShapeAndSource(Stacked(tuple(f.source for f in forms)), (len(forms), *forms[0].shape))
    dim %= stacked.ndim
    return stacked if dim == 0 else stacked.permute([*range(1, dim + 1), 0, *range(dim + 1, stacked.ndim)])


def _join(forms: list[_ShapeAndSource], dim: int = 0) -> _ShapeAndSource:
    if len(forms) == 1:
        return forms[0]
    dim %= forms[0].ndim
    sizes = tuple(f.shape[dim] for f in forms)
    shape = (*forms[0].shape[:dim], sum(sizes), *forms[0].shape[dim + 1 :])
    return _ShapeAndSource(Joined(tuple(f.source for f in forms), dim, sizes), shape)
