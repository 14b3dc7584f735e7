"""``save_pretrained``: a model's weights as safetensors with an index, without any rank holding the model.

The plan of all places needs only shapes. Then parameters are gathered one after another, and the first rank writes each
into its place. The folder gets its name when it is complete.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from shardwright.checkpoint.pretrained.files import (
    SAFETENSORS_INDEX,
    SafetensorsFile,
    shard_names,
    write_json,
)
from shardwright.checkpoint.pretrained.folder import ModelFolder
from shardwright.checkpoint.pretrained.key_maps import KeyMap
from shardwright.checkpoint.pretrained.model import ModelTensor, at_rest, ranks_of
from shardwright.checkpoint.pretrained.stored_model import StoredModel, bytes_of, stored_model_of
from shardwright.checkpoint.storage.publishing import publish
from shardwright.engine import OtherRankFailed, heartbeat, units_of, whole_of

ReadTensors = Callable[[dict[str, Tensor]], Mapping[str, Tensor]]


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
    written once, under the first of their names. The extra state of modules (``get_extra_state``) is not written, and a
    warning names these modules. Call it between steps.

    The folder is written under another name and renamed when it is complete and on disk. If anything fails on any rank,
    the new folder is removed and every rank raises an error.

    Args:
        model: plain, or sharded by ``fully_shard`` in any layout and strategy.
        path: the folder, or its URL ``file:///folder``; it must be new or empty, unless ``overwrite``.
        key_map: as for :func:`load_pretrained`. Pass the same key map to load these files. Default: for a model of
            transformers 5 the names under which transformers stores it, for other models the same names.
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
    write_model(
        model,
        path,
        key_map=key_map,
        max_shard_size=max_shard_size,
        dtype=dtype,
        config=config,
        overwrite=overwrite,
    )


@torch.inference_mode(False)
@torch.no_grad()
@heartbeat.during(heartbeat.SAVE)
def write_model(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    key_map: KeyMap | None,
    max_shard_size: int | str,
    dtype: torch.dtype | None,
    config: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    copies: Mapping[str, str] | None = None,
    add_files: Callable[[Path], None] | None = None,
) -> None:
    """Write a model as :func:`save_pretrained` does, whose arguments these are, with two more.

    Args:
        copies: further keys, and for each the key whose tensor is stored under it once more.
        add_files: changes the files in the folder on the first rank, before the folder gets its name.
    """
    at_rest(units_of(model), "save_pretrained was called")
    limit = bytes_of(max_shard_size, "max_shard_size")
    ranks = ranks_of(model)
    plan, place, left = ranks.run_own(
        lambda: (
            _plan(model, key_map, dtype, limit, copies or {}),
            ModelFolder.at(path),
            _extra_states(model),
        ),
        others_raise=OtherRankFailed,
    )
    writes = ranks.is_first
    if writes and left:
        warnings.warn(
            f"safetensors files hold parameters and buffers alone, so the extra state of {', '.join(left[:6])}"
            f"{', ...' if len(left) > 6 else ''} (get_extra_state) is not saved. Make it a buffer, or save it beside "
            "the weights, as shardwright.checkpoint.save_state does.",
            stacklevel=3,
        )
    error: Exception | None = None
    with _FolderWriter(place, plan, overwrite) as writer:
        ranks.run_own(writer.begin if writes else lambda: None, others_raise=OtherRankFailed)
        for group in plan.stored.groups:
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
                writer.finish(config, add_files)
            except Exception as failure:
                error = failure
        ranks.stop_after(error)


def write_stored_model(
    path: Path,
    stored: StoredModel,
    read: ReadTensors,
    *,
    max_shard_size: int | str = "5 GB",
    config: Mapping[str, Any] | None = None,
    add_files: Callable[[Path], None] | None = None,
) -> None:
    """Write stored tensors as :func:`save_pretrained` does, in one process, from values that ``read`` returns.

    Args:
        path: the new folder.
        stored: the stored tensors; the model may be on the meta device.
        read: returns whole tensors by name, from some of the model's tensors by name. Each comes in one call.
        max_shard_size, config: as for :func:`save_pretrained`.
        add_files: writes more files into the folder, before it gets its name.

    Raises:
        FileExistsError, OSError: as :func:`save_pretrained`. Nothing is left then.
    """
    plan = _FilePlan(stored, _files(stored, bytes_of(max_shard_size, "max_shard_size")))
    with _FolderWriter(ModelFolder.at(path), plan, overwrite=False) as writer:
        writer.begin()
        for group in stored.groups:
            writer.write(group, read(_by_name(group)))
        writer.finish(config, add_files)


def write_stored_file(file: Path, stored: StoredModel, read: ReadTensors) -> None:
    """Write stored tensors into one new safetensors file, which is on disk then. Raises OSError."""
    with closing(SafetensorsFile(file, stored.keys)) as target:
        for group in stored.groups:
            for key, tensor in stored.stored_tensors(group, read(_by_name(group))):
                target.write(key, tensor)


def _by_name(group: list[ModelTensor]) -> dict[str, Tensor]:
    return {entry.name: entry.tensor for entry in group}


def _extra_states(model: nn.Module) -> list[str]:
    """Return the names of modules whose extra state says something: None and empty tensors, as of fp8 that is off, do
    not."""
    states = {
        name: module.get_extra_state()
        for name, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }
    return [
        repr(name) if name else "the model"
        for name, state in states.items()
        if state is not None and not (isinstance(state, Tensor) and state.numel() == 0)
    ]


def _whole(entry: ModelTensor) -> Tensor:
    return whole_of(entry.tensor.detach())


# -- where everything goes ---------------------------------------------------------------------------------------------


@dataclass
class _FilePlan:
    """The stored tensors, and the keys in each file."""

    stored: StoredModel
    files: dict[str, list[str]]


def _plan(
    model: nn.Module,
    key_map: KeyMap | None,
    dtype: torch.dtype | None,
    limit: int,
    copies: Mapping[str, str],
) -> _FilePlan:
    stored = stored_model_of(model, key_map, dtype)
    stored.add_copies(copies)
    return _FilePlan(stored, _files(stored, limit))


def _files(stored: StoredModel, limit: int) -> dict[str, list[str]]:
    """Return the keys of each file, in the order of the model. A file has as many as fit into ``limit`` bytes."""
    files: list[list[str]] = [[]]
    size = 0
    for key in stored.keys:
        if files[-1] and size + stored.nbytes(key) > limit:
            files.append([])
            size = 0
        files[-1].append(key)
        size += stored.nbytes(key)
    return dict(zip(shard_names(len(files)), files, strict=True))


# -- writing -----------------------------------------------------------------------------------------------------------


class _FolderWriter:
    """The folder while it is written, on the writing rank. Without :meth:`finish` nothing is left of it."""

    def __init__(self, place: ModelFolder, plan: _FilePlan, overwrite: bool) -> None:
        self._place, self._plan, self._overwrite = place, plan, overwrite
        self._publication = ExitStack()
        self._open: dict[str, SafetensorsFile] = {}
        self._file_of = {key: name for name, keys in plan.files.items() for key in keys}

    def __enter__(self) -> Self:
        return self

    def begin(self) -> None:
        """Make every file with its header and its full size."""
        stored = self._plan.stored
        nbytes = stored.total_bytes
        save = self._publication.enter_context(publish(self._place.unfinished(), nbytes, self._overwrite))
        self._folder = save.path
        for name, keys in self._plan.files.items():
            self._open[name] = SafetensorsFile(self._folder / name, {key: stored.keys[key] for key in keys})

    def write(self, group: list[ModelTensor], whole: Mapping[str, Tensor]) -> None:
        """Write all stored tensors that these tensors of the model form."""
        for key, tensor in self._plan.stored.stored_tensors(group, whole):
            self._open[self._file_of[key]].write(key, tensor)

    def finish(
        self, config: Mapping[str, Any] | None, add_files: Callable[[Path], None] | None = None
    ) -> None:
        """Sync all files to disk, and rename the folder."""
        while self._open:
            self._open.popitem()[1].close()
        if len(self._plan.files) > 1:
            size = self._plan.stored.total_bytes
            write_json(
                self._folder / SAFETENSORS_INDEX,
                {"metadata": {"total_size": size}, "weight_map": self._file_of},
            )
        if config is not None:
            write_json(self._folder / "config.json", config)
        if add_files is not None:
            add_files(self._folder)
        self._publication.close()

    def __exit__(self, *error: Any) -> None:
        while self._open:
            self._open.popitem()[1].discard()
        self._publication.__exit__(*error)
