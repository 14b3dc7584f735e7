"""A checkpoint of a run on disk: where the run stood, what it holds, and whether its files are those that were saved.

It is a folder checkpoints/step-N by ``shardwright.checkpoint``. `earlier` reads those of earlier versions. Nothing here
communicates or executes a file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from shardwright.checkpoint.dcp import folders
from shardwright.checkpoint.format.digests import Damaged
from shardwright.checkpoint.format.index import INDEX, Index
from shardwright.checkpoint.format.nested import nested
from shardwright.checkpoint.load.loading import Checkpoint, check_lengths, open_checkpoint, verify
from shardwright.checkpoint.storage.stores import LocalFiles
from shardwright.train.run.earlier import POSITION_FILE, Digests, check_earlier, is_earlier, open_earlier
from shardwright.train.run.past import Past
from shardwright.train.run.position import Place, Position


class Form(NamedTuple):
    """dtype and shape of a stored tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Stored:
    """A checkpoint whose descriptions are sound."""

    position: Position
    checkpoint: Checkpoint
    digests: Digests | None = None  #: of files in the earlier form, if it has them

    @property
    def folder(self) -> Place:
        """The folder, or the URL."""
        place = self.checkpoint.place
        return place.path if isinstance(place, LocalFiles) else str(place)

    @property
    def index(self) -> Index | None:
        return self.checkpoint.index

    @property
    def has_digests(self) -> bool:
        return self.index is not None or self.digests is not None

    def files(self) -> dict[str, int]:
        """The bytes of each file apart from its descriptions; without digests the least there can be."""
        sizes = self.checkpoint.files()
        return sizes if self.digests is None else {name: self.digests[name].nbytes for name in sizes}

    def contents(self) -> dict[str, Any]:
        """The nested state, with a :class:`Form` for each tensor. Values in the earlier form are None."""
        metadata = self.checkpoint.metadata
        if self.index is not None:
            leaves: dict[Any, Any] = {
                each.path: Form(each.dtype, each.shape) for each in self.index.tensors.values()
            }
            leaves |= {each.path: each.value for each in self.index.values.values()}
            return nested(leaves)  # type: ignore[no-any-return]
        assert metadata is not None
        paths = metadata.planner_data or {}
        leaves = {
            tuple(paths.get(name, (name,))): Form(entry.properties.dtype, tuple(entry.size))
            if isinstance(entry, TensorStorageMetadata)
            else None
            for name, entry in metadata.state_dict_metadata.items()
        }
        try:
            content = nested(leaves)
        except (AttributeError, LookupError, TypeError, ValueError):
            content = None
        if not isinstance(content, dict):
            raise Damaged("the keys of its values contradict one another")
        return content


def examine(folder: Place) -> Stored:
    """Read what describes a checkpoint of a run.

    Raises:
        Damaged: it contradicts itself or the folder's name, or the folder holds none.
        UnknownVersion: a later version of shardwright has saved it.
    """
    digests = None
    if isinstance(folder, Path) and is_earlier(folder):
        position, checkpoint, digests = open_earlier(folder)
        source = POSITION_FILE
    else:
        try:
            checkpoint = open_checkpoint(folder)
        except FileNotFoundError:
            gone = "it is not whole"
            if isinstance(folder, Path):
                gone = "the folder holds no checkpoint" if folder.is_dir() else "the folder is not there"
            raise Damaged(gone) from None
        if checkpoint.index is None:
            raise Damaged(f"neither {INDEX} nor {POSITION_FILE} is there")
        position, source = position_in(checkpoint.index), INDEX
    if str(folder).rpartition("/")[2] != f"step-{position.step}":
        raise Damaged(f"{source} is of step {position.step}")
    return Stored(position, checkpoint, digests)


def position_in(index: Index) -> Position:
    """The position of the run. Raises Damaged for a checkpoint that no run has saved."""
    values: Any = nested({each.path: each.value for each in index.values.values()}) if index.values else {}
    content: Any = values.get("extra") if isinstance(values, Mapping) else None
    content = content.get("position") if isinstance(content, Mapping) else None
    if not isinstance(content, Mapping) or content.keys() - {"past"} != {"step", "samples"}:
        raise Damaged(f"{INDEX} has no position of a run")
    step, samples = content["step"], content["samples"]
    if type(step) is not int or type(samples) is not int or step < 0 or samples < 0:
        raise Damaged(f"{INDEX} has no position of a run")
    try:
        return Position(step, samples, Past.from_stored(content.get("past", {})))
    except ValueError as error:
        raise Damaged(f"{INDEX} has no position of a run: {error}") from None


def check_files(stored: Stored, rank: int, ranks: int, progress: Callable[[int], None]) -> None:
    """Compare the files that fall to `rank` with their digests, or their lengths if there are none.

    Raises Damaged for the first that differs."""
    if stored.digests is not None:
        check_earlier(stored.checkpoint, stored.digests, rank, ranks, progress)
    else:
        verify(stored.checkpoint, rank, ranks, progress)


def what_is_missing(folder: Place) -> str | None:
    """The reason why the checkpoint cannot be whole; None if every file has its length. Reads no large file."""
    try:
        compare_lengths(examine(folder))
    except ValueError as problem:
        return str(problem)
    return None


def compare_lengths(stored: Stored) -> None:
    """Raise Damaged for the first file that is missing or has another length. Reads no large file."""
    if stored.index is not None:
        check_lengths(stored.checkpoint)
    else:
        folders.check_sizes(stored.checkpoint.folder, stored.files())
