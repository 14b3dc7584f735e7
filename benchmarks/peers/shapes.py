"""The models of the comparison, their data and their loss. Nothing here knows an engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from shardwright.train.models.native.hybrid import Hybrid, HybridConfig
from shardwright.train.models.native.llama import Llama, LlamaConfig

VOCABULARY = 256


@dataclass(frozen=True)
class Shape:
    """A model by its number of units beside the root, and the length of its one sequence a rank."""

    title: str
    seq: int
    make: Callable[[int], nn.Module]

    def model(self) -> nn.Module:
        """The same weights in every process."""
        torch.manual_seed(0)
        return self.make(self.seq)

    def tokens(self, step: int, rank: int, ranks: int) -> Tensor:
        """The sequence of one rank in one step: int64 [1, S], different for every rank and step."""
        generator = torch.Generator().manual_seed(step * ranks + rank)
        return torch.randint(0, VOCABULARY, (1, self.seq), generator=generator)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The units of every engine that has units; the rest of the model is the root's."""
    return list(model.layers)  # type: ignore[arg-type]


def largest_unit(model: nn.Module) -> int:
    """Elements of the largest unit."""
    sizes = [sum(p.numel() for p in block.parameters()) for block in blocks_of(model)]
    return max(*sizes, sum(p.numel() for p in model.parameters()) - sum(sizes))


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens).float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def _llama(layers: int, dim: int, seq: int) -> nn.Module:
    shape = LlamaConfig(
        dim=dim, n_layers=layers, n_heads=8, n_kv_heads=8, ffn_dim=4 * dim, vocab_size=VOCABULARY, max_seq_len=seq
    )  # fmt: skip
    return Llama(shape)


def _hybrid(dim: int, pattern: str, seq: int) -> nn.Module:
    shape = HybridConfig(
        dim=dim, pattern=pattern, n_heads=4, n_kv_heads=2, head_dim=dim // 4, ffn_dim=3 * dim,
        vocab_size=VOCABULARY, max_seq_len=seq, mamba_heads=4, mamba_head_dim=dim // 2, mamba_state=32,
        n_experts=8, top_k=2, expert_dim=dim, shared_dim=dim,
    )  # fmt: skip
    return Hybrid(shape)


SHAPES = {
    "wide": Shape("Llama, 6 layers, d 512", 128, partial(_llama, 6, 512)),
    "deep": Shape("Llama, 24 layers, d 128", 128, partial(_llama, 24, 128)),
    "hybrid": Shape(
        "hybrid of Mamba-2, attention, experts and MLP, 8 layers, d 256",
        128,
        partial(_hybrid, 256, "M*ME*-ME"),
    ),
    "tiny": Shape("Llama, 2 layers, d 32", 16, partial(_llama, 2, 32)),
}
DEFAULT_SHAPES = ("wide", "deep", "hybrid")
HOST_SHAPE = Shape("Llama, 24 layers, d 32, 8 tokens", 8, partial(_llama, 24, 32))
HOST_UNITS = 25
