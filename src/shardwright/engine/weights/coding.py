"""A unit's codec: which parameters it encodes, in which collectives of a gather, and layouts that it cannot have."""

from __future__ import annotations

import math
import re
import zlib
from typing import cast

from shardwright.engine.base.settings import Transport
from shardwright.engine.comm import (
    BlockCodec,
    BlockCoding,
    Codec,
    Communicator,
    RowCoding,
    is_block_codec,
    with_gathers,
)
from shardwright.engine.layout import UnitLayout
from shardwright.engine.layout.blocks import cut_in_a_block, granule_of_blocks, plan_holdings
from shardwright.engine.memory import Owner
from shardwright.engine.tensors.cut import Cut
from shardwright.engine.tensors.ranks import Ranks
from shardwright.engine.tensors.tensor_parallel import TensorParallel, cut_dim


def encoding_gathers(
    comms: list[Communicator],
    layout: UnitLayout,
    cuts: list[Cut],
    ranks: Ranks,
    transport: Transport,
    owner: Owner,
) -> tuple[list[Communicator], int | None]:
    """The communicators of a gather with the codec and the user's collective of ``transport``.

    Also returns the bytes that each rank sends for all pieces together, if only the last communicator decodes. One rank
    gathers nothing, so it uses neither codec nor collective.

    Raises:
        ValueError: the codec scales blocks that the layout cuts.
    """
    if comms[0].group is None:
        return comms, None
    codec, custom = transport.codec, transport.gather
    dtypes = [run.compute_dtype for run in layout.runs if not run.extended for s in run.segments if s.chunk]
    if not is_block_codec(codec):
        rows = None if codec is None else RowCoding(cast(Codec, codec), dtypes)
        return [_with_rows(comm, custom, rows) for comm in comms], None
    coded = _coded(layout, cuts, codec)
    # Tensor parallelism may leave nothing of them on this rank.
    if not any(math.prod(layout.specs[i].shape) for i in coded):
        return [with_gathers(comm, custom) for comm in comms], None
    _refuse_cut_blocks(layout, cuts, coded, codec, owner)
    coding = BlockCoding(codec, plan_holdings(layout, coded), dtypes, ranks.part)
    last = len(comms) - 1
    made = [
        with_gathers(comm, custom, coding.encode if i == 0 else None, coding.decode if i == last else None)
        for i, comm in enumerate(comms)
    ]
    return made, coding.nbytes


def _with_rows(comm: Communicator, custom: object, coding: RowCoding | None) -> Communicator:
    if coding is None:
        return with_gathers(comm, custom)
    return with_gathers(comm, custom, coding.encode, coding.decode)


def number_of(transport: Transport) -> int:
    """31 bits that show how gathers encode and send; ranks must have equal ones. 0: no codec, no user's collective."""
    if transport.codec is None and transport.gather is None:
        return 0
    codec = re.sub(r" at 0x[0-9A-Fa-f]+", "", repr(transport.codec))  # addresses differ between processes
    return zlib.crc32(f"{codec} {transport.gather is not None}".encode()) >> 1


def refuse_codec(layout: UnitLayout, cuts: list[Cut], codec: Codec | BlockCodec | None, owner: Owner) -> None:
    """Raise ValueError if the codec scales blocks that the layout cuts, in compute dtypes or in storage dtypes."""
    if is_block_codec(codec):
        for each in (layout, layout.as_stored()):
            _refuse_cut_blocks(each, cuts, _coded(each, cuts, codec), codec, owner)


def _coded(layout: UnitLayout, cuts: list[Cut], codec: BlockCodec) -> list[int]:
    """The parameters that a block codec encodes: matrices and stacks of them that it makes smaller.

    The whole shape decides, so the choice depends neither on the number of ranks nor on the layout.
    """
    coded: list[int] = []
    for i, (spec, cut) in enumerate(zip(layout.specs, cuts, strict=True)):
        if spec.extended or len(cut.shape) < 2 or not spec.compute_dtype.is_floating_point:
            continue
        *stack, rows, columns = cut.shape
        nbytes = cut.shape.numel() * spec.compute_dtype.itemsize
        if math.prod(stack) * codec.nbytes(rows, columns) < nbytes:
            coded.append(i)
    return coded


def _refuse_cut_blocks(
    layout: UnitLayout, cuts: list[Cut], coded: list[int], codec: BlockCodec, owner: Owner
) -> None:
    height, width = block = codec.block_shape
    for i in coded:
        parallel = cuts[i].parallel
        if parallel is not None and _cut_by_tensor_parallelism(parallel, block):
            raise ValueError(
                f"{codec!r} scales {height} x {width} elements together, but tensor parallelism cuts such a block of "
                f"parameter {layout.specs[i].name!r} of unit {owner.name!r}: a rank has {layout.specs[i].shape} of "
                f"{tuple(cuts[i].shape)}, so decoded weights would depend on the number of ranks. Use sizes that are "
                f"multiples of {height} rows and {width} columns on each rank, or pass this unit another codec."
            )
    found = cut_in_a_block(layout, coded, block)
    if found is None:
        return
    index, place = found
    granule = granule_of_blocks(layout.specs, coded, block)
    layout_text = 'layout="ragged"' if granule == 1 else f"layout=shardwright.Ragged({granule})"
    raise ValueError(
        f"{codec!r} scales {height} x {width} elements together, but the layout over {layout.world_size} ranks cuts "
        f"such a block of parameter {layout.specs[index].name!r} of unit {owner.name!r}, of shape "
        f"{layout.specs[index].shape}, {place} of a matrix. Decoded weights would depend on the number of ranks. Pass "
        f"{layout_text} to fully_shard for this unit; it keeps blocks whole."
    )


def _cut_by_tensor_parallelism(parallel: TensorParallel, block: tuple[int, int]) -> bool:
    """Whether a block has parts on several tensor-parallel ranks."""
    sizes = list(parallel.shape)
    steps = [1] * (len(sizes) - 2) + list(block)
    for axis, placement in enumerate(parallel.placements):
        dim = cut_dim(placement)
        if dim is None:
            continue
        chunk = -(-sizes[dim] // parallel.mesh.shape[axis])  # as torch.chunk cuts
        if chunk < sizes[dim] and chunk % steps[dim]:
            return True
        sizes[dim] = chunk
    return False
