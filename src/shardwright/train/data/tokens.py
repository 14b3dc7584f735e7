"""A tokenised data set as arrays that are read and never written. Where the arrays come from is decided elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Tokens:
    """Documents as one row of token ids, one document after the other."""

    ids: NDArray[Any]
    """uint8, uint16 or uint32 [tokens]; often a memory map."""
    ends: NDArray[np.int64]
    """[documents]: document d is ids[ends[d - 1]:ends[d]]; the last end is the number of tokens."""
    trained: NDArray[np.uint8] | None
    """[tokens]: 1 where the loss counts the token as a target. None: everywhere."""
    fingerprint: str
    """Of the content, the tokenizer and the settings that made the tokens."""
