"""A Mamba-2 layer in plain torch, and its selective scan by chunks: state space duality.

Within a chunk the recurrence is a matrix product with a mask of decays, between chunks it goes on over one state per
chunk. Nothing about sharding, processes or devices may enter this file: engines work on the layer from outside.
Source: "Transformers are SSMs" (Dao and Gu, 2024), section 6. Shapes in names: B sequences, S tokens, D width, and C
channels of the convolution. In the scan H heads, P width of a head, G groups, R heads of a group, N width of the state,
C chunks, Q tokens of a chunk.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.train.config.shapes.presets import HybridConfig
from shardwright.train.models.native.decoder import Linear, truncated_normal
from shardwright.train.models.packed import Documents


class Mamba2(nn.Module):
    """Projection, short causal convolution, selective scan, gated norm of every group, projection back."""

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        self.config = config
        self.in_proj = Linear(config.dim, config.mamba_in_dim)
        # Three dimensions as in `nn.Conv1d`: optimizers that treat matrices in a way of their own leave it alone.
        self.conv_weight = nn.Parameter(torch.empty(config.conv_dim, 1, config.conv_width))
        self.conv_bias = nn.Parameter(torch.empty(config.conv_dim))
        self.dt_bias = nn.Parameter(torch.empty(config.mamba_heads))
        self.a_log = nn.Parameter(torch.empty(config.mamba_heads))
        self.skip = nn.Parameter(torch.empty(config.mamba_heads))
        self.norm_weight = nn.Parameter(torch.empty(config.mamba_dim))
        self.out_proj = Linear(config.mamba_dim, config.dim)

    def forward(self, x_BSD: Tensor, documents: Documents | None = None) -> Tensor:
        c = self.config
        gate, convolved, dt_BSH = self.in_proj(x_BSD).split([c.mamba_dim, c.conv_dim, c.mamba_heads], dim=-1)
        y_BSHP = self.mixed(convolved, dt_BSH, documents)
        return self.out_proj(self.normalised(y_BSHP.flatten(2) * F.silu(gate)))

    def mixed(self, convolved: Tensor, dt_BSH: Tensor, documents: Documents | None) -> Tensor:
        """Return the part in which tokens see earlier ones: convolution and scan, [B, S, H, P] of [B, S, C] and the
        steps."""
        c = self.config
        if documents is None:
            padded = F.pad(convolved.transpose(1, 2), (c.conv_width - 1, 0))
            convolved = F.silu(
                F.conv1d(padded, self.conv_weight, self.conv_bias, groups=c.conv_dim)
            ).transpose(1, 2)
        else:
            convolved = F.silu(self.convolved_within(documents, convolved))
        shared = c.mamba_groups * c.mamba_state
        x, b, c_ = convolved.split([c.mamba_dim, shared, shared], dim=-1)
        x_BSHP = x.unflatten(-1, (c.mamba_heads, c.mamba_head_dim))
        states = (c.mamba_groups, c.mamba_state)
        dt_BSH = F.softplus(dt_BSH.float() + self.dt_bias.float())
        y_BSHP = selective_scan(
            x_BSHP, dt_BSH, -self.a_log.float().exp(), b.unflatten(-1, states), c_.unflatten(-1, states), c.chunk_size,
            None if documents is None else documents.starts_BS,
        )  # fmt: skip
        return y_BSHP + self.skip[:, None] * x_BSHP

    def convolved_within(self, documents: Documents, x_BSC: Tensor) -> Tensor:
        """Return the convolution that sees zeros before each document. Summed in float32, as a convolution kernel
        does."""
        total_BSC = self.conv_bias.float()
        for back, weight_C in enumerate(self.conv_weight.float()[:, 0].flip(-1).unbind(-1)):
            earlier_BSC = F.pad(x_BSC, (0, 0, back, 0))[:, : x_BSC.shape[1]].float()
            outside_BS1 = (documents.ages_BS < back).unsqueeze(-1)
            total_BSC = total_BSC + earlier_BSC.masked_fill(outside_BS1, 0) * weight_C
        return total_BSC.to(x_BSC.dtype)

    def normalised(self, y: Tensor) -> Tensor:
        """Every group by itself, as in Nemotron-H: ranks that divide groups need nothing of each other."""
        c = self.config
        groups = y.unflatten(-1, (c.mamba_groups, -1))
        normalised = F.rms_norm(groups, groups.shape[-1:], eps=c.norm_eps).flatten(-2)
        return normalised.to(y.dtype) * self.norm_weight

    def draw(self, residual_std: float) -> None:
        """As in the reference code of Mamba-2: steps from 0.001 to 0.1 and decays from 1 to 16, spread evenly."""
        c = self.config
        truncated_normal(self.in_proj.weight, 0.02)
        truncated_normal(self.out_proj.weight, residual_std)
        nn.init.uniform_(self.conv_weight, -(c.conv_width**-0.5), c.conv_width**-0.5)
        nn.init.zeros_(self.conv_bias)
        dt = nn.init.uniform_(self.dt_bias, math.log(1e-3), math.log(1e-1)).exp()
        self.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))  # the inverse of softplus
        self.a_log.uniform_(1, 16).log_()
        nn.init.ones_(self.skip)
        nn.init.ones_(self.norm_weight)


def decays(log_decay: Tensor) -> Tensor:
    """exp of the sum of `log_decay[..., j + 1 : i + 1]` for all i >= j, 0 for the others: [..., T] to [..., T, T].

    Every sum is added up by itself. As the difference of two running sums, which grow with the chunk, it would lose the
    digits that matter near the diagonal.
    """
    length = log_decay.shape[-1]
    ones = torch.ones(length, length, dtype=torch.bool, device=log_decay.device)
    terms = log_decay[..., None].expand(*log_decay.shape, length).masked_fill(~ones.tril(-1), 0)
    return terms.cumsum(-2).masked_fill(~ones.tril(), -torch.inf).exp()


def selective_scan(
    x_BSHP: Tensor,
    dt_BSH: Tensor,
    a_H: Tensor,
    b_BSGN: Tensor,
    c_BSGN: Tensor,
    chunk_size: int,
    starts_BS: Tensor | None = None,
) -> Tensor:
    """y_t = C_t h_t with h_t = exp(dt_t a) h_(t-1) + dt_t x_t B_t and h_(-1) = 0, of every head: [B, S, H, P].

    h_(t-1) is also 0 at every token of `starts_BS` (bool). Tokens behind it have the same bits whatever is before it.
    Heads of one group share B and C. `dt_BSH` must be positive and `a_H` negative. Computed in float32, also under
    autocast: decays close to one, taken to high powers, do not survive bfloat16; returned in x's dtype. S need not be
    a multiple of `chunk_size`, which changes the rounding alone. Memory beyond the inputs: B * H * S * chunk_size.
    """
    with torch.autocast(x_BSHP.device.type, enabled=False):
        y_BSHP = _scan(
            x_BSHP.float(), dt_BSH.float(), a_H.float(), b_BSGN.float(), c_BSGN.float(), chunk_size, starts_BS
        )
    return y_BSHP.to(x_BSHP.dtype)


def _scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, chunk_size: int, starts: Tensor | None
) -> Tensor:
    (batch, length, heads, width), (groups, state) = x.shape, b.shape[2:]
    chunk = min(chunk_size, length)
    chunks = -(-length // chunk)

    def cut(t: Tensor, *inner: int) -> Tensor:
        """[B, S, ...] to [B, C, Q, ...]. The tokens that fill the last chunk have dt = 0: they keep the state."""
        padding = [0, 0] * (t.ndim - 2) + [0, chunks * chunk - length]
        return F.pad(t, padding).reshape(batch, chunks, chunk, groups, *inner)

    per_group = heads // groups
    x_BCQGRP = cut(x * dt[..., None], per_group, width)
    b_BCQGN, c_BCQGN = cut(b, state), cut(c, state)
    log_decay = dt * a
    if starts is not None:
        # Every sum over a start is -inf, and its decay exactly 0. A finite state times 0 adds nothing to any sum.
        log_decay = log_decay.masked_fill(starts.unsqueeze(-1), -torch.inf)
    log_BCGRQ = cut(log_decay, per_group).permute(0, 1, 3, 4, 2)

    # Contributions of tokens of one chunk to one another: attention whose scores decay instead of passing a softmax.
    decay_BCGRQQ = decays(log_BCGRQ)
    scores_BCGQQ = torch.einsum("bcign,bcjgn->bcgij", c_BCQGN, b_BCQGN)
    y_BCQGRP = torch.einsum("bcgrij,bcjgrp->bcigrp", scores_BCGQQ.unsqueeze(3) * decay_BCGRQQ, x_BCQGRP)

    # The state each chunk ends with, were it the first one; from these the state each chunk begins with.
    to_end_BCQGR = decay_BCGRQQ[..., -1, :].permute(0, 1, 4, 2, 3)
    ends_BCGRPN = torch.einsum("bcjgrp,bcjgn->bcgrpn", x_BCQGRP * to_end_BCQGR.unsqueeze(-1), b_BCQGN)
    total_BGRC = log_BCGRQ.sum(-1).permute(0, 2, 3, 1)
    # Chunk z begins with what chunk c < z ended with, decayed over the chunks c + 1 .. z - 1.
    between_BGRCC = F.pad(decays(total_BGRC)[..., :-1, :], (0, 0, 1, 0))
    starts_BCGRPN = torch.einsum("bgrzc,bcgrpn->bzgrpn", between_BGRCC, ends_BCGRPN)
    from_start_BCQGR = log_BCGRQ.cumsum(-1).exp().permute(0, 1, 4, 2, 3)
    carried_BCQGRP = torch.einsum("bcign,bcgrpn->bcigrp", c_BCQGN, starts_BCGRPN)
    y_BCQGRP = y_BCQGRP + carried_BCQGRP * from_start_BCQGR.unsqueeze(-1)
    return y_BCQGRP.reshape(batch, chunks * chunk, heads, width)[:, :length]
