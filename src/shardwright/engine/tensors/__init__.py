"""One parameter: its sharded and its full form, its cut, and its ranks. This room knows no units.

``parameter`` has both forms, ``cut`` says which part a rank has, and ``ranks`` which ranks there are. The sharded form
is one of two classes over the base in ``sharded``: that of ``rows`` is a DTensor, that of ``ragged`` has ranges of
elements with any ends. Both use ``numbers``, for what ranks read together, and ``edits``, for changes in place.
"""

import shardwright.engine.tensors.ragged.operations  # fills the table of operations on ragged tensors
