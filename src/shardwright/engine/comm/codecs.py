"""Codecs: they encode rows of a floating-point tensor as fewer bytes, with a small error, and decode them.

A codec knows no ranks. Every rank decodes the bytes of one rank to the same bits.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Codec(Protocol):
    """Encodes rows of numbers as rows of bytes, and decodes them."""

    def nbytes(self, numel: int) -> int:
        """Bytes of an encoded row of ``numel`` elements."""

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """uint8 [rows, bytes] of floating-point [rows, numel]."""

    def decode(self, encoded: torch.Tensor, numel: int) -> torch.Tensor:
        """float32 [rows, numel] of uint8 [rows, bytes]. Where a number was not finite, none of its block is."""


class Cast:
    """A shorter floating-point dtype: ``torch.bfloat16``, ``torch.float16``, or one of float8.

    Raises:
        ValueError: ``dtype`` is no floating-point dtype.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ValueError(f"expected a floating-point dtype, got {dtype!r}")
        self.dtype = dtype

    def __repr__(self) -> str:
        return f"Cast({self.dtype})"

    def nbytes(self, numel: int) -> int:
        """Bytes of an encoded row of ``numel`` elements."""
        return numel * self.dtype.itemsize

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """uint8 [rows, bytes] of floating-point [rows, numel]."""
        return rows.to(self.dtype).contiguous().view(torch.uint8)

    def decode(self, encoded: torch.Tensor, numel: int) -> torch.Tensor:
        """float32 [rows, numel] of uint8 [rows, bytes]."""
        return _aligned(encoded).view(self.dtype).float()


class Int8Blocks:
    """One byte for each element and a float32 scale for each ``block`` of elements; the largest of a block becomes 127.

    The error of an element is at most its block's largest magnitude / 254.

    Raises:
        ValueError: ``block`` is no positive integer.
    """

    def __init__(self, block: int = 256) -> None:
        if isinstance(block, bool) or not isinstance(block, int) or block < 1:
            raise ValueError(f"block must be a number of elements, at least 1, got {block!r}")
        self.block = block

    def __repr__(self) -> str:
        return f"Int8Blocks({self.block})"

    def _blocks(self, numel: int) -> int:
        return -(-numel // self.block)

    def nbytes(self, numel: int) -> int:
        """Bytes of an encoded row of ``numel`` elements: one each, and four for each block."""
        return numel + 4 * self._blocks(numel)

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """uint8 [rows, bytes] of floating-point [rows, numel]: the codes of a row, then its scales."""
        count, numel = rows.shape
        blocks = self._blocks(numel)
        padded = rows.new_zeros(count, blocks * self.block, dtype=torch.float32)
        padded[:, :numel] = rows
        padded = padded.view(count, blocks, self.block)
        scale = padded.abs().amax(-1, keepdim=True) / 127
        # A block with scale zero has only zeros. If a scale is not finite, all of its block becomes not finite.
        codes = (padded / scale.where(scale != 0, 1)).round_().nan_to_num_(0, 0, 0).to(torch.int8)
        codes = codes.view(count, -1)[:, :numel]
        return torch.cat((codes.contiguous().view(torch.uint8), scale.view(count, -1).view(torch.uint8)), 1)

    def decode(self, encoded: torch.Tensor, numel: int) -> torch.Tensor:
        """float32 [rows, numel] of uint8 [rows, bytes]. Where a number was not finite, none of its block is."""
        count, blocks = len(encoded), self._blocks(numel)
        codes = encoded[:, :numel].view(torch.int8)
        scale = _aligned(encoded[:, numel:]).view(torch.float32)
        padded = scale.new_zeros(count, blocks * self.block)
        padded[:, :numel] = codes
        return (padded.view(count, blocks, -1) * scale.unsqueeze(-1)).view(count, -1)[:, :numel]


def _aligned(encoded: torch.Tensor) -> torch.Tensor:
    """A copy that may be viewed as another dtype, at whatever offset of a byte buffer the rows begin."""
    return encoded.clone(memory_format=torch.contiguous_format)
