"""Losses of tokens: functions from the logits and the target of each token to its loss, of which a run trains with one.

A user's own function takes the place of these. It gets some tokens at a time where logits are computed in chunks. The
functions here also take logits that tensor parallelism has cut over the vocabulary. Nothing here knows models or
batches.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

#: From logits [T, V], float32 or wider, and targets [T], int64 in [0, V), to the loss of each token, float [T].
TokenLoss = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(
    logits: Tensor, targets: Tensor, label_smoothing: float = 0.0, ignore_index: int = -100
) -> Tensor:
    """Return the cross-entropy of each token, float [T].

    Args:
        logits: float [T, V].
        targets: int64 [T].
        label_smoothing: the part of the target's probability that is spread evenly over all classes.
        ignore_index: the target of tokens whose loss is 0; not with ``label_smoothing``.
    """
    losses_T = F.cross_entropy(logits, targets, reduction="none", ignore_index=ignore_index)
    if not label_smoothing:
        return losses_T
    # torch's own argument refuses logits that are cut over the vocabulary, and inside ``loss_parallel`` their
    # log_softmax has right gradients for the cross-entropy alone.
    evenly_T = logits.logsumexp(-1) - logits.mean(-1)
    return (1 - label_smoothing) * losses_T + label_smoothing * evenly_T


def z_loss(logits: Tensor, targets: Tensor, weight: float = 1e-4) -> Tensor:
    """Return the cross-entropy of each token plus ``weight`` times the squared logarithm of its softmax's denominator.

    The second term keeps logits from drifting, which makes long runs in low precision stable (PaLM, Chowdhery et al.,
    2022, section 5).

    Args:
        logits: float [T, V].
        targets: int64 [T].
        weight: the factor of the second term.
    """
    return cross_entropy(logits, targets) + weight * logits.logsumexp(-1).square()


def losses_of_tokens(
    logits: Tensor, targets: Tensor, loss: TokenLoss = cross_entropy, ignore_index: int = -100
) -> Tensor:
    """Return the loss of every token, whole on every rank: float32 or wider [T], 0 where the target is ignored.

    Args:
        logits: float [..., V]; a DTensor if ranks share them.
        targets: int64 [...].
        loss: the function. It gets logits and target 0 for tokens that are ignored, and its result for them does not
            count. It runs without autocast.
        ignore_index: the target of tokens without a loss.

    Raises:
        ValueError: ``loss`` returned something other than one number for each token.
    """
    logits_TV = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2)
    targets_T = targets.flatten()
    if loss is cross_entropy:  # it leaves out ignored targets itself, without further kernels
        losses_T = cross_entropy(logits_TV, targets_T, ignore_index=ignore_index)
        return losses_T.full_tensor() if isinstance(losses_T, DTensor) else losses_T
    counted_T = targets_T != ignore_index
    if not isinstance(logits_TV, DTensor):
        # Backward multiplies by zero what the function does with ignored tokens: it must be finite for them.
        logits_TV = logits_TV.masked_fill(~counted_T[:, None], 0)
    with torch.autocast(logits_TV.device.type, enabled=False):
        losses_T = loss(logits_TV, targets_T.where(counted_T, 0))
    if (
        not isinstance(losses_T, Tensor)
        or losses_T.shape != targets_T.shape
        or not losses_T.is_floating_point()
    ):
        found = (
            f"shape {list(losses_T.shape)} and dtype {str(losses_T.dtype).removeprefix('torch.')}"
            if isinstance(losses_T, Tensor)
            else f"a {type(losses_T).__name__}"
        )
        name = getattr(loss, "__qualname__", type(loss).__name__)
        raise ValueError(
            f"the loss {name}: expected one floating-point number for each of {len(targets_T)} tokens, found {found}; "
            "do not reduce over tokens"
        )
    if isinstance(losses_T, DTensor):
        losses_T = losses_T.full_tensor()
    return losses_T.to(torch.promote_types(losses_T.dtype, torch.float32)).where(counted_T, 0.0)
