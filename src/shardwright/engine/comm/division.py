"""Division of sums over ranks, and sums that a rank makes of all ranks' data itself."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Division:
    """Division of a sum over ranks: by ``average`` in the collective, or by ``before`` and ``after`` around a sum.

    A factor of 1 runs no operation. In total the gradient is divided by ``before * after``.
    """

    average: bool = False
    before: float = 1.0
    after: float = 1.0

    def finish(self, outputs: Sequence[torch.Tensor]) -> None:
        """Divide sums that a collective has made."""
        if self.after != 1.0:
            for output in outputs:
                output.div_(self.after)

    def sum_rows(self, rows: torch.Tensor, output: torch.Tensor) -> None:
        """Sum ``rows`` into ``output`` and divide. A sum of narrow numbers rounds only once."""
        if self.average:
            torch.mean(rows, dim=0, out=output)
        else:
            torch.sum(rows, dim=0, out=output)
            self.finish([output])

    def sum_parts(self, parts: Sequence[torch.Tensor], output: torch.Tensor) -> None:
        """:meth:`sum_rows` of rows that lie apart, without a copy of them.

        Narrow numbers, and wider ones of at most four rows, have the same sums. More rows are added in another order.
        """
        if len(parts) > 2 and output.element_size() < 4:
            self.sum_rows(torch.stack(tuple(parts)), output)
            return
        torch.add(parts[0], parts[1], out=output)
        for part in parts[2:]:
            output.add_(part)
        if self.average:
            output.div_(len(parts))
        else:
            self.finish([output])


@functools.cache
def plan_division(
    reduce_dtype: torch.dtype, world_size: int, factor: float | None, force_sum: bool = False
) -> Division:
    """Divide by ``factor`` (default: the number of ranks), with ``force_sum`` never inside the collective.

    float16 overflows at 65504. So it is divided by a power of two near the root of the factor before the sum, and by
    the rest after it. Other dtypes have wider exponents and do not need this.
    """
    factor = float(world_size) if factor is None else float(factor)
    if reduce_dtype == torch.float16:
        before = 1.0
        while factor / before > before:
            before *= 2
        return Division(before=before, after=factor / before)
    if factor == world_size and not force_sum:
        return Division(average=True)
    return Division(after=factor)
