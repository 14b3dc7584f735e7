"""Converts a checkpoint into another form: ours, torch's distributed checkpoint, safetensors or ``torch.save``.

One process does it, without a process group and without the model. It reads and writes one tensor at a time. The
destination gets its name when all of it is on disk.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwright.checkpoint.convert.sources import InputCheckpoint, SourceTensor, open_source
from shardwright.checkpoint.format.index import StoredValue, name_of
from shardwright.checkpoint.format.nested import StateTensor
from shardwright.checkpoint.format.values import encoded
from shardwright.checkpoint.load.checkpoints import check_whole
from shardwright.checkpoint.pretrained.files import abbreviated
from shardwright.checkpoint.pretrained.key_maps import KeyMap, Rule, key_map_of, source_of
from shardwright.checkpoint.pretrained.model import ModelTensor
from shardwright.checkpoint.pretrained.save_pretrained import write_stored_file, write_stored_model
from shardwright.checkpoint.pretrained.stored_model import bytes_of, stored_model
from shardwright.checkpoint.save.collective_save import describe
from shardwright.checkpoint.save.torch_file import write_torch_file
from shardwright.checkpoint.save.writing import (
    BoxToWrite,
    Contents,
    versions,
    write_boxes_in_order,
)
from shardwright.checkpoint.storage.local_store import SingleFile
from shardwright.checkpoint.storage.locations import store_of
from shardwright.checkpoint.storage.publishing import publish
from shardwright.checkpoint.storage.save_names import file_of_rank, files_of_save
from shardwright.checkpoint.storage.stores import Store, new_attempt
from shardwright.checkpoint.training.model import MODEL

SHARDWRIGHT, DCP, SAFETENSORS, TORCH = "shardwright", "dcp", "safetensors", "torch"
FORMS = (SHARDWRIGHT, SAFETENSORS, DCP, TORCH)


@dataclass(frozen=True)
class Converted:
    """The result of a conversion.

    Attributes:
        path, form: where, and in which of :data:`FORMS`.
        tensors, nbytes: number of stored tensors, and their bytes.
        left_out: keys of the source that the destination does not have.
    """

    path: Path | str
    form: str
    tensors: int
    nbytes: int
    left_out: Sequence[str]


@dataclass(frozen=True)
class _Chosen:
    """The tensors and values to write, by their names in the destination."""

    tensors: Mapping[str, SourceTensor]
    values: Mapping[str, StoredValue] = field(default_factory=dict)
    left_out: Sequence[str] = ()

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self.tensors.values())

    def read(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor, in the order of :attr:`tensors`."""
        for name, each in self.tensors.items():
            yield name, each.read(each.dtype)


