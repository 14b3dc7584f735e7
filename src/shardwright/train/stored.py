"""The checkpoints of a run on disk: which exist, the step of each, and whether each is complete.

A checkpoint is a folder checkpoints/step-N of torch's distributed checkpoint with a position.json, which holds the
step, the samples seen, and the length and SHA-256 of every other file. Nothing here communicates or executes a file.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from shardwright.checkpoint.digests import (
    Damaged,
    Digest,
    as_json,
    check_digest,
    from_json,
    read_regular,
    sealed,
    share,
    unsealed,
)
from shardwright.checkpoint.folders import METADATA, check_sizes, files_of
from shardwright.checkpoint.metadata import parse_metadata

POSITION_FILE = "position.json"


@dataclass(frozen=True)
class Position:
    """Where a run stands: optimizer steps done, and samples seen, which is all the data order needs."""

    step: int
    samples: int


@dataclass(frozen=True)
class Stored:
    """A checkpoint whose position.json and .metadata are sound."""

    folder: Path
    position: Position
    metadata: Metadata
    digests: Mapping[str, Digest] | None  #: None of one that was saved before there were any
    fingerprint: str  #: of both files: ranks that read other ones notice

    def files(self) -> dict[str, int]:
        """Its files apart from those two, with their bytes; of one without digests the least there can be."""
        sizes = files_of(self.metadata)
        return sizes if self.digests is None else {name: self.digests[name].nbytes for name in sizes}


def step_folder(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step-{step}"


def saved_steps(checkpoints: Path) -> list[int]:
    """Steps that have a folder, newest first; whole or not."""
    names = [path.name for path in checkpoints.iterdir() if path.is_dir()] if checkpoints.is_dir() else []
    return sorted(
        (int(match[1]) for name in names if (match := re.fullmatch(r"step-(\d+)", name))), reverse=True
    )


def position_text(position: Position, digests: Mapping[str, Digest]) -> str:
    """What position.json holds."""
    return sealed({"step": position.step, "samples": position.samples, "files": as_json(digests)})


def examine(folder: Path) -> Stored:
    """Read the small files of a checkpoint. Raises Damaged if they contradict one another or the folder's name."""
    text = read_regular(folder / POSITION_FILE)
    position, digests = _parse_position(text)
    if folder.name != f"step-{position.step}":
        raise Damaged(f"{POSITION_FILE} is of step {position.step}")
    data = read_regular(folder / METADATA)
    sha256 = hashlib.sha256(data).hexdigest()
    if digests is not None and digests.get(METADATA) != Digest(len(data), sha256):
        raise Damaged(f"{METADATA} is not the file that was saved: its SHA-256 differs")
    metadata = parse_metadata(data)
    for name, nbytes in files_of(metadata).items():
        if digests is not None and (name not in digests or digests[name].nbytes < nbytes):
            raise Damaged(f"{POSITION_FILE} and {METADATA} disagree on the file {name}")
    return Stored(folder, position, metadata, digests, hashlib.sha256(text + data).hexdigest())


def _parse_position(text: bytes) -> tuple[Position, dict[str, Digest] | None]:
    """Where the run stands, and the digests; None in the form without any, which has these two keys alone."""
    content: Any = None
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        pass
    digests = None
    if not isinstance(content, dict) or content.keys() != {"step", "samples"}:
        content = unsealed(text, POSITION_FILE)
        digests = from_json(content.get("files"), POSITION_FILE)
    step, samples = content.get("step"), content.get("samples")
    if type(step) is not int or type(samples) is not int or step < 0 or samples < 0:
        raise Damaged(f"no readable {POSITION_FILE}")
    return Position(step, samples), digests


def check_files(stored: Stored, rank: int, ranks: int, progress: Callable[[int], None]) -> None:
    """Compare the files that fall to `rank` with their digests. Raises Damaged for the first that differs."""
    for name in share(stored.files(), rank, ranks):
        if stored.digests is not None:
            check_digest(stored.folder / name, stored.digests[name], progress)
        else:
            check_sizes(stored.folder, {name: stored.files()[name]})


def what_is_missing(folder: Path) -> str | None:
    """Why the checkpoint cannot be whole, or None if every file is there in its length. Reads no large file."""
    try:
        stored = examine(folder)
        check_sizes(folder, stored.files())
    except Damaged as problem:
        return str(problem)
    return None
