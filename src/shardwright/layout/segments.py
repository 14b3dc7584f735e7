"""What the planners of layouts know of a parameter, and where one lies that is cut in rows.

Pure planning on shapes and dtypes: no tensor is made, no process group is asked, so it is tested without either.
Offsets and lengths are in elements unless a name says bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

ALIGNMENT = 16  #: bytes on which every parameter and every local chunk starts


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def alignment_elements(*dtypes: torch.dtype) -> int:
    """Elements that make 16 bytes in the smallest of the dtypes, so one offset serves them all."""
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
    #: Whether its tensor decides what is gathered of it, so that it has no place in the shard and the slab.
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
        """Shape of one row of the sharded dimension, as it lies in memory."""
        return tuple(self.shape[d] for d in self.order[1:])

    @property
    def inverse(self) -> tuple[int, ...]:
        """The permutation that takes memory order back to the order of the dimensions."""
        return tuple(self.order.index(d) for d in range(len(self.order)))

    @property
    def stride(self) -> tuple[int, ...]:
        """Strides of the global tensor: as it lies in memory if rows are outermost anyway, else contiguous."""
        order = self.order if self.dim == 0 else tuple(range(len(self.shape)))
        strides, step = [0] * len(self.shape), 1
        for d in reversed(order):
            strides[d] = step
            step *= max(self.shape[d], 1)
        return tuple(strides)


@dataclass(frozen=True)
class Segment:
    """One parameter's place: ``chunk`` elements per rank in the shard, ``world_size * chunk`` in the slab.

    The sharded dimension lies outermost; ``rows`` of it belong to each rank (the last ranks may hold fewer, or none,
    and the rest is zero padding). A replicated parameter is a segment of one row per rank, all rows equal.
    """

    index: int
    size: int  #: length of the sharded dimension
    row: int  #: elements per row
    rows: int  #: rows per rank, padded
    slab_offset: int
    shard_offset: int  #: where the cast of this rank's chunk lies, and its gradient

    @property
    def chunk(self) -> int:
        """Elements of it in the shard of each rank, padding included."""
        return self.rows * self.row

    @property
    def members(self) -> tuple[Segment, ...]:
        """What lies in it: the one parameter."""
        return (self,)

    def rows_of(self, rank: int) -> int:
        """Rows that ``rank`` really owns, without padding."""
        return max(0, min(self.rows, self.size - rank * self.rows))