@torch.no_grad()
def convert_checkpoint(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    to: str,
    *,
    key: str | None = None,
    dtype: torch.dtype | None = None,
    key_map: KeyMap | None = None,
    rules: Sequence[Rule] = (),
    config: Mapping[str, Any] | None = None,
    max_shard_size: int | str = "5 GB",
) -> Converted:
    """Write what a checkpoint holds in another form.

    One tensor after another is read and written, so it takes memory for the largest tensor and 32 MiB; twice the
    largest tensor if that is stored transposed or together with others. For a folder of torch's distributed checkpoint
    it takes memory for the largest part of a tensor, too.

    Args:
        source: a checkpoint of ours, in a folder or behind a URL that fsspec knows; a folder of torch's distributed
            checkpoint, safetensors (a file, an index or a folder), or a file of ``torch.save``. Nothing in it is
            called.
        destination: the new folder; a new file for ``to="torch"``, or if it ends in ``.safetensors``; a URL for ours.
        to: one of :data:`FORMS`.
        key: write only what is under this key. Default: everything; for safetensors what is under ``"model"``, or
            everything if the source has tensors alone.
        dtype: floating-point tensors are converted to it; only for safetensors.
        key_map: from names in the source to names in the destination, as for ``save_pretrained``. Not for a whole
            nested state.
        rules: rules from which a key map is made, in place of ``key_map``.
        config: for ``config.json``; only for safetensors.
        max_shard_size: as for ``save_pretrained``.

    Raises:
        FileNotFoundError: there is no source, or no folder for the destination.
        FileExistsError: the destination exists.
        Damaged: the source is damaged.
        ValueError: something cannot be stored in this form, or an argument does not fit the source.
        OSError: the destination cannot be written.

    After an error nothing is left of the destination.
    """
    place, target = store_of(source), store_of(destination)
    path = target.path
    if path is not None:
        _check_place(place, path)
    if to not in FORMS:
        raise ValueError(f"expected a form of {', '.join(FORMS)}, found {to!r}")
    if path is None and to != SHARDWRIGHT:
        raise ValueError(
            f"only {SHARDWRIGHT} is written to a URL, found {to} for {target}; write to a folder and copy it"
        )
    if to != SAFETENSORS and dtype is not None:
        raise ValueError(f"a dtype can be chosen only for safetensors, found {to}")
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"dtype must be a floating-point dtype, got {dtype}")
    opened = open_source(place)
    chosen = _chosen(opened, to, key)
    if rules:
        last_only = to != SAFETENSORS
        names = [str(each.path[-1]) if last_only else name for name, each in chosen.tensors.items()]
        key_map = key_map_of(rules, names)
    if to == SAFETENSORS:
        assert path is not None
        return _to_safetensors(path, chosen, dtype, key_map, config, max_shard_size)
    if key_map is not None:
        chosen = _renamed(chosen, key_map, opened)
    if not chosen.tensors and not chosen.values:
        raise ValueError(f"{place} holds nothing")
    for name, value in chosen.values.items():
        encoded(value.value, name)  # raises an error for values that no checkpoint can hold
    if to == TORCH:
        assert path is not None
        _to_torch(path, chosen)
    else:
        _to_store(target, chosen, opened.ranks, to)
    return Converted(path or str(target), to, len(chosen.tensors), chosen.nbytes, chosen.left_out)


def _check_place(source: Store, destination: Path) -> None:
    if os.path.lexists(destination):
        raise FileExistsError(f"{destination} exists. Choose another name")
    folder = destination.resolve().parent
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: there is no such folder for {destination.name}. Make it first")
    if source.path is not None and source.path.resolve() in (folder, *folder.parents):
        raise ValueError(f"{destination} is inside {source}. Choose a place outside it")


# -- what is written ---------------------------------------------------------------------------------------------------


def _chosen(source: InputCheckpoint, to: str, key: str | None) -> _Chosen:
    tops = list(dict.fromkeys(
        name_of(each[:1]) for each in (*(t.path for t in source.tensors.values()), *source.value_paths.values())
    ))  # fmt: skip
    if key is None and to == SAFETENSORS and not source.is_flat:
        if MODEL not in tops:
            raise ValueError(f"{source.path} has no {MODEL!r}; choose one of its keys: {abbreviated(tops)}")
        key = MODEL
    if key is None and source.is_flat and not source.value_paths and to in (SHARDWRIGHT, DCP):
        tensors = {
            f"{MODEL}.{name}": replace(each, path=(MODEL, *each.path))
            for name, each in source.tensors.items()
        }
        return _Chosen(tensors)
    if key is None:
        return _Chosen(source.tensors, {} if to == SAFETENSORS else source.values(), _without(source, to))
    keep_key = to in (SHARDWRIGHT, DCP)
    tensors, values = {}, {}
    for name, each in source.tensors.items():
        if (path := _below(key, name, each.path, keep_key)) is not None:
            tensors[name_of(path)] = replace(each, path=path)
    if not tensors:
        raise ValueError(f"{source.path} has no tensors under {key!r}; its keys are {abbreviated(tops)}")
    for name, value_path in source.value_paths.items():
        if to != SAFETENSORS and (path := _below(key, name, value_path, keep_key)) is not None:
            values[name_of(path)] = StoredValue(path, source.values()[name].value)
    others = [top for top in tops if top != key and not key.startswith(f"{top}.")]
    return _Chosen(tensors, values, others)


