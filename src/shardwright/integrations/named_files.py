"""Checkpoints of named states as files: written beside their place and renamed, read without running their code.

A folder gets ``checksums.json`` with the digests of its files, each taken by the rank that wrote the file.
"""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.device_mesh import DeviceMesh

from shardwright.checkpoint.digests import (
    Damaged,
    Digest,
    as_json,
    check_digest,
    digest_of,
    from_json,
    open_regular,
    read_regular,
    sealed,
    share,
    unsealed,
)
from shardwright.checkpoint.folders import METADATA, check_sizes, files_of, not_plain, read_metadata

OTHER_VALUES = "meta.pt"  #: in a folder, the file with what is neither model nor optimizer
CHECKSUMS = "checksums.json"  #: in a folder, the file with the digests of all others


# -- writing -----------------------------------------------------------------------------------------------------------


def beside(path: Path, kind: str) -> Path:
    return path.parent / f".{path.name}.{kind}"


def check_target(path: Path, folder: bool) -> None:
    """Refuse to replace a folder that is no checkpoint; checkpoints and, by another file, files may be replaced."""
    if not path.is_dir() or is_sharded(path) or (folder and not any(path.iterdir())):
        return
    if folder:
        raise FileExistsError(f"{path} is a folder with other files than a checkpoint. Choose another path.")
    raise IsADirectoryError(
        f'{path} is a folder, but state_dict_type="full" writes one file. Choose another path.'
    )


def write_values(values: dict[str, Any], file: Path) -> None:
    with open(file, "wb") as stream:
        torch.save(values, stream)
        stream.flush()
        os.fsync(stream.fileno())


def _write_text(text: str, file: Path) -> None:
    with open(file, "w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def put_in_place(partial: Path, path: Path) -> None:
    """Rename. A file replaces a file in one step; a folder that is replaced is called ``.NAME.old`` for a moment."""
    old = None
    if path.exists() and (path.is_dir() or partial.is_dir()):
        old = beside(path, "old")
        _remove(old)
        os.replace(path, old)
    os.replace(partial, path)
    _sync(path.parent)
    if old is not None:
        _remove(old)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def own_digests(folder: Path) -> dict[str, Digest]:
    """Of the files this rank has written: torch begins their names with the rank."""
    return {file.name: digest_of(file) for file in folder.glob(f"__{dist.get_rank()}_*")}


def complete(folder: Path, others: dict[str, Any], digests: Mapping[str, Digest]) -> None:
    """Add the values that are neither model nor optimizer, and the digests. After it, all of the folder is on disk."""
    write_values(others, folder / OTHER_VALUES)
    of_these = {name: digest_of(folder / name) for name in (METADATA, OTHER_VALUES)}
    _write_text(sealed({"files": as_json({**digests, **of_these})}), folder / CHECKSUMS)
    _sync(folder / METADATA)  # torch before 2.14 syncs a file whose last bytes it has not written yet
    _sync(folder)


# -- reading -----------------------------------------------------------------------------------------------------------


def is_sharded(path: Path) -> bool:
    return path.is_dir() and (path / METADATA).is_file()


def read_file(path: Path, weights_only: bool | None) -> Any:
    """What ``torch.save`` has written, mapped into memory, on the host.

    No code of the file runs, whatever torch's own default is, unless ``weights_only`` is False.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is a folder, no such file, or holds what is no tensor or plain value.
    """
    if not path.exists():
        raise FileNotFoundError(f"There is no checkpoint at {path}.")
    if path.is_dir():
        raise ValueError(
            f"{path} is a folder without {METADATA}, so it is no checkpoint. Pass the folder of a sharded "
            "checkpoint, or the file of a full checkpoint."
        )
    try:
        os.close(open_regular(path, links=True))  # torch would wait for a pipe
        return torch.load(path, mmap=True, map_location="cpu", weights_only=weights_only is not False)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} {not_plain(error)}; weights_only=False lets a file run any code."
        ) from error
    except (EOFError, KeyError, RuntimeError, Damaged) as error:
        raise ValueError(f"{path} cannot be read as a file of torch.save: {error}") from error


def dict_in(path: Path, weights_only: bool | None) -> dict[str, Any]:
    stored = read_file(path, weights_only)
    if not isinstance(stored, dict):
        raise ValueError(f"{path} holds a {type(stored).__name__}, but a checkpoint is a dict.")
    return stored


def read_others(path: Path, weights_only: bool | None) -> dict[str, Any]:
    file = path / OTHER_VALUES
    return dict_in(file, weights_only) if file.is_file() else {}


def damaged(path: Path, problem: Damaged) -> ValueError:
    return ValueError(f"The checkpoint {path} cannot be read: {problem}.")


def verified(path: Path, mesh: DeviceMesh) -> Metadata:
    """What a folder holds. Its files are those that were saved, as far as this rank's share goes.

    A folder without checksums, which torch's own writer leaves, is compared by the sizes of its files alone.
    """
    try:
        metadata = read_metadata(path, links=True)
        if not (path / CHECKSUMS).exists():
            check_sizes(path, files_of(metadata), links=True)
            return metadata
        content = unsealed(read_regular(path / CHECKSUMS, links=True), CHECKSUMS)
        digests = from_json(content.get("files"), CHECKSUMS)
        for name in {*files_of(metadata), METADATA, OTHER_VALUES} - digests.keys():
            raise Damaged(f"{CHECKSUMS} has no digest of {name}")
        ranks = mesh.mesh.flatten().tolist()
        sizes = {name: digest.nbytes for name, digest in digests.items()}
        for name in {METADATA, OTHER_VALUES, *share(sizes, ranks.index(dist.get_rank()), len(ranks))}:
            check_digest(path / name, digests[name], links=True)
    except Damaged as problem:
        raise damaged(path, problem) from problem
    return metadata
