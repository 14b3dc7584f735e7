"""The planner of layouts: which segments a unit's parameters share, and which elements each rank owns.

Pure arithmetic on shapes, without tensors and process groups. Nothing loops over the ranks, so 4,096 ranks take the
same time as two. Offsets and lengths are in elements. The engine converts them to bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from shardwright.engine.layout.segments import ALIGNMENT, alignment_elements, round_up

VECTOR_BLOCK = 256
"""Elements of a 1-D parameter that ``Ragged(k)`` keeps together: the blocks of block-quantised optimizers."""

Dtypes = torch.dtype | tuple[torch.dtype, ...]


@dataclass(frozen=True)
class Ragged:
    """A layout that cuts parameters between granules, at the end of a rank's part.

        Ragged("row")      # rows of the last dimension stay whole
        Ragged(32)         # blocks of 32 such rows, counted from the parameter's first
        Ragged("element")  # nothing but the alignment matters
        Ragged(lambda shape: math.prod(shape[1:]))  # blocks of this many elements stay whole

    A tensor of more than two dimensions is a stack of rows. A 1-D parameter has no rows: ``Ragged("row")`` may cut it
    anywhere, ``Ragged(k)`` between blocks of 256 elements. Raises ValueError for any other granule.
    """

    granule: int | str | Callable[[tuple[int, ...]], int] = "row"

    def __post_init__(self) -> None:
        if (
            not callable(self.granule)
            and not _counts(self.granule)
            and self.granule not in ("row", "element")
        ):
            raise ValueError(
                f'Ragged: expected "row", "element", a number of rows >= 1 or a function from a shape to a number of '
                f"elements, found {self.granule!r}"
            )

    def __repr__(self) -> str:
        if callable(self.granule):
            return f"Ragged({getattr(self.granule, '__name__', repr(self.granule))})"
        return f'Ragged("{self.granule}")' if isinstance(self.granule, str) else f"Ragged({self.granule})"

    def elements(self, shape: Sequence[int]) -> int:
        """Elements of a parameter of this shape that stay together on one rank; its last granule may be shorter.

        Raises:
            ValueError: the granule is a function, and has returned no such number.
        """
        if self.granule == "element" or 0 in shape or not shape:
            return 1
        if callable(self.granule):
            try:
                elements = self.granule(tuple(shape))
            except Exception as error:
                raise ValueError(
                    f"{self}: the function raised {type(error).__name__}: {error}, for a parameter of shape "
                    f"{tuple(shape)}. Expected a number of elements >= 1"
                ) from error
            if not _counts(elements):
                raise ValueError(
                    f"{self}: expected a number of elements >= 1 for a parameter of shape {tuple(shape)}, found "
                    f"{elements!r}"
                )
            return min(elements, math.prod(shape))
        if len(shape) == 1:
            return 1 if self.granule == "row" else VECTOR_BLOCK
        return shape[-1] if self.granule == "row" else shape[-1] * int(self.granule)


def _counts(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


@dataclass(frozen=True)
class Member:
    """One parameter in a segment: ``numel`` elements from ``offset`` on, cut only between granules."""

    index: int
    offset: int
    numel: int
    granule: int

    @property
    def stop(self) -> int:
        """The member's end in the segment, in elements."""
        return self.offset + self.numel


@dataclass(frozen=True)
class RaggedSegment:
    """Parameters that are cut together: ``chunk`` elements per rank in the shard, ``world_size * chunk`` in the slab.

    Rank r owns the r-th chunk. In a replicated segment every rank owns all members (0-d parameters, in order), so each
    chunk is a copy of them.
    """

    members: tuple[Member, ...]
    chunk: int
    slab_offset: int
    shard_offset: int
    dtypes: tuple[torch.dtype, ...]
    group: Hashable = None
    replicated: bool = False

    def range_of(self, member: Member, rank: int) -> tuple[int, int]:
        """The member's elements [start, stop) that a rank owns. If the rank owns none, start equals stop."""
        if self.replicated:
            return 0, member.numel
        before = rank * self.chunk - member.offset
        start = min(max(before, 0), member.numel)
        return start, min(max(before + self.chunk, start), member.numel)


