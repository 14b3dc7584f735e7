"""Key maps: the places of a model's tensors in files with other names and forms, and key maps from a user's rules.

A model's tensor may be a stored tensor under another name, a transposed one, a slice of a fused one, or several stacked
or joined ones. All forms are views, so a reader knows which bytes a part needs. This file knows no files and models.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from shardwright.checkpoint.format.boxes import Box


@dataclass(frozen=True)
class Transposed:
    """The source with its dimensions in another order, as ``Tensor.permute`` takes it: ``dims[i]`` becomes the i-th."""

    source: TensorSource
    dims: tuple[int, ...] = (1, 0)

    def __post_init__(self) -> None:
        if sorted(self.dims) != list(range(len(self.dims))):
            raise ValueError(f"Transposed needs every dimension once, got {self.dims}")


@dataclass(frozen=True)
class Slice:
    """``length`` entries along ``dim`` of a stored tensor, from ``start``: one of several that were fused into it."""

    source: str
    start: int
    length: int
    dim: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.source, str) or self.start < 0 or self.length < 1 or self.dim < 0:
            raise ValueError(
                "Slice needs the key of a stored tensor, start >= 0, length >= 1 and dim >= 0, got "
                f"{self.source!r}, {self.start}, {self.length}, {self.dim}"
            )


@dataclass(frozen=True)
class Stacked:
    """Sources of one shape along a new first dimension, as ``torch.stack`` makes it: say one for each expert."""

    sources: tuple[TensorSource, ...]

    def __post_init__(self) -> None:
        if not self.sources:
            raise ValueError("Stacked needs at least one source")


@dataclass(frozen=True)
class Joined:
    """Sources one after the other along ``dim``, as ``torch.cat`` makes it. Without ``sizes`` all are equally long."""

    sources: tuple[TensorSource, ...]
    dim: int = 0
    sizes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not self.sources or self.dim < 0 or (self.sizes and len(self.sizes) != len(self.sources)):
            raise ValueError(
                "Joined needs at least one source, dim >= 0 and as many sizes as sources, got "
                f"{len(self.sources)}, {self.dim}, {self.sizes}"
            )


TensorSource: TypeAlias = "str | Transposed | Slice | Stacked | Joined"
#: from a name in the model to the stored place of the tensor, or to None if it is not stored. A mapping may leave out
#: tensors that are stored under their own names.
KeyMap: TypeAlias = "Mapping[str, TensorSource | None] | Callable[[str], TensorSource | None]"


def source_of(key_map: KeyMap | None, name: str) -> TensorSource | None:
    """Return the stored place of the model's tensor ``name``."""
    if key_map is None:
        return name
    source = key_map.get(name, name) if isinstance(key_map, Mapping) else key_map(name)
    if source is not None and not isinstance(source, (str, Transposed, Slice, Stacked, Joined)):
        raise TypeError(
            f"The key map gave {source!r} ({type(source).__name__}) for {name!r}; expected a key, Transposed, Slice, "
            "Stacked, Joined or None."
        )
    return source


def keys_of(source: TensorSource) -> list[str]:
    """Return the keys of all stored tensors in the source."""
    if isinstance(source, str):
        return [source]
    if isinstance(source, (Transposed, Slice)):
        return keys_of(source.source)
    return [key for each in source.sources for key in keys_of(each)]


def views_of(source: TensorSource, get: Callable[[str], Tensor]) -> tuple[torch.Size, list[Box]]:
    """Return the shape of a source, and its boxes as views of stored tensors. ``get`` returns these, or meta tensors.

    Raises:
        ValueError: the stored tensors cannot be combined in this way.
    """
    if isinstance(source, str):
        stored = get(source)
        return stored.shape, [Box((0,) * stored.ndim, stored)]
    if isinstance(source, Slice):
        stored = get(source.source)
        size = stored.shape[source.dim] if source.dim < stored.ndim else 0
        if source.start + source.length > size:
            raise ValueError(
                f"{source.source!r} of shape {tuple(stored.shape)} has no entries {source.start} to "
                f"{source.start + source.length} along dimension {source.dim}"
            )
        view = stored.narrow(source.dim, source.start, source.length)
        return view.shape, [Box((0,) * view.ndim, view)]
    if isinstance(source, Transposed):
        shape, views = views_of(source.source, get)
        if len(shape) != len(source.dims):
            raise ValueError(
                f"{keys_of(source)[0]!r} of shape {tuple(shape)} cannot be permuted {source.dims}"
            )
        permuted = [Box(tuple(o[d] for d in source.dims), t.permute(source.dims)) for o, t in views]
        return torch.Size(shape[d] for d in source.dims), permuted
    shaped = [views_of(each, get) for each in source.sources]
    shapes = [shape for shape, _ in shaped]
    if isinstance(source, Stacked):
        if len(set(shapes)) > 1:
            raise ValueError(f"{_source_in_words(source)} are stacked and have shapes {_unlike(shapes)}")
        stacked = [Box((i, *o), t.unsqueeze(0)) for i, (_, views) in enumerate(shaped) for o, t in views]
        return torch.Size([len(shaped), *shapes[0]]), stacked
    dim = source.dim
    if any(
        len(s) <= dim or (*s[:dim], *s[dim + 1 :]) != (*shapes[0][:dim], *shapes[0][dim + 1 :])
        for s in shapes
    ):
        raise ValueError(
            f"{_source_in_words(source)} are joined along dimension {dim} and have shapes {_unlike(shapes)}"
        )
    sizes = source.sizes or (shapes[0][dim],) * len(shaped)
    if tuple(s[dim] for s in shapes) != tuple(sizes):
        raise ValueError(
            f"{_source_in_words(source)} are joined in sizes {sizes} along {dim} and have shapes {_unlike(shapes)}"
        )
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    joined = [
        Box((*o[:dim], start + o[dim], *o[dim + 1 :]), t)
        for start, (_, views) in zip(starts, shaped, strict=True)
        for o, t in views
    ]
    return torch.Size([*shapes[0][:dim], sum(sizes), *shapes[0][dim + 1 :]]), joined


