"""Memory that kernels of a GPU take beside their results, from PyTorch's allocator.

Sources: ``mha_bwd`` in ``aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp`` and
``aten/src/ATen/cuda/CublasHandlePool.cpp`` of PyTorch 2.13.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "addbmm", "_scaled_mm"})
#: Bytes that cuBLAS keeps for each stream from the first product on: of compute capability 9.0, others need 8.1 MiB.
CUBLAS = 32 << 20
_FLASH_BACKWARD = "_scaled_dot_product_flash_attention_backward"
TAKING = PRODUCTS | {_FLASH_BACKWARD}  #: operations that take memory


def workspaces(name: str, arguments: Sequence[Any]) -> list[tuple[str, int]]:
    """Return the memory that the kernel of an operation takes until it ends: words and bytes of each piece."""
    if name != _FLASH_BACKWARD:
        return []
    _, query, key = arguments[:3]
    batch, heads, length, width = query.shape
    of_keys, keys = key.shape[1:3]
    rounded = -(-length // 128) * 128
    numbers = [
        ("row sums of the gradient", batch * heads * rounded * 4),
        ("sums of gradients of queries", batch * rounded * heads * (-(-width // 32) * 32) * 4),
    ]
    if of_keys != heads:  # groups of heads: the gradient of each head, before those of a group are added up
        each = batch * keys * heads * width * key.element_size()
        numbers += [("gradients of keys", each), ("gradients of values", each)]
    return numbers
