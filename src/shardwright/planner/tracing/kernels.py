"""Functions that run otherwise on a GPU than on the CPU, mostly by another kernel.

Traces save for backward what the GPU's kernel saves.

Sources: ``sdp_utils.cpp``, ``attention.cpp``, ``layer_norm.cpp`` and
``GroupedMMUtils.h`` in ``aten/src/ATen/native`` of PyTorch 2.13.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwright.engine.compat import fill_truncated_normal
from shardwright.optim import chunks_of_devices

_aten = torch.ops.aten


@contextmanager
def kernels_of_cuda() -> Iterator[None]:
    """Let functions run as on a GPU of compute capability 8.0 or newer, inside this context."""
    before = F.scaled_dot_product_attention, F.rms_norm
    for function, mine in zip(before, (_attention, _rms_norm), strict=True):
        # Others find the function to replace by its name, as torch's context_parallel does.
        mine.__name__ = function.__name__
        setattr(F, function.__name__, mine)
    try:
        with chunks_of_devices():
            yield
    finally:
        F.scaled_dot_product_attention, F.rms_norm = before


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Flash attention in float16 and bfloat16 without a mask, for heads of one width; else the memory-efficient kernel,
    which has no groups of heads; else the formula."""
    grouped = query.shape[-3] != key.shape[-3]
    width, of_values = query.shape[-1], value.shape[-1]
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        zeros = torch.zeros_like(attn_mask, dtype=query.dtype)
        attn_mask = zeros.masked_fill_(attn_mask.logical_not(), float("-inf"))
    half = query.dtype in (torch.float16, torch.bfloat16)
    if query.dim() == 4 and half and attn_mask is None and width == of_values and width <= 256:
        flash = _aten._scaled_dot_product_flash_attention
        return flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    step = 16 // query.dtype.itemsize  # elements
    aligned = width % step == 0 and of_values % step == 0
    if query.dim() == 4 and not grouped and aligned and (half or query.dtype == torch.float32):
        efficient = _aten._scaled_dot_product_efficient_attention
        saves = query.requires_grad or key.requires_grad or value.requires_grad
        return efficient(query, key, value, attn_mask, saves, dropout_p, is_causal, scale=scale)[0]
    formula = _aten._scaled_dot_product_attention_math
    return formula(
        query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
    )[0]


@contextmanager
def reads_no_numbers(small: int) -> Iterator[None]:
    """Keep functions of torch from looking at numbers that a trace does not have, inside this context.

    ``trunc_normal_`` of tensors of more than ``small`` bytes draws once, in the memory of torch's loop, which would
    wait for numbers inside the bounds. ``one_hot`` with a number of classes checks no index, as on a GPU.
    """
    draw, one_hot = getattr(torch.nn.init, fill_truncated_normal), F.one_hot

    def fill(tensor: Tensor, mean: float, std: float, a: float, b: float, generator: Any = None) -> Tensor:
        if tensor.is_meta or tensor.untyped_storage().nbytes() <= small:
            return draw(tensor, mean, std, a, b, generator=generator)  # type: ignore[no-any-return]
        with torch.no_grad():
            tensor.normal_(mean, std, generator=generator)
            outside = (tensor < a) | (tensor > b)
            tensor.copy_(torch.where(outside, torch.empty_like(tensor).normal_(mean, std), tensor))
        return tensor

    def encoded(tensor: Tensor, num_classes: int = -1) -> Tensor:
        if num_classes < 1:
            return one_hot(tensor, num_classes)  # its size depends on the largest index
        zeros = tensor.new_zeros((*tensor.shape, num_classes))
        return zeros.scatter_(-1, tensor.unsqueeze(-1), 1)

    setattr(torch.nn.init, fill_truncated_normal, fill)
    F.one_hot = encoded
    try:
        yield
    finally:
        setattr(torch.nn.init, fill_truncated_normal, draw)
        F.one_hot = one_hot


_plain_rms_norm = F.rms_norm


def _rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Compute the norm in one kernel, if the dtypes agree. It saves its input and a number for each row."""
    if torch.compiler.is_compiling():  # which makes a kernel of its own of the formula
        return _plain_rms_norm(input, list(normalized_shape), weight, eps)
    if weight is not None and weight.dtype != input.dtype:
        return _plain_rms_norm(input, list(normalized_shape), weight, eps)
    return _FusedNorm.apply(input, weight, len(normalized_shape))  # type: ignore[no-any-return]


class _FusedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor | None, dims: int) -> Tensor:  # type: ignore[override]
        inverse = torch.empty(input.shape[:-dims], dtype=torch.float32, device=input.device)
        ctx.save_for_backward(input, weight, inverse)
        return torch.empty_like(input)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        input, weight, _ = ctx.saved_tensors
        of_input = torch.empty_like(input) if ctx.needs_input_grad[0] else None
        of_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        return of_input, of_weight, None


def _grouped_mm(
    one: Tensor,
    other: Tensor,
    offs: Tensor | None = None,
    bias: Any = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Rows of 16 bytes or a multiple, as ``create_grouped_gemm_output_tensor`` makes them."""
    size: tuple[int, ...]
    if one.dim() == other.dim() == 2:
        assert offs is not None
        size = offs.shape[0], one.shape[0], other.shape[1]
    elif one.dim() == other.dim():
        size = one.shape[0], one.shape[1], other.shape[2]
    else:
        size = one.shape[-2], other.shape[-1]
    dtype = out_dtype or one.dtype
    step = 16 // dtype.itemsize
    row = -(-size[-1] // step) * step
    stride = (size[-2] * row, row, 1)[-len(size) :]
    return torch.empty_strided(size, stride, dtype=dtype, device="meta")


def _lstm(*arguments: Any) -> tuple[Tensor, ...]:
    """Return a layer of oneDNN, which keeps gates and states for backward: PyTorch's meta kernel says that it keeps
    nothing.

    The bytes are those of oneDNN 3 in float32, within 2% from 200 units of the hidden state on.
    """
    input, hidden_size, trains = arguments[0], arguments[10], arguments[15]
    *results, workspace = _aten.mkldnn_rnn_layer.default(*arguments)
    if trains:
        steps, samples = input.shape[:2]
        numbers = samples * (steps * (15 * hidden_size + 128) + 10 * hidden_size)
        workspace = workspace.new_empty(4 * numbers)
    return *results, workspace


#: Meta kernels in place of PyTorch's: one refuses float32, the other makes no memory for backward.
META = {"aten::_grouped_mm": _grouped_mm, "aten::mkldnn_rnn_layer": _lstm}
