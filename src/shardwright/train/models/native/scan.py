"""The selective scan of Mamba-2 in plain torch, by chunks: state space duality.

Within a chunk the recurrence is a matrix product with a mask of decays, between chunks it goes on over one state per
chunk. Source: "Transformers are SSMs" (Dao and Gu, 2024), section 6. Shapes in names: B sequences, S tokens, H heads,
P width of a head, G groups, R heads of a group, N width of the state, C chunks, Q tokens of a chunk.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


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
