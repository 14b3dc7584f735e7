"""Times of collectives by their bytes, made with all ranks as the engine makes them.

Nothing here knows models or configurations.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Sequence

import torch
import torch.distributed as dist

from shardwright.engine.comm import Communicator, plan_division
from shardwright.planner.tracing.timing import MOST_SETS, Timer

#: Bytes of the tensors among which repeated collectives change: a step comes back to a parameter after as many.
MOVED = 128 << 20


def time_collectives(
    sizes: Sequence[int], device: torch.device, timer: Timer, into: dict[str, dict[int, list[float]]]
) -> None:
    """Add seconds of gathers, reductions and sums of so many whole bytes to lists by kind and bytes; all ranks call."""
    communicator = Communicator(dist.group.WORLD, device)
    ranks = communicator.world_size
    division = plan_division(torch.float32, ranks, None)

    def gather(whole: torch.Tensor, part: torch.Tensor) -> None:
        communicator.all_gather([whole.view(torch.uint8)], [part.view(torch.uint8)]).wait()

    def scatter(whole: torch.Tensor, part: torch.Tensor) -> None:
        communicator.reduce_scatter([part], [whole], division).wait()

    def reduce(whole: torch.Tensor, part: torch.Tensor) -> None:
        communicator.all_reduce(whole, division).wait()

    for nbytes in sizes:
        count = max(2, min(MOST_SETS, MOVED // nbytes))
        sets = [(torch.ones(nbytes // 4, device=device), torch.ones(nbytes // 4 // ranks, device=device))
                for _ in range(count)]  # fmt: skip
        for name, call in (("gather", gather), ("scatter", scatter), ("reduce", reduce)):
            samples = []
            for i in range(count + (4 if nbytes > 1 << 25 else 9 if nbytes > 1 << 20 else 25)):
                dist.barrier()
                samples.append(timer.once(functools.partial(call, *sets[i % count])))
            into[name].setdefault(nbytes, []).append(statistics.median(samples[count:]))
