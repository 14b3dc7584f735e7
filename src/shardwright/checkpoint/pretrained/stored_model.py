"""A model as it is stored: which tensors of the model form each stored tensor, and its shape and dtype.

The plan needs only shapes. ``save_pretrained`` writes stored tensors to files and ``stream_weights`` hands them out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from shardwright.checkpoint.pretrained.conversions import stored_key_map
from shardwright.checkpoint.pretrained.files import abbreviated, dtype_name
from shardwright.checkpoint.pretrained.key_maps import KeyMap, Piece, pieces_of, source_of
from shardwright.checkpoint.pretrained.model import ModelTensor, tensors_of

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def bytes_of(size: int | str, argument: str) -> int:
    """Return a number of bytes from a number or a text such as "5 GB" or "512 MiB"; ``argument`` is its name.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(size, str):
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]i?B)", size.strip(), re.IGNORECASE)
        if match:
            return max(int(float(match[1]) * _UNITS[match[2].upper()]), 1)
    elif not isinstance(size, bool) and isinstance(size, int) and size > 0:
        return size
    raise ValueError(f'{argument} must be bytes, as a number or such as "5 GB" or "512 MiB", got {size!r}')


@dataclass
class StoredModel:
    """The stored tensors of a model.

    Attributes:
        key_map: the place of each of the model's tensors.
        dtype: the dtype of floating-point stored tensors; None: as the model has them.
        groups: tensors of the model that form the same stored tensors; mostly one.
        keys: shape and dtype by stored key.
        copies: further keys, and for each the key whose tensor is stored under it once more.
    """

    key_map: KeyMap | None
    dtype: torch.dtype | None
    groups: list[list[ModelTensor]] = field(default_factory=list)
    keys: dict[str, tuple[torch.Size, torch.dtype]] = field(default_factory=dict)
    copies: dict[str, str] = field(default_factory=dict)

    def add_copies(self, copies: Mapping[str, str]) -> None:
        """Store tensors under further keys, too, for readers that do not know which ones are tied."""
        self.copies |= copies
        self.keys |= {further: self.keys[key] for further, key in copies.items()}

    def pieces(self, entry: ModelTensor, tensor: Tensor) -> list[Piece]:
        """Return the pieces of stored tensors that come from this tensor of the model, as views of ``tensor``."""
        source = source_of(self.key_map, entry.name)
        return [] if source is None else list(pieces_of(source, tensor))

    def stored_dtype(self, tensor: Tensor) -> torch.dtype:
        return self.dtype if self.dtype is not None and tensor.dtype.is_floating_point else tensor.dtype

    def nbytes(self, key: str) -> int:
        shape, dtype = self.keys[key]
        return shape.numel() * dtype.itemsize

    @property
    def total_bytes(self) -> int:
        return sum(map(self.nbytes, self.keys))

    def main_dtype(self) -> str:
        """Return the dtype of most elements, as config.json names it."""
        sizes: dict[torch.dtype, int] = {}
        for shape, dtype in self.keys.values():
            sizes[dtype] = sizes.get(dtype, 0) + shape.numel()
        return str(max(sizes, key=sizes.__getitem__)).removeprefix("torch.")

    def keys_of(self, group: list[ModelTensor]) -> list[str]:
        """Return the keys of the stored tensors that a group forms."""
        shapes = ((entry, torch.empty(entry.tensor.shape, device="meta")) for entry in group)
        return list(
            dict.fromkeys(piece.key for entry, shape in shapes for piece in self.pieces(entry, shape))
        )

    def stored_tensors(
        self, group: list[ModelTensor], whole: Mapping[str, Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the stored tensors of a group, one after another, from its whole tensors by name.

        Views where no pieces must be joined. A floating-point tensor of another dtype than its stored form is
        converted.
        """
        pieces: dict[str, list[Piece]] = {}
        for entry in group:
            for piece in self.pieces(entry, whole[entry.name]):
                pieces.setdefault(piece.key, []).append(piece)
        for key, of_key in pieces.items():
            stored = _joined(of_key).to(self.keys[key][1])
            for name in (key, *(further for further, first in self.copies.items() if first == key)):
                yield name, stored


def _joined(pieces: list[Piece]) -> Tensor:
    pieces.sort(key=lambda piece: piece.slice.start if piece.slice is not None else 0)
    tensors = [piece.tensor for piece in pieces]
    dim = pieces[0].slice.dim if pieces[0].slice is not None else 0
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim)


def stored_model_of(
    model: nn.Module,
    key_map: KeyMap | None,
    dtype: torch.dtype | None,
    *,
    with_values: bool = True,
    keeps: Callable[[str], bool] = lambda name: True,
) -> StoredModel:
    """Return a model as it is stored. Without a key map, a transformers model has its stored names.

    Args:
        model: its parameters and persistent buffers are stored.
        key_map, dtype: as for ``save_pretrained``.
        with_values: whether a tensor without values is an error.
        keeps: says by name which tensors are stored.

    Raises:
        ValueError: as :func:`stored_model` and ``conversions.stored_key_map``.
    """
    tensors = [each for each in tensors_of(model) if keeps(each.name)]
    if key_map is None:
        key_map = stored_key_map(
            model, {each.name: each.tensor.shape for each in tensors if not each.optional}
        )
    return stored_model(tensors, key_map, dtype, with_values)


def stored_model(
    tensors: Sequence[ModelTensor],
    key_map: KeyMap | None,
    dtype: torch.dtype | None,
    with_values: bool = True,
) -> StoredModel:
    """Parameters and persistent buffers as they are stored. They may be without values unless ``with_values``.

    Raises:
        ValueError: a tensor holds no values or has a dtype without a name in safetensors, the key map does not fit,
            two tensors have one key, or ``dtype`` is no floating-point dtype.
    """
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"dtype must be a floating-point dtype, got {dtype}")
    tensors = [entry for entry in tensors if not entry.optional]
    empty = [entry.name for entry in tensors if with_values and not entry.has_values]
    if empty:
        raise ValueError(
            f"tensors hold no values yet, since they are deferred or on the meta device: {abbreviated(empty)}. Call "
            "shardwright.materialize, or load them."
        )
    stored = StoredModel(key_map, dtype)
    pieces: dict[str, list[tuple[ModelTensor, Piece]]] = {}
    for entry in tensors:
        shape_only = torch.empty(entry.tensor.shape, dtype=stored.stored_dtype(entry.tensor), device="meta")
        try:
            own = stored.pieces(entry, shape_only)
        except ValueError as error:
            raise ValueError(f"the key map does not fit {entry.name!r}: {error}") from None
        for piece in own:
            pieces.setdefault(piece.key, []).append((entry, piece))
        if own:
            _join(stored.groups, entry, [other for piece in own for other, _ in pieces[piece.key]])
    stored.keys = {key: _shape_of(key, of_key) for key, of_key in pieces.items()}
    for key, (_, stored_dtype) in stored.keys.items():
        dtype_name(stored_dtype, key)
    return stored


def _join(groups: list[list[ModelTensor]], entry: ModelTensor, others: list[ModelTensor]) -> None:
    """One group of ``entry`` and all tensors that form the same stored tensors."""
    ids = {id(other) for other in others if other is not entry}
    if not ids:
        groups.append([entry])
        return
    joined = [group for group in groups if any(id(member) in ids for member in group)]
    other_groups = [group for group in groups if not any(group is other for other in joined)]
    groups[:] = [*other_groups, [*(member for group in joined for member in group), entry]]


def _shape_of(key: str, own_pieces: list[tuple[ModelTensor, Piece]]) -> tuple[torch.Size, torch.dtype]:
    """Return the shape and dtype of the stored tensor that these form."""
    names = abbreviated([repr(entry.name) for entry, _ in own_pieces], 6)
    tensors = [piece.tensor for _, piece in own_pieces]
    first = tensors[0]
    if own_pieces[0][1].slice is None and len(own_pieces) == 1:
        return first.shape, first.dtype
    slices = sorted((p.slice for _, p in own_pieces if p.slice is not None), key=lambda each: each.start)
    ends = [each.start + each.length for each in slices]
    dim = slices[0].dim if slices else 0
    if (
        len(slices) < len(own_pieces)
        or [each.start for each in slices] != [0, *ends[:-1]]
        or len({each.dim for each in slices}) > 1
        or len({(*t.shape[:dim], *t.shape[dim + 1 :]) for t in tensors}) > 1
    ):
        raise ValueError(
            f"{names} share the key {key!r}, but their slices leave gaps, overlap or do not begin at 0. Give every "
            "tensor a separate key, or consecutive slices of one key from 0 on."
        )
    if len({t.dtype for t in tensors}) > 1:
        raise ValueError(f"{names} are stored together as {key!r} and have different dtypes; pass one dtype")
    return torch.Size([*first.shape[:dim], ends[-1], *first.shape[dim + 1 :]]), first.dtype
