"""Float8 weights by plain loops over blocks, and what gathers send."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.comm_hooks import MXFP8


def decoded(whole: torch.Tensor, codec: Any, compute: torch.dtype) -> torch.Tensor:
    """A whole parameter in the compute dtype after the codec, by its definition: block by block, on one device."""
    whole = whole.detach().to(compute).contiguous()
    if whole.ndim < 2 or not whole.numel():
        return whole.clone()
    result = whole.float().clone()
    nbytes = whole.numel()
    for matrix in result.view(-1, *whole.shape[-2:]):
        if isinstance(codec, MXFP8):
            for columns in matrix.split(32, 1):  # all rows of 32 columns
                columns.copy_(_in_mx(columns, codec.dtype))
                nbytes += len(columns)
        else:
            for rows in matrix.split(codec.block_shape[0]):
                for tile in rows.split(codec.block_shape[1], 1):
                    tile.copy_(_in_tile(tile))
                    nbytes += 4
    return result.to(compute) if nbytes < whole.nbytes else whole.clone()


def _in_mx(blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float32 [rows, columns], a block in each row."""
    emax, largest = {torch.float8_e4m3fn: (8, 448.0), torch.float8_e5m2: (15, 57344.0)}[dtype]
    amax = blocks.abs().max(1, keepdim=True).values
    scale = torch.ldexp(torch.ones(()), torch.frexp(amax).exponent - 1 - emax)
    rounded = (blocks / scale).clamp(-largest, largest).to(dtype).float() * scale
    return rounded.where(amax.isfinite(), torch.nan)


def _in_tile(tile: torch.Tensor) -> torch.Tensor:
    """float32 [rows, columns], one block."""
    amax = tile.abs().max()
    if not amax.isfinite():
        return torch.full_like(tile, torch.nan)
    scale = amax / 448
    return (tile / scale).to(torch.float8_e4m3fn).float() * scale if amax else tile


class Sent(TorchDispatchMode):
    """Sizes in bytes of the inputs of all-gathers."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name == "c10d::_allgather_base_":
            self.nbytes.append(args[1].nbytes)
        return func(*args, **(kwargs or {}))
