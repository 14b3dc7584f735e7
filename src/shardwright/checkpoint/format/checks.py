"""Checks of single values that a file describes, and the dtypes that it may name."""

from __future__ import annotations

from typing import Any

import torch

from shardwright.common.errors import Damaged

#: Every dtype by its whole name, such as ``torch.float32``.
DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


def typed(value: Any, kind: type, what: str) -> Any:
    """The value, if it is of exactly this type. Raises Damaged."""
    if type(value) is not kind:
        raise Damaged(f"expected {what} as {kind.__name__}, found {type(value).__name__}")
    return value


def count_of(value: Any, what: str) -> int:
    """The value, if it is a number of bytes or elements. Raises Damaged."""
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise Damaged(f"expected {what} as an integer >= 0 and below 2**63, found {type(value).__name__}")
    return value
