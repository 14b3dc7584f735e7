"""Text from a model that maps token numbers to logits, one token after another."""

from __future__ import annotations

import math
from collections.abc import Collection

import torch
from torch import Tensor, nn

from shardwright.train.errors import UserError
from shardwright.train.models.packed import whole


class NonFiniteLogitsError(UserError):
    """The model's logits are not finite, so no token can be drawn."""


@torch.no_grad()
def sample(
    model: nn.Module,
    prompt: Tensor,
    *,
    count: int,
    temperature: float,
    top_k: int,
    seed: int,
    context: int,
    device: torch.device,
    multiple: int = 1,
    ends: Collection[int] = (),
) -> list[int]:
    """At most `count` token numbers that follow `prompt` (int64, 1-D, not empty). The model sees the last `context`
    tokens. Before the first token in `ends` the text is over, and that token is left out.

    The text that it sees is filled up to a `multiple`, which divides `context`, as sequence parallelism needs it.

    Temperature 0 takes the likeliest token; `top_k` 0 draws from all. Drawn on the CPU from a generator of its own,
    so ranks that run the same model in step draw the same tokens.

    Raises NonFiniteLogitsError, on all ranks that run the model in step.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = prompt.tolist()
    training = model.training
    model.eval()
    try:
        for _ in range(count):
            window = tokens[-context:]
            window_1S = torch.tensor([window + [0] * (-len(window) % multiple)], device=device)
            logits_V = model(window_1S)[0, len(window) - 1]
            token = _draw(whole(logits_V).float().cpu(), temperature, top_k, generator)
            if token in ends:
                break
            tokens.append(token)
    finally:
        model.train(training)
    return tokens[len(prompt) :]


def _draw(logits_V: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    if not math.isfinite(largest := float(logits_V.max())):  # a model may exclude tokens with -inf
        raise NonFiniteLogitsError(
            f"expected finite logits, found {largest}: the training has diverged. Use a checkpoint of an earlier step, "
            "or train with a lower optimizer.lr"
        )
    if temperature == 0:
        return int(logits_V.argmax())
    if top_k:
        candidates, places = logits_V.topk(min(top_k, len(logits_V)))
    else:
        candidates, places = logits_V, torch.arange(len(logits_V))
    choice = torch.multinomial(torch.softmax(candidates / temperature, dim=-1), 1, generator=generator)
    return int(places[choice])
