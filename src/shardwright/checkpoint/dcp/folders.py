"""Folders of torch's distributed checkpoint, read as data: no code from a folder runs.

torch's own reader unpickles ``.metadata``, and its planner unpickles every value that is no tensor. The reader and the
planner here unpickle nothing. They also load folders from torch's own writer. They raise an error for values that they
cannot read safely.
"""

from __future__ import annotations

import io
import pickle
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem

from shardwright.checkpoint.dcp.metadata import parse_metadata
from shardwright.checkpoint.format.digests import Damaged, read_regular, size_of
from shardwright.checkpoint.format.index import METADATA


def read_metadata(folder: Path, links: bool = False) -> Metadata:
    """The metadata of a checkpoint. Links are followed if ``links``.

    Raises:
        Damaged: it cannot be read, or names a class that no checkpoint needs.
    """
    return parse_metadata(read_regular(folder / METADATA, links))


def files_of(metadata: Metadata) -> dict[str, int]:
    """The files a checkpoint consists of, apart from ``.metadata``, and the bytes that each must hold at least."""
    sizes: dict[str, int] = {}
    for place in metadata.storage_data.values():
        end = place.offset + place.length
        sizes[place.relative_path] = max(sizes.get(place.relative_path, 0), end)
    return sizes


def check_sizes(folder: Path, sizes: Mapping[str, int], links: bool = False) -> None:
    """Raise Damaged if a file is missing, is no regular file or is too short."""
    for name, nbytes in sizes.items():
        if (nbytes_on_disk := size_of(folder / name, links)) < nbytes:
            raise Damaged(f"{name} holds {nbytes_on_disk:,} bytes, at least {nbytes:,} expected")


class Reader(FileSystemReader):
    """torch's reader, with metadata that was read and checked before."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._metadata = metadata

    # Without torch's **kwargs: with them, dcp.load falls back to unpickling the metadata of single ranks.
    def read_metadata(self) -> Metadata:  # type: ignore[override]
        return self._metadata


class Planner(DefaultLoadPlanner):
    """torch's planner, which reads values that are no tensors as plain ones; in torch's own they may be code.

    ``weights_only=False`` is for callers who trust the file.
    """

    def __init__(self, weights_only: bool = True) -> None:
        super().__init__()
        self._weights_only = weights_only

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        try:
            loaded = torch.load(value, weights_only=self._weights_only)
        except pickle.UnpicklingError as error:
            raise Damaged(f"{name!r} {not_plain(error)}") from error
        *outer, last = self.mappings[name]
        target: Any = self.original_state_dict
        for step in outer:
            target = target[step]
        target[last] = loaded


def not_plain(error: pickle.UnpicklingError) -> str:
    """The reason why ``torch.load(weights_only=True)`` did not load a value, in one line."""
    named = re.search(r"GLOBAL (\S+)", str(error))
    if named is None:
        return "is damaged: torch.load cannot read it"
    return (
        f"names {named[1]}, which is not a tensor or plain value; it was not called. If you trust the file, allow "
        "the class with torch.serialization.safe_globals"
    )


def load(
    folder: Path,
    state: dict[str, Any],
    metadata: Metadata,
    *,
    alone: bool = False,
    weights_only: bool = True,
) -> None:
    """Read a checkpoint into ``state``, in place. Every rank must call it, unless it is ``alone``.

    Raises:
        Damaged: on every rank, with the rank and what it could not read.
    """
    try:
        with warnings.catch_warnings():
            if alone:
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(
                state,
                storage_reader=Reader(folder, metadata),
                planner=Planner(weights_only),
                no_dist=alone,
            )
    except CheckpointException as failure:  # a BaseException
        raise_cause(failure, Damaged, "read")


#: Failures of a rank itself, which are no sign of damaged files.
OF_RANKS = (KeyboardInterrupt, MemoryError, SystemExit, torch.OutOfMemoryError)


def raise_cause(failure: CheckpointException, kind: type[Exception], doing: str) -> NoReturn:
    """Raise the failure of a load or save on some rank as an ordinary error of the same kind."""
    failures = sorted((rank, error) for rank, (error, _) in failure.failures.items())
    for _, error in failures:
        if isinstance(error, OF_RANKS):
            raise error from failure
    rank, error = failures[0]
    line = (str(error).strip().splitlines() or [""])[0]
    named = line if isinstance(error, Damaged) else f"{type(error).__name__}: {line}"
    raise kind(f"rank {rank} could not {doing} it: {named}") from failure