def _without(source: InputCheckpoint, to: str) -> list[str]:
    return list(source.value_paths) if to == SAFETENSORS else []


def _below(key: str, name: str, path: Any, keep_key: bool) -> Any:
    """Return the keys of an entry below ``key``, or with it; None of entries elsewhere."""
    if not name.startswith(f"{key}."):
        return None
    length = next((n for n in range(1, len(path)) if name_of(path[:n]) == key), None)
    if length is None:  # the keys of folders without a nested state are in its names
        return (key, name[len(key) + 1 :]) if keep_key else (name[len(key) + 1 :],)
    return path if keep_key else path[length:]


def _renamed(chosen: _Chosen, key_map: KeyMap, source: InputCheckpoint) -> _Chosen:
    """Return the chosen tensors, with the last key of each renamed."""
    renamed: dict[str, SourceTensor] = {}
    for each in chosen.tensors.values():
        *outer, last = each.path
        if outer not in ([], [MODEL]):
            raise ValueError(f"{source.path} is a nested state: tensors can be renamed below one key of it")
        new = source_of(key_map, str(last))
        if new is None:
            continue
        if not isinstance(new, str):
            raise ValueError(f"{last!r} is stored in another form; that is possible only in safetensors")
        path = (*outer, new)
        name = name_of(path)
        if name in renamed or name in chosen.values:
            raise ValueError(f"two tensors get the name {new!r}")
        renamed[name] = replace(each, path=path)
    return replace(chosen, tensors=renamed)


# -- writing -----------------------------------------------------------------------------------------------------------


def _to_store(store: Store, chosen: _Chosen, ranks: int, to: str) -> None:
    attempt = new_attempt()
    contents = Contents(attempt, ranks, chosen.tensors, chosen.values, versions())
    with publish(store.unfinished(attempt), chosen.nbytes, names=files_of_save(1), check=check_whole) as save:
        written = write_boxes_in_order(save, file_of_rank(0), _boxes(chosen))
        describe(save, contents, [written], for_torch=to == DCP)


def _boxes(chosen: _Chosen) -> Iterator[BoxToWrite]:
    for name, tensor in chosen.read():
        boxes = StateTensor(name, chosen.tensors[name].path, tensor).boxes_to_save()
        del tensor
        while boxes:  # no reference stays when the next tensor is read
            yield BoxToWrite(name, boxes.pop(0))


def _to_torch(destination: Path, chosen: _Chosen) -> None:
    with publish(SingleFile(destination).unfinished(), chosen.nbytes) as save:
        values = {each.path: each.value for each in chosen.values.values()}
        write_torch_file(save.path, chosen.tensors, values, chosen.read())


def _to_safetensors(
    destination: Path,
    chosen: _Chosen,
    dtype: torch.dtype | None,
    key_map: KeyMap | None,
    config: Mapping[str, Any] | None,
    max_shard_size: int | str,
) -> Converted:
    bytes_of(max_shard_size, "max_shard_size")
    tensors = {
        name: replace(each, dtype=dtype) if dtype is not None and each.dtype.is_floating_point else each
        for name, each in chosen.tensors.items()
    }
    # Their values are read in the new dtype, so no tensor is in memory in both.
    entries = [
        ModelTensor([name], torch.empty(each.shape, dtype=each.dtype, device="meta"), [], optional=False)
        for name, each in tensors.items()
    ]
    stored = stored_model(entries, key_map, None, with_values=False)
    if not stored.keys:
        raise ValueError("there are no tensors to write")
    settings = None if config is None else {**config, "dtype": stored.main_dtype()}

    def read(forms: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensors[name].read(form.dtype) for name, form in forms.items()}

    nbytes = stored.total_bytes
    if destination.suffix == ".safetensors":
        with publish(SingleFile(destination).unfinished(), nbytes) as save:
            write_stored_file(save.path, stored, read)
    else:
        write_stored_model(destination, stored, read, max_shard_size=max_shard_size, config=settings)
    return Converted(destination, SAFETENSORS, len(stored.keys), nbytes, chosen.left_out)