def _source_in_words(source: Stacked | Joined) -> str:
    keys = keys_of(source)
    return f"{keys[0]!r} to {keys[-1]!r}" if len(keys) > 1 else repr(keys[0])


def _unlike(shapes: Sequence[Sequence[int]]) -> str:
    return " and ".join(str(s) for s in dict.fromkeys(tuple(shape) for shape in shapes))


class Piece(NamedTuple):
    """All or a slice of a stored tensor, which comes from a model's tensor.

    It is no :class:`Box`: pieces of one stored tensor must be slices along one dimension, or no load could read them.
    """

    key: str
    tensor: Tensor
    slice: Slice | None  #: of the stored one; None: it is the whole


def pieces_of(source: TensorSource, tensor: Tensor) -> Iterator[Piece]:
    """Yield the stored tensors, as views of the model's: the inverse of :func:`views_of`.

    Raises:
        ValueError: the tensor cannot be divided in this way.
    """
    if isinstance(source, str):
        yield Piece(source, tensor, None)
    elif isinstance(source, Slice):
        if tensor.ndim <= source.dim or tensor.shape[source.dim] != source.length:
            raise ValueError(f"a tensor of shape {tuple(tensor.shape)} is not a {source}")
        yield Piece(source.source, tensor, source)
    elif isinstance(source, Transposed):
        if tensor.ndim != len(source.dims):
            raise ValueError(f"a tensor of shape {tuple(tensor.shape)} cannot be permuted {source.dims}")
        inverse = [source.dims.index(d) for d in range(tensor.ndim)]
        yield from pieces_of(source.source, tensor.permute(inverse))
    elif isinstance(source, Stacked):
        if not tensor.ndim or len(tensor) != len(source.sources):
            raise ValueError(
                f"a tensor of shape {tuple(tensor.shape)} is not a stack of {len(source.sources)}"
            )
        for each, view in zip(source.sources, tensor, strict=True):
            yield from pieces_of(each, view)
    else:
        size = tensor.shape[source.dim] if source.dim < tensor.ndim else 0
        count = len(source.sources)
        sizes = source.sizes or (size // count,) * count
        if not size or sum(sizes) != size:
            raise ValueError(
                f"a tensor of shape {tuple(tensor.shape)} is not a join of {count} along {source.dim}"
            )
        for each, view in zip(source.sources, tensor.split(list(sizes), source.dim), strict=True):
            yield from pieces_of(each, view)


# -- key maps from rules -----------------------------------------------------------------------------------------------


class Rule(NamedTuple):
    """A name with stars, each of which stands for any text, and the new name with the same number of stars.

    An empty new name says that the tensor is not stored.
    """

    old: str
    new: str


def key_map_of(rules: Sequence[Rule], names: Sequence[str]) -> dict[str, str | None]:
    """Return the key map by the first rule that fits each name. Names that no rule fits stay.

    Raises:
        ValueError: a rule fits no name.
    """
    patterns = [re.compile("(.*?)".join(map(re.escape, rule.old.split("*")))) for rule in rules]
    key_map: dict[str, str | None] = {}
    used: set[int] = set()
    for name in names:
        for number, (rule, pattern) in enumerate(zip(rules, patterns, strict=True)):
            if match := pattern.fullmatch(name):
                used.add(number)
                pieces, texts = rule.new.split("*"), (*match.groups(), "")
                new = (
                    "".join(piece + text for piece, text in zip(pieces, texts, strict=True))
                    if rule.new
                    else None
                )
                key_map.setdefault(name, new)
                break
    for number, rule in enumerate(rules):
        if number not in used:
            raise ValueError(
                f"the rule {rule.old}={rule.new} fits no tensor, or rules before it fit all of them"
            )
    return key_map