@dataclass(frozen=True)
class Layout:
    """The place of every element of a unit's parameters. :func:`plan` makes it.

    A parameter is its index in ``shapes``; an element is its flat index in memory order. Raises ValueError
    if a parameter is missing, overlaps another, leaves its segment, or has a granule cut by the end of a rank's part.
    """

    kind: str | Ragged
    world_size: int
    shapes: tuple[tuple[int, ...], ...]
    segments: tuple[RaggedSegment, ...]

    def __post_init__(self) -> None:
        for segment in self.segments:
            _check(segment, self.world_size)
        members = {m.index: m.numel for segment in self.segments for m in segment.members}
        if members != {i: math.prod(shape) for i, shape in enumerate(self.shapes)}:
            raise ValueError(f"layout: expected {len(self.shapes)} parameters, each whole, found {members}")

    @property
    def numel(self) -> int:
        """Elements of the slab, padding included."""
        return max((s.slab_offset + s.chunk * self.world_size for s in self.segments), default=0)

    @property
    def shard_numel(self) -> int:
        """Elements that each rank keeps at rest, padding included."""
        return max((s.shard_offset + s.chunk for s in self.segments), default=0)

    @property
    def padding(self) -> float:
        """Elements of the slab that belong to no parameter, divided by the elements that do.

        A replicated parameter counts once per rank, since every rank needs its copy.
        """
        true = self._total
        return self.numel / true - 1 if true else 0.0

    @property
    def balance(self) -> float:
        """The largest number of elements that a rank owns, divided by the mean. 1.0: all ranks own the same number."""
        if not self._total:
            return 1.0
        # Ranks between the first and the last rank of a parameter own equal numbers, so the others are enough.
        ranks = {0}
        for s in self.segments:
            for m in s.members:
                if m.numel and not s.replicated:
                    first, last = m.offset // s.chunk, (m.stop - 1) // s.chunk
                    ranks.update((first, first + 1, last, last + 1))
        most = max(
            sum(stop - start for _, start, stop in self.owned(r)) for r in ranks if r < self.world_size
        )
        return most * self.world_size / self._total

    def span(self, index: int) -> tuple[int, int]:
        """Elements [start, stop) of the slab that hold the parameter. If it is replicated: its first copy."""
        segment, member = self._places[index]
        return segment.slab_offset + member.offset, segment.slab_offset + member.stop

    def range_of(self, index: int, rank: int) -> tuple[int, int]:
        """The parameter's elements [start, stop) that the rank owns. If the rank owns none, start equals stop."""
        segment, member = self._places[index]
        return segment.range_of(member, self._checked(rank))

    def shard_offset(self, index: int, rank: int) -> int:
        """The offset in the rank's shard at which ``range_of`` begins."""
        segment, member = self._places[index]
        if segment.replicated:
            return segment.shard_offset + member.offset
        behind = member.offset - self._checked(rank) * segment.chunk
        return segment.shard_offset + min(max(behind, 0), segment.chunk)

    def owned(self, rank: int) -> list[tuple[int, int, int]]:
        """The rank's elements in the order of its shard: (parameter, start, stop) of :meth:`range_of`, none empty."""
        self._checked(rank)
        ranges = ((m.index, *s.range_of(m, rank)) for s in self.segments for m in s.members)
        return [(index, start, stop) for index, start, stop in ranges if start < stop]

    def __str__(self) -> str:
        lines = [
            f"{self.kind} over {self.world_size:,} ranks: {len(self.segments)} segments, {self.shard_numel:,} elements "
            f"per rank, padding {self.padding:.2%}, balance {self.balance:.3f}"
        ]
        for number, s in enumerate(self.segments):
            what = "copied to every rank" if s.replicated else f"{s.chunk:,} elements per rank"
            members = ", ".join(f"{m.index} {list(self.shapes[m.index])}" for m in s.members)
            lines.append(f"  segment {number}, {what}: {members}")
        return "\n".join(lines)

    @cached_property
    def _total(self) -> int:
        copies = {True: self.world_size, False: 1}
        return sum(m.numel * copies[s.replicated] for s in self.segments for m in s.members)

    @cached_property
    def _places(self) -> dict[int, tuple[RaggedSegment, Member]]:
        return {m.index: (s, m) for s in self.segments for m in s.members}

    def _checked(self, rank: int) -> int:
        if not 0 <= rank < self.world_size:
            raise IndexError(f"layout: expected a rank from 0 to {self.world_size - 1}, found {rank}")
        return rank


