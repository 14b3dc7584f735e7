"""The names of the files that describe a checkpoint. `storage/save_names` has the names of its other files."""

from __future__ import annotations

INDEX = "index.json"
METADATA = ".metadata"  #: the file that torch's distributed checkpoint writes last
#: the file with the values that are no tensors, for torch's reader; our reader finds them in the index
VALUES = "__values.distcp"
#: the same file in a folder that is written for torch alone and has no index. It needs another name, because a folder
#: with VALUES and without an index is a checkpoint of ours that has lost its index.
VALUES_FOR_TORCH = "__0_1.distcp"
