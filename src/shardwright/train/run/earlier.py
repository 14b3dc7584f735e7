"""Checkpoints as versions up to 0.2 wrote them: a folder by torch's writer with a position.json.

This file has the step, the samples seen, and the length and SHA-256 of every other file. Nothing writes this form any
more. Nothing here communicates or executes a file.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shardwright.checkpoint.dcp.folders import files_of
from shardwright.checkpoint.dcp.metadata import parse_metadata
from shardwright.checkpoint.format.digests import (
    Damaged,
    Digest,
    check_digest,
    from_json,
    read_regular,
    share,
    unsealed,
)
from shardwright.checkpoint.format.index import INDEX, METADATA
from shardwright.checkpoint.load.loading import Checkpoint
from shardwright.checkpoint.storage.stores import LocalFiles
from shardwright.train.run.position import Position

POSITION_FILE = "position.json"
Digests = Mapping[str, Digest]


def is_earlier(folder: Path) -> bool:
    """Whether an earlier version has saved what is there."""
    return os.path.lexists(folder / POSITION_FILE) and not os.path.lexists(folder / INDEX)


def open_earlier(folder: Path) -> tuple[Position, Checkpoint, Digests | None]:
    """Read the small files of a checkpoint: where the run stands, what it holds, and the digests of its files.

    The first checkpoints of all have no digests.

    Raises:
        Damaged: the files contradict one another.
    """
    text = read_regular(folder / POSITION_FILE)
    position, digests = _parse_position(text)
    data = read_regular(folder / METADATA)
    if digests is not None and digests.get(METADATA) != Digest(len(data), hashlib.sha256(data).hexdigest()):
        raise Damaged(f"{METADATA} is not the file that was saved: its SHA-256 differs")
    metadata = parse_metadata(data)
    for name, nbytes in files_of(metadata).items():
        if digests is not None and (name not in digests or digests[name].nbytes < nbytes):
            raise Damaged(f"{POSITION_FILE} and {METADATA} disagree on the file {name}")
    fingerprint = hashlib.sha256(text + data).hexdigest()
    return position, Checkpoint(LocalFiles(folder), None, metadata, fingerprint), digests


def _parse_position(text: bytes) -> tuple[Position, Digests | None]:
    """The position of the run, and the digests; None in the form without any, which has these two keys alone."""
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


def check_earlier(
    checkpoint: Checkpoint, digests: Digests, rank: int, ranks: int, progress: Callable[[int], None]
) -> None:
    """Compare a rank's share of the files with their digests. Raises Damaged for the first that differs."""
    for name in share({name: digests[name].nbytes for name in checkpoint.files()}, rank, ranks):
        check_digest(checkpoint.folder / name, digests[name], progress)
