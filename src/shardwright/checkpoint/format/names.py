"""The names of the files that describe a checkpoint. `storage` has those of other files, and of ones behind URLs."""

from __future__ import annotations

INDEX = "index.json"
METADATA = ".metadata"  #: the file that torch's distributed checkpoint writes last
#: Plain values as ``torch.save`` writes them, for torch's reader; ours reads the index.
VALUES = "__values.distcp"
#: Takes the place of VALUES where no index is meant to be: a folder with VALUES and without index is damaged.
VALUES_FOR_TORCH = "__0_1.distcp"
