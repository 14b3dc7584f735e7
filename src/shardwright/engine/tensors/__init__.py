"""One parameter: its sharded and its full form, its cut, and its ranks. This room knows no units."""

import shardwright.engine.tensors.ragged.operations  # fills the table of operations on ragged tensors