def plan(
    shapes: Sequence[Sequence[int]],
    world_size: int,
    layout: str | Ragged = "per_parameter",
    *,
    dtypes: Sequence[Dtypes] | None = None,
    groups: Sequence[Hashable] | None = None,
) -> Layout:
    """Lay out the parameters of one unit over the ranks. The same arguments give the same layout on every rank.

    Args:
        shapes: one per parameter, in memory order: outermost dimension first.
        world_size: ranks among which every parameter is divided.
        layout: ``"per_parameter"`` (whole slices of the first dimension, as ``Shard(0)``), ``"ragged"`` (short for
            ``Ragged("row")``) or a :class:`Ragged`.
        dtypes: per parameter, its dtype or all those its elements are kept in (storage, compute, reduction). Every
            parameter, and every rank's part of it, starts on 16 bytes in each of them. Default: float32.
        groups: per parameter, anything hashable. Parameters of different groups or dtypes share no segment.

    Segments of equal dtypes and group are next to each other, in the order in which these first appear. Padding of a
    ragged segment is less than two granules per rank plus alignment. If the bytes of a row are no multiple of 16,
    several rows stay together, as few as make a multiple of 16 (four rows of 3 float32 elements). Otherwise a part
    might not start on 16 bytes.

    Raises:
        ValueError: an unknown layout, fewer than one rank, a negative dimension, or ``dtypes`` or ``groups`` that are
            not one per parameter.
    """
    kind = Ragged("row") if layout == "ragged" else layout
    if kind != "per_parameter" and not isinstance(kind, Ragged):
        raise ValueError(f'layout: expected "per_parameter", "ragged" or a Ragged, found {layout!r}')
    for number in (world_size, *(n for shape in shapes for n in shape)):
        if isinstance(number, bool) or not hasattr(number, "__index__"):
            raise ValueError(f"shapes and world_size: expected whole numbers, found {number!r}")
    if world_size < 1:
        raise ValueError(f"world_size: expected at least 1, found {world_size}")
    sizes = tuple(tuple(int(n) for n in shape) for shape in shapes)
    for i, shape in enumerate(sizes):
        if any(n < 0 for n in shape):
            raise ValueError(f"shapes: expected no negative dimension, found {shape} for parameter {i}")
    for name, values in (("dtypes", dtypes), ("groups", groups)):
        if values is not None and len(values) != len(sizes):
            raise ValueError(f"{name}: expected one for each of {len(sizes)} parameters, found {len(values)}")

    keys: dict[tuple[tuple[torch.dtype, ...], Hashable], list[int]] = {}
    for i in range(len(sizes)):
        dtype = torch.float32 if dtypes is None else dtypes[i]
        key = (dtype if isinstance(dtype, tuple) else (dtype,), None if groups is None else groups[i])
        keys.setdefault(key, []).append(i)

    segments: list[RaggedSegment] = []
    slab = shard = 0
    for (kinds, group), indices in keys.items():
        align = alignment_elements(*kinds)
        # 16 elements are 16 bytes or more in any dtype: offsets from the first segment of a key stay aligned.
        slab, shard = round_up(slab, ALIGNMENT), round_up(shard, ALIGNMENT)
        if isinstance(kind, Ragged):
            cuts = _ragged(kind, sizes, indices, world_size, align)
        else:
            cuts = _per_parameter(sizes, indices, world_size)
        for members, chunk, replicated in cuts:
            segments.append(RaggedSegment(tuple(members), chunk, slab, shard, kinds, group, replicated))
            slab = round_up(slab + chunk * world_size, align)
            shard = round_up(shard + chunk, align)
    return Layout(kind, world_size, sizes, tuple(segments))


_MemberCut = tuple[list[Member], int, bool]  #: members, chunk, replicated


