"""The protocol of ``fsdp_pre_all_gather``: a weight is sent in bfloat16 and computed with in its own dtype."""

from __future__ import annotations

from typing import Any

import torch


def pre_all_gather(local: torch.Tensor, mesh: Any, size: torch.Size, *_: Any) -> Any:
    padded = local.new_zeros(-(-size[0] // mesh.size()), *size[1:])
    padded[: local.size(0)] = local
    return (padded.bfloat16(),), None


def post_all_gather(outputs: Any, dtype: torch.dtype, out: torch.Tensor | None) -> Any:
    if out is not None:
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(outputs[0][: out.size(0)])
        return None
    whole = outputs[0].to(dtype)
    return whole, (whole,)
