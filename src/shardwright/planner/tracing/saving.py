"""The memory that a checkpoint takes on one rank: the state is taken apart as for a save, and nothing is written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.checkpoint import SHARED, Box, NestedState, StateTensor, state_to_save
from shardwright.engine import RaggedDTensor, RaggedTensor, RankGroup
from shardwright.engine.compat import outside_dispatch_modes
from shardwright.planner.program import HOST
from shardwright.planner.tracing.recorder import ProgramRecorder

SMALL = 1 << 20  #: bytes up to which the first rank writes a tensor that every rank has whole
ALIGNMENT = 64  #: bytes, of each part in the memory into which a save copies
#: Bytes that describe a part there: its name, form and place.
DESCRIPTION = 224


def trace_save(
    recorder: ProgramRecorder,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    extra: Mapping[str, Any],
    *,
    stages: bool,
) -> None:
    """Take the state of a model and its optimizer as a save does. Frozen parameters are left out.

    ``stages``: the save copies this rank's part into the host's memory, which stays.
    """
    ranks = RankGroup()
    state = state_to_save(model, optimizer, extra, True, False, ranks)
    tensors = NestedState.of(state).tensors.values()
    if stages:
        with outside_dispatch_modes():  # places of boxes are computed in tensors of the host
            boxes = [(each, box) for each in tensors for box in each.boxes_to_save()]
        own = own_part(boxes, ranks.size)
        with recorder.on(HOST):
            nbytes = sum(_nbytes(box) + -_nbytes(box) % ALIGNMENT for box in own)
            recorder.take(nbytes, "parts of tensors", "staging")
            recorder.take(DESCRIPTION * len(own), "their description", "staging")


def own_part(boxes: Iterable[tuple[StateTensor, Box]], ranks: int) -> list[Box]:
    """Return the boxes that this rank writes of those that it has.

    Boxes that other ranks have, too, are divided as in a save: the largest first, to the rank with the fewest bytes.
    The others are taken to have as many bytes of their own as this rank.
    """
    copied = [(_copies(each, ranks), -_nbytes(box), each.name, box) for each, box in boxes]
    copied.sort(key=lambda each: (each[0] > 1, each[1], each[2], each[3].offsets, each[3].sizes))
    mine: list[Box] = []
    load = alone = 0
    loads: dict[int, list[int]] = {}  #: of the other ranks with copies, by their number
    for copies, negative, _, box in copied:
        if copies == 1:
            alone = load = load - negative
            mine.append(box)
            continue
        others = loads.setdefault(copies, [alone] * (copies - 1))
        least = min(range(copies - 1), key=others.__getitem__)
        if load <= others[least]:
            load -= negative
            mine.append(box)
        else:
            others[least] -= negative
    return mine


def _copies(each: StateTensor, ranks: int) -> int:
    """Return the number of ranks that have the same boxes of a tensor, among which a save divides them."""
    tensor: Any = each.tensor
    if type(tensor) in (Tensor, nn.Parameter, nn.Buffer):
        return ranks if each.path[0] in SHARED and tensor.nbytes > SMALL else 1
    if isinstance(tensor, RaggedDTensor):
        tensor = tensor.ragged
    if isinstance(tensor, RaggedTensor):
        return ranks // prod(group.size() for group in tensor.spec.groups)
    mesh, placements = tensor.device_mesh, tensor.placements
    cut = (size for size, each in zip(mesh.shape, placements, strict=True) if not each.is_replicate())
    return ranks // prod(cut)


def _nbytes(box: Box) -> int:
    return box.local.numel() * box.local.element_size()
