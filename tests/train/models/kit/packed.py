"""Samples of several documents, and what belongs to one of them: its logits and its gradients."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

#: The lengths of the documents of each sample. The last ones stand for padding.
LENGTHS = ((9, 13, 7, 3), (1, 5, 20, 6))
LENGTH = sum(LENGTHS[0])
#: By sample and number: a first document, one in the middle, a last one, and one of a single token.
PLACES = ((0, 0), (0, 1), (1, 3), (1, 0), (1, 2))


def documents() -> Tensor:
    """The number of each token's document: int32 [B, S]."""
    rows = [[n for n, length in enumerate(lengths) for _ in range(length)] for lengths in LENGTHS]
    return torch.tensor(rows, dtype=torch.int32)


def positions() -> Tensor:
    """The position of each token in its document: int64 [B, S]."""
    return torch.tensor([[p for length in lengths for p in range(length)] for lengths in LENGTHS])


def tokens(vocab_size: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (len(LENGTHS), LENGTH), generator=generator)


def targets(tokens_BS: Tensor, document: tuple[int, int]) -> Tensor:
    """The next token of each token of one document that has one; -100 for all others."""
    sample = document[0]
    own_BS = places(document)
    following_BS = tokens_BS.roll(-1, dims=1)
    own_BS[sample, own_BS[sample].nonzero()[-1]] = False
    return torch.where(own_BS, following_BS, -100)


def places(document: tuple[int, int]) -> Tensor:
    sample, number = document
    own_BS = torch.zeros(len(LENGTHS), LENGTH, dtype=torch.bool)
    own_BS[sample] = documents()[sample] == number
    return own_BS


def with_other_tokens(tokens_BS: Tensor, document: tuple[int, int], vocab_size: int) -> Tensor:
    """Every token of every other document is another one."""
    shift = torch.randint(1, vocab_size, tokens_BS.shape, generator=torch.Generator().manual_seed(7))
    return torch.where(places(document), tokens_BS, (tokens_BS + shift) % vocab_size)


class Belongings(NamedTuple):
    """Values that belong to a document: its logits, and of the loss over it alone the gradients of embedded tokens and
    of parameters, by name."""

    logits: Tensor
    further: Tensor | None
    embedded: Tensor
    gradients: dict[str, Tensor]


Loss = Callable[[Any, Tensor], tuple[Tensor, Tensor, Tensor | None]]
"""From what forward returns and targets [B, S] to the loss, the logits, and those of the token after the next."""


def belongings(
    model: nn.Module, embedding: nn.Module, run: Callable[[Tensor], Any], loss_of: Loss, inputs: Tensor,
    document: tuple[int, int],
) -> Belongings:  # fmt: skip
    """`run` calls the model, whose first layer is `embedding`."""
    device = inputs.device
    own_BS = places(document).to(device)
    outputs: list[Tensor] = []
    handle = embedding.register_forward_hook(functools.partial(keep, outputs))
    loss, logits, further = loss_of(run(inputs), targets(inputs.cpu(), document).to(device))
    handle.remove()
    model.zero_grad()
    loss.backward()
    assert outputs[0].grad is not None
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    if further is not None:
        # The last token has no next one in its document.
        inside = own_BS[:, :-1] & own_BS[:, 1:]
        further = further[:, : inside.shape[1]][inside].detach()
    return Belongings(logits[own_BS].detach(), further, outputs[0].grad[own_BS], gradients)


def keep(outputs: list[Tensor], module: nn.Module, inputs: object, output: Tensor) -> Tensor:
    """A forward hook after which `outputs` has the output, and that its gradient."""
    output.requires_grad_().retain_grad()
    outputs.append(output)
    return output


def cross_entropy(logits: Tensor, targets_BS: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets_BS.flatten(), reduction="sum")


def differing(one: Belongings, other: Belongings, but: tuple[str, ...] = ()) -> list[str]:
    """The values that differ in any bit, except in gradients of parameters whose names end so."""
    pairs = {"logits": (one.logits, other.logits), "embedded": (one.embedded, other.embedded)}
    if one.further is not None and other.further is not None:
        pairs["further"] = (one.further, other.further)
    pairs |= {
        name: (g, other.gradients[name])
        for name, g in one.gradients.items()
        if not name.endswith(but or ("\0",))
    }
    return [name for name, (a, b) in pairs.items() if not torch.equal(a, b)]


@contextmanager
def deterministic() -> Iterator[None]:
    """Operations give the same bits in every call. On CUDA torch raises an error without cuBLAS's setting."""
    with mock.patch.dict(os.environ, CUBLAS_WORKSPACE_CONFIG=":4096:8"):
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)
