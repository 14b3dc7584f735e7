"""Local tensors that consist of several tensors, such as codes and scales: the state of low-bit optimizers.

Only their class knows the lengths of these tensors in a part of another length. So this file uses operations of the
class, or works tensor by tensor. It does not know sharding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from shardwright.engine.compat.dtensor import made_of
from shardwright.engine.compat.tensors import is_made_of_tensors

#: Errors that classes raise for operations that they do not support, or not for this part.
LACKING = (NotImplementedError, TypeError, ValueError)


def copied(local: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy, also of torchao's optimizer states, which have no ``clone``."""
    if not is_made_of_tensors(local):
        return local.clone(memory_format=torch.contiguous_format)
    names, context = local.__tensor_flatten__()  # type: ignore[attr-defined]
    return made_of(type(local), {name: copied(getattr(local, name)) for name in names}, context, local)


def has_other_lengths(local: torch.Tensor) -> bool:
    """Return whether a tensor of its class can be made in another length, into which parts are gathered."""
    if type(local) is torch.Tensor:
        return True
    try:
        local.new_empty(0)
    except LACKING:
        return False
    return True


def part_as(source: torch.Tensor, start: int, shape: Sequence[int]) -> torch.Tensor | None:
    """Return the elements of ``source`` from ``start`` on, in this shape, or None if its class has no such part.

    The result may be a view.
    """
    stop = start + math.prod(shape)
    if not is_made_of_tensors(source):
        return source.reshape(-1)[start:stop].view(shape)
    if source.shape == tuple(shape):
        return source  # some classes have no other views
    try:
        return source.view(-1)[start:stop].view(shape)
    except LACKING:
        return None
