"""Exchanges of rows between the ranks of a group, which autograd knows: to other ranks, and to all of them.

Rows are the first dimension of a tensor. Nothing here knows what a row is. torch.compile traces them, which it does not
in `comm`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.engine.comm import noted
from shardwright.engine.compat import all_gather_single


class RowExchange(torch.autograd.Function):
    """An exchange of rows: rank r gets `sent[r]` of this rank's rows, and sends `received[r]` of its own."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.back = received, sent, group
        result = rows.new_empty(sum(received), *rows.shape[1:])
        with _noted_unless_compiled("all-to-all of rows", group, result):
            dist.all_to_all_single(result, rows.contiguous(), list(received), list(sent), group=group)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return RowExchange.apply(gradient, *ctx.back), None, None, None


class RowGather(torch.autograd.Function):
    """A gather of the rows of all ranks of a group, rank after rank. Each rank has the same number of rows.

    The gradient of a row is the sum of the gradients that all ranks have for it. It is summed in float32 at its owner
    and rounded once, on every device.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        result = rows.new_empty(group.size() * rows.shape[0], *rows.shape[1:])
        with _noted_unless_compiled("all-gather of rows", group, result):
            all_gather_single(result, rows.contiguous(), group=group)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        group, ranks = ctx.group, ctx.group.size()
        equal = [gradient.shape[0] // ranks] * ranks
        parts = RowExchange.apply(gradient, equal, equal, group).unflatten(0, (ranks, -1))
        wide = torch.float32 if parts.dtype.itemsize < 4 else parts.dtype
        return parts.sum(0, dtype=wide).to(gradient.dtype), None


def _noted_unless_compiled(
    collective: str, group: dist.ProcessGroup, result: Tensor
) -> AbstractContextManager[object]:
    """Note a collective on the heartbeat, unless a graph has it: a graph cannot write there."""
    return nullcontext() if torch.compiler.is_compiling() else noted(collective, group, result.nbytes)
