"""The kernel of scaled-dot-product attention that a device chooses, for traces on another device.

On the CPU ``scaled_dot_product_attention`` becomes the CPU's kernel, which saves other tensors for backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_aten = torch.ops.aten


@contextmanager
def as_on_cuda() -> Iterator[None]:
    """Inside the context attention takes the kernel that PyTorch takes on a GPU of compute capability 8.0 or newer.

    Flash attention: float16 or bfloat16, no mask, heads of at most 256 elements. The memory-efficient kernel: other
    masks and dtypes. Else the plain formula. Source: the rules of ``sdp_utils.cpp`` in PyTorch 2.11 to 2.13.
    """
    plain = F.scaled_dot_product_attention

    def chosen(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        half = query.dtype in (torch.float16, torch.bfloat16)
        if type(query) is not Tensor or query.dim() != 4:
            return plain(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        if half and attn_mask is None and query.shape[-1] <= 256:
            return _aten._scaled_dot_product_flash_attention(
                query, key, value, dropout_p, is_causal, False, scale=scale
            )[0]
        if query.dtype in (torch.float16, torch.bfloat16, torch.float32):
            if query.shape[1] != key.shape[1]:
                times = query.shape[1] // key.shape[1]
                key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
            saves = query.requires_grad or key.requires_grad or value.requires_grad
            return _aten._scaled_dot_product_efficient_attention(
                query, key, value, attn_mask, saves, dropout_p, is_causal, scale=scale
            )[0]
        return plain(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

    F.scaled_dot_product_attention = chosen
    try:
        yield
    finally:
        F.scaled_dot_product_attention = plain
