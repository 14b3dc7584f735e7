"""``save_pretrained``: a model's weights as safetensors with an index, without any rank holding the model.

The plan of all places needs only shapes. Then parameters are gathered one after another, and the first rank writes each
into its place. The folder gets its name when it is complete.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.checkpoint.files import (
    INDEX,
    SafetensorsFile,
    abbreviated,
    name_of,
    shard_names,
    sync_folder,
    write_json,
)
from shardwright.checkpoint.model import (
    ModelTensor,
    at_rest,
    first_rank,
    mesh_of,
    on_every_rank,
    raise_everywhere,
    tensors_of,
)
from shardwright.checkpoint.names import KeyMap, Piece, pieces_of, source_of
from shardwright.engine.base.offload import whole_of
from shardwright.engine.unit.owning import units_of

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@torch.inference_mode(False)
@torch.no_grad()
def save_pretrained(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    key_map: KeyMap | None = None,
    max_shard_size: int | str = "5 GB",
    dtype: torch.dtype | None = None,
    config: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> None:
    """Write a model's parameters and persistent buffers as safetensors into a folder.

        sw.save_pretrained(model, "checkpoint/")

    One file ``model.safetensors``, or several with ``model.safetensors.index.json``, as Hugging Face names them. For a
    sharded model every rank must call it. Parameters are gathered one at a time, and the mesh's first rank writes, so a
    rank holds at most the largest parameter beside its shards. For a plain model call it on one rank. Tied weights are
    written once, under the first of their names. Call it between steps.

    The folder is written under another name and renamed when it is complete and on disk. If anything fails on any rank,
    the new folder is removed and every rank raises an error.

    Args:
        model: plain, or sharded by ``fully_shard`` in any layout and strategy.
        path: the folder; it must be new or empty, unless ``overwrite``.
        key_map: as for :func:`load_pretrained`. Pass the same key map to load these files.
        max_shard_size: bytes of tensors in a file, as a number or such as "5 GB" or "512 MiB". A larger tensor gets a
            separate file.
        dtype: floating-point tensors are converted to this dtype. Default: as the model stores them.
        config: content of ``config.json`` beside the weights. None: no such file.
        overwrite: replace an existing folder, if it has only files of a saved model.

    Raises:
        ValueError: a tensor holds no values, or has a dtype without a name in the format, the key map does not fit, two
            tensors have one key, or an argument is wrong; nothing was written then.
        FileExistsError: the folder exists and is not empty (or, with ``overwrite``, has other files).
        OSError: the folder cannot be written.
        RuntimeError: another rank failed, or the model is in use.
    """
    units = units_of(model)
    mesh = mesh_of(units)
    at_rest(units, "save_pretrained was called")
    limit = _bytes(max_shard_size)
    plan: _Plan = on_every_rank(mesh, lambda: _plan(tensors_of(model), key_map, dtype, limit))
    writer = _Writer(Path(path), plan, overwrite)
    writes = first_rank(mesh)
    error: Exception | None = None
    try:
        on_every_rank(mesh, writer.begin if writes else lambda: None)
        for group in plan.groups:
            whole = {
                entry.name: _whole(entry) for entry in group
            }  # every rank takes part, even if the writer has failed
            if writes and error is None:
                try:
                    writer.write(group, whole)
                except Exception as failure:
                    error = failure
            del whole
        if writes and error is None:
            try:
                writer.finish(config)
            except Exception as failure:
                error = failure
        raise_everywhere(mesh, error)
    finally:
        writer.clean_up()


def _bytes(size: int | str) -> int:
    if isinstance(size, str):
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]i?B)", size.strip(), re.IGNORECASE)
        if match:
            return max(int(float(match[1]) * _UNITS[match[2].upper()]), 1)
    elif not isinstance(size, bool) and isinstance(size, int) and size > 0:
        return size
    raise ValueError(
        f'max_shard_size must be bytes, as a number or such as "5 GB" or "512 MiB", got {size!r}'
    )


def _whole(entry: ModelTensor) -> Tensor:
    return whole_of(entry.tensor.detach())


# -- where everything goes ---------------------------------------------------------------------------------------------


@dataclass
class _Plan:
    """The place of each tensor in the files.

    Attributes:
        groups: tensors of the model that form one stored tensor; mostly one.
        keys: shape and dtype by stored key.
        files: the keys in each file.
    """

    key_map: KeyMap | None
    dtype: torch.dtype | None
    groups: list[list[ModelTensor]] = field(default_factory=list)
    keys: dict[str, tuple[torch.Size, torch.dtype]] = field(default_factory=dict)
    files: dict[str, list[str]] = field(default_factory=dict)

    def pieces(self, entry: ModelTensor, tensor: Tensor) -> list[Piece]:
        source = source_of(self.key_map, entry.name)
        return [] if source is None else list(pieces_of(source, tensor))

    def stored_dtype(self, tensor: Tensor) -> torch.dtype:
        return self.dtype if self.dtype is not None and tensor.dtype.is_floating_point else tensor.dtype

    def nbytes(self, key: str) -> int:
        shape, dtype = self.keys[key]
        return shape.numel() * dtype.itemsize


def _plan(tensors: list[ModelTensor], key_map: KeyMap | None, dtype: torch.dtype | None, limit: int) -> _Plan:
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"dtype must be a floating-point dtype, got {dtype}")
    tensors = [entry for entry in tensors if not entry.optional]
    empty = [entry.name for entry in tensors if not entry.has_values]
    if empty:
        raise ValueError(
            f"tensors hold no values yet, since they are deferred or on the meta device: {abbreviated(empty)}. Call "
            "shardwright.materialize, or load them."
        )
    plan = _Plan(key_map, dtype)
    pieces: dict[str, list[tuple[ModelTensor, Piece]]] = {}
    for entry in tensors:
        shape_only = torch.empty(entry.tensor.shape, dtype=plan.stored_dtype(entry.tensor), device="meta")
        try:
            own = plan.pieces(entry, shape_only)
        except ValueError as error:
            raise ValueError(f"the key map does not fit {entry.name!r}: {error}") from None
        for piece in own:
            pieces.setdefault(piece.key, []).append((entry, piece))
        if own:
            _join(plan.groups, entry, [other for piece in own for other, _ in pieces[piece.key]])
    plan.keys = {key: _shape_of(key, parts) for key, parts in pieces.items()}
    for key, (_, stored_dtype) in plan.keys.items():
        name_of(stored_dtype, key)
    plan.files = _files(plan, limit)
    return plan


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
    """The shape and dtype of the stored tensor that these form."""
    names = abbreviated([repr(entry.name) for entry, _ in own_pieces], 6)
    tensors = [piece.tensor for _, piece in own_pieces]
    first = tensors[0]
    if own_pieces[0][1].part is None and len(own_pieces) == 1:
        return first.shape, first.dtype
    parts = sorted((p.part.start, p.part) for _, p in own_pieces if p.part is not None)
    ends = [start + part.length for start, part in parts]
    dim = parts[0][1].dim if parts else 0
    if (
        len(parts) < len(own_pieces)
        or [start for start, _ in parts] != [0, *ends[:-1]]
        or len({part.dim for _, part in parts}) > 1
        or len({(*t.shape[:dim], *t.shape[dim + 1 :]) for t in tensors}) > 1
    ):
        raise ValueError(
            f"{names} share the key {key!r}, but their slices leave gaps, overlap or do not begin at 0. Give every "
            "tensor a separate key, or consecutive slices of one key from 0 on."
        )
    if len({t.dtype for t in tensors}) > 1:
        raise ValueError(
            f"{names} are stored together as {key!r} and have different dtypes; pass one dtype to save_pretrained"
        )
    return torch.Size([*first.shape[:dim], ends[-1], *first.shape[dim + 1 :]]), first.dtype


def _files(plan: _Plan, limit: int) -> dict[str, list[str]]:
    """The keys of each file, in their order, as many as fit."""
    files: list[list[str]] = [[]]
    size = 0
    for key in plan.keys:
        if files[-1] and size + plan.nbytes(key) > limit:
            files.append([])
            size = 0
        files[-1].append(key)
        size += plan.nbytes(key)
    return dict(zip(shard_names(len(files)), files, strict=True))


# -- writing -----------------------------------------------------------------------------------------------------------


class _Writer:
    """The folder while it is written, on the writing rank."""

    def __init__(self, path: Path, plan: _Plan, overwrite: bool) -> None:
        self._final = path.resolve()
        self._partial = self._final.with_name(f".{self._final.name}.partial")
        self._plan = plan
        self._overwrite = overwrite
        self._begun = False
        self._open: dict[str, SafetensorsFile] = {}
        self._file_of = {key: name for name, keys in plan.files.items() for key in keys}

    def begin(self) -> None:
        """Make every file with its header and its full size."""
        self._check_place()
        if self._partial.exists():  # left by a killed process
            shutil.rmtree(self._partial)
        self._partial.mkdir(parents=True)
        self._begun = True
        need, free = sum(map(self._plan.nbytes, self._plan.keys)), shutil.disk_usage(self._partial).free
        if need > free:
            raise OSError(f"{self._final}: needs {need:,} bytes, {free:,} are free")
        for name, keys in self._plan.files.items():
            contents = {key: self._plan.keys[key] for key in keys}
            self._open[name] = SafetensorsFile(self._partial / name, contents)

    def _check_place(self) -> None:
        if not self._final.exists():
            return
        if not self._final.is_dir():
            raise FileExistsError(f"{self._final}: expected a folder, or none yet, found a file")
        there = sorted(item.name for item in self._final.iterdir())
        others = [
            name for name in there if not (name.endswith(".safetensors") or name in (INDEX, "config.json"))
        ]
        if there and not self._overwrite:
            raise FileExistsError(
                f"{self._final}: the folder exists and is not empty; pass another folder, or overwrite=True"
            )
        if others:
            raise FileExistsError(
                f"{self._final}: overwrite=True replaces the whole folder, and the folder has other files than a "
                f"saved model: {abbreviated(others)}. Pass another folder."
            )

    def write(self, group: list[ModelTensor], whole: dict[str, Tensor]) -> None:
        """Write all stored tensors that these tensors of the model form."""
        pieces: dict[str, list[Piece]] = {}
        for entry in group:
            for piece in self._plan.pieces(entry, whole[entry.name]):
                pieces.setdefault(piece.key, []).append(piece)
        for key, parts in pieces.items():
            parts.sort(key=lambda piece: piece.part.start if piece.part is not None else 0)
            tensors = [piece.tensor for piece in parts]
            dim = parts[0].part.dim if parts[0].part is not None else 0
            tensor = tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim)
            self._open[self._file_of[key]].write(key, tensor.to(self._plan.keys[key][1]))

    def finish(self, config: Mapping[str, Any] | None) -> None:
        """Sync all files to disk, and rename the folder."""
        while self._open:
            self._open.popitem()[1].close()
        if len(self._plan.files) > 1:
            size = sum(map(self._plan.nbytes, self._plan.keys))
            write_json(self._partial / INDEX, {"metadata": {"total_size": size}, "weight_map": self._file_of})
        if config is not None:
            write_json(self._partial / "config.json", config)
        sync_folder(self._partial)
        old = self._final.with_name(f".{self._final.name}.old")
        if self._final.is_dir() and any(self._final.iterdir()):
            shutil.rmtree(old, ignore_errors=True)
            os.replace(self._final, old)
        try:
            os.replace(self._partial, self._final)
        except BaseException:
            if old.is_dir():
                os.replace(old, self._final)
            raise
        self._begun = False
        sync_folder(self._final.parent)
        shutil.rmtree(old, ignore_errors=True)

    def clean_up(self) -> None:
        """Remove the unfinished folder."""
        while self._open:
            self._open.popitem()[1].close(sync=False)
        if self._begun:
            shutil.rmtree(self._partial, ignore_errors=True)
