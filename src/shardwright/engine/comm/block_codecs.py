"""Codecs of weights in float8: a matrix has a scale for each block of rows and columns.

They encode matrices. A matrix can be cut between blocks, and its parts encode to the same numbers as the whole. So
decoded weights depend neither on the number of ranks nor on the layout. ``codecs.py`` has the codecs of flat rows.
"""

from __future__ import annotations

import functools
from typing import Protocol, TypeGuard

import torch


class BlockCodec(Protocol):
    """Encodes matrices of numbers as rows of bytes, and decodes them. Each block is encoded independently.

    Attributes:
        block_shape: rows and columns of a block. Blocks are counted from the first row and column of a matrix; the last
            ones may be shorter.
    """

    block_shape: tuple[int, int]

    def nbytes(self, rows: int, columns: int) -> int:
        """Bytes of an encoded matrix."""

    def encode(self, matrices: torch.Tensor) -> torch.Tensor:
        """uint8 [matrices, bytes] of floating-point [matrices, rows, columns]."""

    def decode(self, encoded: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        """float32 [matrices, rows, columns] of uint8 [matrices, bytes]. Where a number was not finite, none of its
        block is."""


def is_block_codec(codec: object) -> TypeGuard[BlockCodec]:
    """Whether a codec encodes matrices by blocks, and not flat rows."""
    return hasattr(codec, "block_shape")


class MXFP8:
    """MXFP8: float8 elements, and a power of two as the scale of every 32 consecutive elements of a row.

    Takes 1 + 1/32 bytes for each element. The scale is ``2 ** (floor(log2(amax)) - emax)``: ``amax`` is the largest
    magnitude of the block, ``emax`` the largest exponent of the element dtype (8 for e4m3, 15 for e5m2). Larger
    quotients saturate. If a number is not finite, its block becomes NaN. The error of a number is at most 1/8 of its
    magnitude, except for numbers that are tiny beside ``amax``. Source: OCP Microscaling Formats (MX) Specification
    v1.0, section 6.3.

    Args:
        dtype: of the elements, ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.

    Raises:
        ValueError: another dtype.
    """

    block_shape = (1, 32)

    def __init__(self, dtype: torch.dtype = torch.float8_e4m3fn) -> None:
        exponents = {torch.float8_e4m3fn: 8, torch.float8_e5m2: 15}
        if dtype not in exponents:
            raise ValueError(f"MXFP8 has elements of torch.float8_e4m3fn or torch.float8_e5m2, got {dtype!r}")
        self.dtype = dtype
        self._emax = exponents[dtype]

    def __repr__(self) -> str:
        return "MXFP8()" if self.dtype == torch.float8_e4m3fn else f"MXFP8({self.dtype})"

    def nbytes(self, rows: int, columns: int) -> int:
        """Bytes of an encoded matrix: one for each element, and one for each block."""
        return rows * (columns + _blocks(columns, 32))

    def encode(self, matrices: torch.Tensor) -> torch.Tensor:
        """uint8 [matrices, bytes] of floating-point [matrices, rows, columns]: elements in row order, then scales."""
        blocks = _in_blocks(matrices, self.block_shape)
        amax = blocks.abs().amax((2, 4), keepdim=True)
        # The biased exponent of a float32 is in bits 23 to 30. It is 255 for infinity and NaN, and 255 is NaN in E8M0.
        exponent = (amax.view(torch.int32) >> 23) & 255
        scale = (exponent - self._emax).clamp_(min=0)
        scale = scale.where(exponent != 255, 255)
        inverse = (254 - scale).clamp_(min=0).bitwise_left_shift(23).view(torch.float32)
        return _joined(_float8(blocks * inverse, self.dtype), scale.to(torch.uint8), matrices.shape)

    def decode(self, encoded: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        """float32 [matrices, rows, columns] of uint8 [matrices, bytes]. Where a number was not finite, its block is
        NaN."""
        elements, scales = _separated(encoded, rows, columns, self.dtype)
        return _scaled(elements, scales.view(torch.float8_e8m0fnu).float(), self.block_shape)


class BlockwiseFP8:
    """Blockwise FP8: float8_e4m3fn elements, and a float32 scale, ``amax / 448``, for each square of a matrix.

    Takes 1 + 4 / block**2 bytes for each element; ``amax`` is the largest magnitude of the block. If a number is not
    finite, none of its block is. The error of a number is at most 1/16 of its magnitude, except for numbers that are
    tiny beside ``amax``. Weights of DeepSeek-V3 have this form, with blocks of 128 x 128 (https://arxiv.org/abs/2412.19437,
    section 3.3.2).

    Args:
        block: rows and columns of a block.

    Raises:
        ValueError: ``block`` is no positive integer.
    """

    def __init__(self, block: int = 128) -> None:
        if isinstance(block, bool) or not isinstance(block, int) or block < 1:
            raise ValueError(f"block must be a number of rows and columns, at least 1, got {block!r}")
        self.block_shape = (block, block)

    def __repr__(self) -> str:
        return f"BlockwiseFP8({self.block_shape[0]})"

    def nbytes(self, rows: int, columns: int) -> int:
        """Bytes of an encoded matrix: one for each element, and four for each block."""
        return rows * columns + 4 * _blocks(rows, self.block_shape[0]) * _blocks(columns, self.block_shape[1])

    def encode(self, matrices: torch.Tensor) -> torch.Tensor:
        """uint8 [matrices, bytes] of floating-point [matrices, rows, columns]: elements in row order, then scales."""
        blocks = _in_blocks(matrices, self.block_shape)
        scale = blocks.abs().amax((2, 4), keepdim=True) / 448
        # A block with scale zero decodes to zeros. If a scale is not finite, the decoder makes its block not finite.
        elements = _float8(blocks / scale.where(scale != 0, 1), torch.float8_e4m3fn)
        return _joined(elements, scale, matrices.shape)

    def decode(self, encoded: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        """float32 [matrices, rows, columns] of uint8 [matrices, bytes]. Where a number was not finite, none of its
        block is."""
        elements, scales = _separated(encoded, rows, columns, torch.float8_e4m3fn)
        return _scaled(elements, scales.view(torch.float32), self.block_shape)


def _blocks(numel: int, size: int) -> int:
    return -(-numel // size)


def _sizes(rows: int, columns: int, block_shape: tuple[int, int]) -> tuple[int, int, int, int]:
    """Blocks along the rows, rows of a block, blocks along the columns, columns of a block.

    A block that is longer than the matrix ends with it, so that short matrices need no padding.
    """
    height, width = min(block_shape[0], rows), min(block_shape[1], columns)
    return _blocks(rows, height), height, _blocks(columns, width), width


def _in_blocks(matrices: torch.Tensor, block_shape: tuple[int, int]) -> torch.Tensor:
    """float32 [matrices, blocks, rows of a block, blocks, columns of a block], padded with zeros."""
    count, rows, columns = matrices.shape
    down, height, across, width = _sizes(rows, columns, block_shape)
    if (down * height, across * width) == (rows, columns):
        return matrices.float().reshape(count, down, height, across, width)
    padded = matrices.new_zeros(count, down * height, across * width, dtype=torch.float32)
    padded[:, :rows, :columns] = matrices
    return padded.view(count, down, height, across, width)


@functools.cache
def _largest(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).max


def _float8(blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The nearest elements of ``dtype``. Larger magnitudes become the largest one: torch's cast alone does not do so
    for every dtype and device."""
    return blocks.clamp(-_largest(dtype), _largest(dtype)).to(dtype)


def _joined(blocks: torch.Tensor, scales: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """uint8 [matrices, bytes]: the elements of each matrix without padding, then its scales."""
    count, rows, columns = shape
    _, down, height, across, width = blocks.shape
    elements = blocks.view(count, down * height, across * width).view(torch.uint8)[:, :rows, :columns]
    return torch.cat((elements.reshape(count, -1), scales.view(count, -1).view(torch.uint8)), 1)


def _separated(
    encoded: torch.Tensor, rows: int, columns: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """float8 [matrices, rows, columns], and the bytes of the scales, at an address that fits every dtype."""
    count, numel = len(encoded), rows * columns
    elements = encoded[:, :numel].view(dtype).reshape(count, rows, columns)
    return elements, encoded[:, numel:].clone(memory_format=torch.contiguous_format)


def _scaled(elements: torch.Tensor, scales: torch.Tensor, block_shape: tuple[int, int]) -> torch.Tensor:
    """float32 [matrices, rows, columns]: the elements times the scales of their blocks."""
    count, rows, columns = elements.shape
    down, _, across, _ = _sizes(rows, columns, block_shape)
    blocks = _in_blocks(elements, block_shape)
    blocks.mul_(scales.view(count, down, 1, across, 1))
    return blocks.view(count, blocks.shape[1] * blocks.shape[2], -1)[:, :rows, :columns]
