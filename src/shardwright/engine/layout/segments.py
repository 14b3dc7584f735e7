"""The planners' description of a parameter, and the place of a parameter that is cut in rows.

Pure planning on shapes and dtypes, without tensors and process groups, so tests need neither.
Offsets and lengths are in elements unless a name says bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

ALIGNMENT = 16  #: bytes on which every parameter and every local chunk starts


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def alignment_elements(*dtypes: torch.dtype) -> int:
    """Elements that make 16 bytes in the smallest dtype. An offset in such multiples fits every dtype."""
    return ALIGNMENT // min(dtype.itemsize for dtype in dtypes)


@dataclass(frozen=True)
class TensorSpec:
    """A parameter for the planner: its name, global shape, dtypes, and the dimension along which it is cut.

    A 0-d parameter has no dimension to cut: every rank keeps it whole.
    """

    name: str
    shape: tuple[int, ...]
    storage_dtype: torch.dtype
    compute_dtype: torch.dtype
    dim: int = 0
    #: Dimensions from the outermost in memory to the innermost; ``dim`` comes first. Default: in their own order.
    order: tuple[int, ...] = ()
    #: Whether the tensor has ``fsdp_pre_all_gather``. Such a parameter has no place in the shard and the slab.
    extended: bool = False

    def __post_init__(self) -> None:
        if self.shape and not 0 <= self.dim < len(self.shape):
            raise ValueError(f"{self.name}: shape {self.shape} has no dimension {self.dim}")
        natural = (self.dim, *(d for d in range(len(self.shape)) if d != self.dim)) if self.shape else ()
        if not self.order:
            object.__setattr__(self, "order", natural)
        elif sorted(self.order) != sorted(natural) or self.order[0] != self.dim:
            raise ValueError(
                f"{self.name}: {self.order} is no order of dimensions that begins with {self.dim}"
            )

    @property
    def replicated(self) -> bool:
        """Whether every rank keeps the whole parameter."""
        return not self.shape

    @property
    def is_natural(self) -> bool:
        """Whether memory order is the order of the dimensions."""
        return self.order == tuple(range(len(self.shape)))

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of one row of the sharded dimension, in memory order."""
        return tuple(self.shape[d] for d in self.order[1:])

    @property
    def inverse(self) -> tuple[int, ...]:
        """The permutation that takes memory order back to the order of the dimensions."""
        return tuple(self.order.index(d) for d in range(len(self.order)))

    @property
    def stride(self) -> tuple[int, ...]:
        """Strides of the global tensor: its own if rows are outermost in memory, else contiguous."""
        order = self.order if self.dim == 0 else tuple(range(len(self.shape)))
        strides, step = [0] * len(self.shape), 1
        for d in reversed(order):
            strides[d] = step
            step *= max(self.shape[d], 1)
        return tuple(strides)


@dataclass(frozen=True)
class Segment:
    """One parameter's place: ``chunk`` elements per rank in the shard, ``world_size * chunk`` in the slab.

    The sharded dimension is outermost. Each rank has ``rows`` rows of it. The last ranks may have fewer rows or none;
    the rest is zero padding. A replicated parameter is a segment of one row per rank, all rows equal.
    """

    index: int
    size: int  #: length of the sharded dimension
    row: int  #: elements per row
    rows: int  #: rows per rank, padded
    slab_offset: int
    shard_offset: int  #: offset of the cast of this rank's chunk, and of its gradient

    @property
    def chunk(self) -> int:
        """Its elements in the shard of each rank, padding included."""
        return self.rows * self.row

    @property
    def members(self) -> tuple[Segment, ...]:
        """Its only parameter."""
        return (self,)

    def rows_of(self, rank: int) -> int:
        """Rows that ``rank`` owns, without padding."""
        return max(0, min(self.rows, self.size - rank * self.rows))
