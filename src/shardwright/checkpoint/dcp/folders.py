"""Folders of torch's distributed checkpoint: their files, and words for values that are not read, as they name code."""

from __future__ import annotations

import pickle
import re

from torch.distributed.checkpoint.metadata import Metadata


def files_of(metadata: Metadata) -> dict[str, int]:
    """The files a checkpoint consists of, apart from ``.metadata``, and the bytes that each must hold at least."""
    sizes: dict[str, int] = {}
    for place in metadata.storage_data.values():
        end = place.offset + place.length
        sizes[place.relative_path] = max(sizes.get(place.relative_path, 0), end)
    return sizes


def not_plain(error: pickle.UnpicklingError) -> str:
    """The reason why ``torch.load(weights_only=True)`` did not load a value, in one line."""
    named = re.search(r"GLOBAL (\S+)", str(error))
    if named is None:
        return "is damaged: torch.load cannot read it"
    return (
        f"names {named[1]}, which is not a tensor or plain value; it was not called. If you trust the file, allow "
        "the class with torch.serialization.safe_globals"
    )
