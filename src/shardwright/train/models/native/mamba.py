"""A Mamba-2 layer in plain torch.

Nothing about sharding, processes or devices may enter this file: engines work on the layer from outside. Source:
"Transformers are SSMs" (Dao and Gu, 2024). Shapes in names: B sequences, S tokens, D width, C channels of the
convolution; `scan` has the letters of the scan.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.train.config.shapes.presets import HybridConfig
from shardwright.train.models.native.decoder import Linear, truncated_normal
from shardwright.train.models.native.scan import selective_scan
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
        """The part in which tokens see earlier ones: convolution and scan, [B, S, H, P] of [B, S, C] and the steps."""
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
        """The convolution that sees zeros before each document. Summed in float32, as a convolution kernel does."""
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
