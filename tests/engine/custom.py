"""Collectives of a user's, by torch's interface for FSDP2, that count their calls."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from shardwright.engine.compat import all_gather_single

reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class Counted:
    """torch's interface, with memory of its own."""

    def __init__(self) -> None:
        self.calls = 0
        self.given: list[torch.Tensor] = []

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self.given.append(torch.empty(*size, dtype=dtype, device=device))
        return self.given[-1]

    def check(self, *tensors: torch.Tensor) -> None:
        self.calls += 1
        assert all(any(t is mine for mine in self.given) for t in tensors)
        self.given.clear()


class Gathers(Counted):
    def __call__(self, output: torch.Tensor, given: torch.Tensor, group: Any, async_op: bool = False) -> Any:
        self.check(output, given)
        return all_gather_single(output, given, group=group, async_op=async_op)


class Scatters(Counted):
    def __call__(
        self, output: torch.Tensor, given: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        self.check(output, given)
        reduce_scatter_single(output, given, op=op, group=group)  # no Work: done