def _per_parameter(
    shapes: Sequence[tuple[int, ...]], indices: Sequence[int], world_size: int
) -> list[_MemberCut]:
    """A segment for each parameter. Its chunk has as many slices of the first dimension as torch.chunk gives rank 0."""
    cuts: list[_MemberCut] = []
    for i in indices:
        size, *rest = shapes[i] or (1,)
        row = math.prod(rest)
        chunk = -(-size // world_size) * row
        cuts.append(([Member(i, 0, size * row, max(row, 1))], chunk, not shapes[i]))
    return cuts


@dataclass(frozen=True)
class _Unplaced:
    """A parameter without a place yet. It may be cut at multiples of ``block``: so many granules that they fill 16
    bytes."""

    index: int
    numel: int
    granule: int
    block: int
    space: int  #: numel, rounded up to the alignment


def _ragged(
    kind: Ragged, shapes: Sequence[tuple[int, ...]], indices: Sequence[int], world_size: int, align: int
) -> list[_MemberCut]:
    """Parameters of equal blocks share a segment, the largest blocks first. Smaller blocks fill its gaps.

    If the chunk is a multiple of the block, all cuts of a parameter fall between blocks once the first cut does. So
    only the start of a parameter matters: whole blocks must fill the space up to the end of that rank's part.
    """
    scalars = [i for i in indices if not shapes[i]]
    waiting = []
    for i in indices:
        if shapes[i]:
            numel, granule = math.prod(shapes[i]), kind.elements(shapes[i])
            # One rank cuts nothing, so all blocks are equal.
            block = math.lcm(granule, align) if world_size > 1 else align
            waiting.append(_Unplaced(i, numel, granule, block, round_up(numel, align)))
    # Pieces that end on a block need no gap after them. Of the others the largest go first, as in bin packing.
    waiting.sort(key=lambda p: (-p.block, p.numel % p.block != 0, -p.numel))

    cuts: list[_MemberCut] = []
    while waiting:
        alike = [p for p in waiting if p.block == waiting[0].block]
        finer = waiting[len(alike) :]
        # If no piece is longer than a block, none can be cut. Then the longest piece sets the size.
        step = max(min(alike[0].block, max(p.space for p in alike)), align)
        chunk = -(-sum(p.space for p in alike) // (world_size * step)) * step
        members, end, left = _fill(alike, chunk, world_size)
        # Runs once: there is at most one gap before each rank's end, and each gap is smaller than a step.
        while left:
            chunk += step
            members, end, left = _fill(alike, chunk, world_size)
        apart = [min(-(-p.numel // (world_size * p.granule)) * p.granule, p.numel) for p in alike]
        saved = chunk - sum(round_up(c, align) for c in apart)
        if saved > (len(alike) - 1) * max(p.granule for p in alike):
            # A few long rows of odd length: in a separate segment a parameter needs no blocks, because every rank's
            # part begins its chunk. Each further segment must save a row per rank.
            cuts += [
                ([Member(p.index, 0, p.numel, p.granule)], c, False)
                for p, c in zip(alike, apart, strict=True)
            ]
            waiting = finer
            continue
        more, _, waiting = _fill(finer, chunk, world_size, end)
        cuts.append((members + more, chunk, False))
    if scalars:
        copies = [Member(i, place * align, 1, 1) for place, i in enumerate(scalars)]
        cuts.append((copies, len(scalars) * align, True))
    return cuts


def _fill(
    pieces: Sequence[_Unplaced], chunk: int, world_size: int, cursor: int = 0
) -> tuple[list[Member], int, list[_Unplaced]]:
    """Place pieces in order behind ``cursor``. Returns the placed pieces, the end of the last one, and the other
    pieces."""
    members, left = [], []
    for p in pieces:
        start = _start(p, chunk, cursor)
        if start is None or start + p.space > chunk * world_size:
            left.append(p)
        else:
            members.append(Member(p.index, start, p.numel, p.granule))
            cursor = start + p.space
    return members, cursor, left


def _start(piece: _Unplaced, chunk: int, cursor: int) -> int | None:
    """The first place from ``cursor`` on at which each chunk's end inside the piece is between two blocks."""
    if not piece.numel:
        return cursor
    if not chunk or (piece.numel > chunk and chunk % piece.block):
        return None  # Two chunk ends inside it leave different parts of a block.
    to_end = chunk - cursor % chunk
    return cursor + to_end % piece.block if piece.numel > to_end else cursor


def _check(segment: RaggedSegment, world_size: int) -> None:
    end, limit = 0, segment.chunk * (1 if segment.replicated else world_size)
    for m in segment.members:
        if m.offset < end or m.stop > limit:
            raise ValueError(
                f"layout: expected parameter {m.index} between {end} and {limit} of its segment, found it at "
                f"[{m.offset}, {m.stop})"
            )
        end = m.stop
        if segment.replicated or not m.numel:
            continue
        to_end = segment.chunk - m.offset % segment.chunk
        cut_once, cut_again = m.numel > to_end, m.numel > to_end + segment.chunk
        if (cut_once and to_end % m.granule) or (cut_again and segment.chunk % m.granule):
            raise ValueError(
                f"layout: expected parameter {m.index} to be cut between granules of {m.granule} elements, found "
                f"chunks of {segment.chunk} from its offset {m.offset}"
            )
