"""A linear layer with an adapter beside it, and dropout that depends on the sample alone.

Sources: "LoRA" (Hu et al., 2021), "A Rank Stabilization Scaling Factor" (Kalajdzievski, 2023, rslora), "DoRA" (Liu et
al., 2024). Nothing about sharding may enter this file: engines work on the layers from outside.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.activations import piece_of_call

_32_BITS = 0xFFFFFFFF


class Dropout:
    """Dropout whose choice is a function of seed, layer, sample, token and channel.

    So a recomputed forward pass makes the same choice, and so does any split of a batch into ranks and micro-batches.
    Integers are mixed by tensor operations alone: a compiled block stays one graph.
    """

    def __init__(self, fraction: float, seed: int) -> None:
        self.fraction = fraction
        self.seed = seed
        #: Numbers of the samples of the micro-batch, int64 [B].
        self.samples: Tensor | None = None
        #: The part of the tokens of the samples, counted in parts of equal length.
        self.part = 0

    def set_samples(self, samples: Tensor, part: int = 0) -> None:
        """Use these numbers of samples, int64 [B], and this part of their tokens, from the next forward pass on."""
        self.part = part
        if self.samples is not None and self.samples.shape == samples.shape:
            self.samples.copy_(samples)  # the same memory, which a CUDA graph reads
        else:
            self.samples = samples.clone()

    def __call__(self, x: Tensor, layer: int) -> Tensor:
        """x [B, ..., D], or [B * S, D], with a fraction of its elements set to 0 and the others scaled up."""
        if self.samples is None:
            raise RuntimeError(
                "An adapter with dropout was called before set_samples. Call "
                "shardwright.train.finetune.adapters.set_samples(model, samples) before each forward in training."
            )
        return x * self.kept(x.shape, layer).to(x.dtype) * (1 / (1 - self.fraction))

    def kept(self, shape: torch.Size, layer: int) -> Tensor:
        """Return the elements of a tensor of that shape that are kept: bool."""
        assert self.samples is not None
        samples, width = self.samples, shape[-1]
        tokens = shape[:-1].numel()
        first, rows = piece_of_call() or (0, tokens)
        if rows % len(samples):
            samples = samples[:1]  # tokens that a router has chosen: no longer in rows of samples
        device = samples.device
        key_B = _mixed(_mixed((samples >> 32) + (self.seed & _32_BITS)) ^ (samples & _32_BITS))
        key_B = _mixed(key_B ^ ((layer + 1) * 0x1B873593 & _32_BITS))
        length = rows // len(samples)
        place_S = torch.arange(self.part * length, (self.part + 1) * length, device=device)
        key_R = _mixed(key_B[:, None] ^ _mixed(place_S + 0x3C6EF372)).flatten()[first : first + tokens]
        channel_D = _mixed(torch.arange(width, device=device) + 0x5BD1E995)
        bits_RD = _mixed(key_R[:, None] ^ channel_D)
        return (bits_RD >= int(self.fraction * 2**32)).view(shape)


def _mixed(x: Tensor) -> Tensor:
    """32 random-looking bits for each number below 2**32, both int64. No product exceeds 63 bits."""
    x = x & _32_BITS
    x = ((x >> 16) ^ x) * 0x45D9F3B & _32_BITS
    x = ((x >> 16) ^ x) * 0x45D9F3B & _32_BITS
    return (x >> 16) ^ x


class Adapter(nn.Module):
    """The addition to a linear layer beside its own weights: y = W x + scale B A x.

    A class that has this one before a class of linear layers is made by :func:`adapted_class`. The names of the layer's
    own parameters stay as they are.
    """

    weight: Tensor
    bias: Tensor | None
    lora_a: nn.Parameter  #: float32 [rank, inputs]
    lora_b: nn.Parameter  #: float32 [outputs, rank]
    lora_magnitude: nn.Parameter | None  #: of dora: float32 [outputs]
    scale: float
    dropout: Dropout | None
    number: int  #: of the layer, for dropout
    called: bool  #: whether an eager forward has reached the layer

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not torch.compiler.is_compiling():
            self.called = True
        base: Tensor = super().forward(x, *args, **kwargs)
        x = x.to(self.lora_a.dtype)
        if self.dropout is not None and self.training:
            x = self.dropout(x, self.number)
        low = F.linear(F.linear(x, self.lora_a), self.lora_b)
        if self.lora_magnitude is None:
            return (base + low * self.scale).to(base.dtype)
        # As in the paper's section 4.3 the length is a constant for backward.
        ratio = (self.lora_magnitude / row_lengths(self.direction()).to(low.dtype)).to(low.dtype)
        own = base if self.bias is None else base - self.bias
        return (base + ((ratio - 1) * own + ratio * low * self.scale)).to(base.dtype)

    @torch.no_grad()
    def direction(self) -> Tensor:
        """W + scale B A in float32, which rounds once."""
        low = self.lora_b.float() @ self.lora_a.float()
        return self.weight.float() + low * self.scale

    @torch.no_grad()
    def merged(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the weight of a plain layer that does the same: computed in float32, and rounded once to `dtype`, or
        to the dtype of the layer's own weight."""
        whole = self.direction()
        if self.lora_magnitude is not None:
            whole = (self.lora_magnitude.float() / row_lengths(whole)).unsqueeze(1) * whole
        return whole.to(self.weight.dtype if dtype is None else dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, rank={self.lora_a.shape[0]}, scale={self.scale:g}"


def row_lengths(weight: Tensor) -> Tensor:
    """Euclidean lengths of the rows of [outputs, inputs]: float32 [outputs]."""
    return torch.linalg.vector_norm(weight.float(), dim=1)


@functools.cache
def adapted_class(of: type[nn.Linear]) -> type[nn.Linear]:
    """Return the class of linear layers `of` with an adapter."""
    return type(f"Adapted{of.__name__}", (Adapter, of), {"__module__": __name__})


def plain_class(of: type[nn.Module]) -> type[nn.Module]:
    """Return the class that :func:`adapted_class` was called with."""
    base: type[nn.Module] = of.__bases__[1]
    return base
