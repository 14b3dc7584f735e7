"""Llama as a plain PyTorch model: RMSNorm, rotary embeddings, grouped-query attention, SwiGLU.

Nothing about sharding, processes or devices may enter this file: engines work on the model from outside.
Sources: "LLaMA" (Touvron et al., 2023), "Llama 2" (2023, grouped-query attention) and "The Llama 3 Herd of
Models" (2024, frequencies and their scaling). Shapes in names: B sequences, S tokens, D width, H heads, K
head width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.train.config.shapes.presets import PRESETS, HybridConfig, LlamaConfig, RopeScaling
from shardwright.train.models.native.decoder import (
    EMBEDDING_STD,
    Decoder,
    Embedding,
    Linear,
    truncated_normal,
)
from shardwright.train.models.packed import Documents, attend

__all__ = ["PRESETS", "Llama", "LlamaConfig", "RopeScaling"]


def rope_frequencies(config: LlamaConfig) -> Tensor:
    """Radians per position of each rotated pair: float32, [head_dim / 2].

    Long contexts stretch the slow frequencies and blend towards the fast ones, which keep the order of near
    tokens (Llama 3.1; the reference code is `apply_scaling` of Meta's llama-models).
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device="cpu") / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    turns = scaling.original_max_seq_len * frequencies / (2 * math.pi)  # within the context of pre-training
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * frequencies + (1 - keep) * frequencies / scaling.factor


class Rope:
    """The rotary angles of all tokens of a batch, as cosines and sines in float32, which every block gets.

    Their shape is [S, K], or [B, S, K] if each sample has positions of its own.

    This is a plain class, because engines cast tensors in tuples and dataclasses among the inputs of a block to the
    compute dtype. In bfloat16 the angles of far tokens would be wrong.
    """

    def __init__(self, cos_SK: Tensor, sin_SK: Tensor) -> None:
        self.cos_S1K = cos_SK.unsqueeze(-2)
        self.sin_S1K = sin_SK.unsqueeze(-2)

    def rotate(self, x_BSHK: Tensor) -> Tensor:
        """Turn pair (i, i + K/2) of every head by its position's angle, in float32; returned in x's dtype.

        Pairing the halves is the convention of Hugging Face checkpoints; Meta's own pair neighbours.
        """
        first, second = x_BSHK.float().chunk(2, dim=-1)
        cos, sin = self.cos_S1K, self.sin_S1K
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_BSHK.dtype)


class Attention(nn.Module):
    """Causal self-attention in which groups of query heads share one key and value head.

    Without `rope` it knows the order of tokens only from what other layers have put into them. With `documents` a token
    sees only tokens of its own document.
    """

    def __init__(self, config: LlamaConfig | HybridConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.grouped = config.n_kv_heads != config.n_heads
        self.wq = Linear(config.dim, config.n_heads * config.head_dim)
        self.wk = Linear(config.dim, config.n_kv_heads * config.head_dim)
        self.wv = Linear(config.dim, config.n_kv_heads * config.head_dim)
        self.wo = Linear(config.n_heads * config.head_dim, config.dim)

    def forward(self, x_BSD: Tensor, rope: Rope | None = None, documents: Documents | None = None) -> Tensor:
        heads = (*x_BSD.shape[:2], -1, self.head_dim)
        q_BSHK, k_BSHK = self.wq(x_BSD).view(heads), self.wk(x_BSD).view(heads)
        if rope is not None:
            q_BSHK, k_BSHK = rope.rotate(q_BSHK), rope.rotate(k_BSHK)
        v_BSHK = self.wv(x_BSD).view(heads)
        return self.wo(self.attend(q_BSHK, k_BSHK, v_BSHK, documents).flatten(2))

    def attend(self, q_BSHK: Tensor, k_BSHK: Tensor, v_BSHK: Tensor, documents: Documents | None) -> Tensor:
        """Return the means of the values that each token sees, by its scores: [B, S, H, K]."""
        if documents is not None:
            return attend(q_BSHK, k_BSHK, v_BSHK, documents)
        out_BHSK = F.scaled_dot_product_attention(
            q_BSHK.transpose(1, 2), k_BSHK.transpose(1, 2), v_BSHK.transpose(1, 2),
            is_causal=True, enable_gqa=self.grouped,
        )  # fmt: skip
        return out_BHSK.transpose(1, 2)


class FeedForward(nn.Module):
    """SwiGLU ("GLU Variants Improve Transformer", Shazeer, 2020)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.w1 = Linear(config.dim, config.ffn_dim)
        self.w2 = Linear(config.ffn_dim, config.dim)
        self.w3 = Linear(config.dim, config.ffn_dim)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x_BSD)) * self.w3(x_BSD))


class Block(nn.Module):
    """Attention and feed-forward, each normalised before and added to the residual stream."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.feed_forward = FeedForward(config)
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)

    def forward(self, x_BSD: Tensor, rope: Rope, documents: Documents | None = None) -> Tensor:
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), rope, documents=documents)
        return x_BSD + self.feed_forward(self.ffn_norm(x_BSD))


class Llama(Decoder):
    """A decoder of equal blocks."""

    config: LlamaConfig
    separates = True
    rope_cos: Tensor
    rope_sin: Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config, self.tied = config, config.tied_embeddings
        self.tok_embeddings = Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.output = Linear(config.dim, config.vocab_size)
        if config.tied_embeddings:
            self.output.weight = self.tok_embeddings.weight
        # Tables follow from the configuration, so checkpoints leave them out.
        for name in ("rope_cos", "rope_sin"):
            table = torch.empty(config.max_seq_len, config.head_dim // 2, dtype=torch.float32)
            self.register_buffer(name, table, persistent=False)
        if not self.tok_embeddings.weight.is_meta:
            self.init_weights()

    def forward(
        self,
        tokens_BS: Tensor,
        extras: bool = False,
        documents: Tensor | None = None,
        positions: Tensor | None = None,
        edges: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, None]:
        """Return logits [B, S, V] in the compute dtype for token numbers [B, S] (int64), S at most `max_seq_len`.

        With `documents` [B, S] (int), a number for each token's document, no token sees another document.
        `positions` [B, S] (int64) are counted from the begin of the token's document unless they are given. `extras`
        asks for values beside the logits, and a Llama has none: with it the result is the logits and None.
        """
        length = self.length_of(tokens_BS)
        packed = self.documents_in(documents, tokens_BS, edges)
        if positions is None and packed is not None:
            positions = packed.ages_BS
        # A position is a row of the tables, the first `length` of them in turn without positions.
        rows = slice(length) if positions is None else positions.to(self.rope_cos.device)
        rope = Rope(self.rope_cos[rows], self.rope_sin[rows])
        x_BSD = self.tok_embeddings(tokens_BS)
        for block in self.layers:
            x_BSD = block(x_BSD, rope) if packed is None else block(x_BSD, rope, packed)
        logits_BSV = self.output(self.norm(x_BSD))
        return (logits_BSV, None) if extras else logits_BSV

    @torch.no_grad()
    def init_weights(self) -> None:
        """Draw every weight again from the global generator and rebuild the rotary tables.

        Matrices are normal with standard deviation 0.02, cut at three deviations. The projections back into
        the residual stream are smaller with depth, 0.02 / sqrt(2 (layer + 1)), so that the stream's variance
        does not grow with the number of blocks (GPT-2 scales by the whole depth; by each block's own:
        "DS-Init", Zhang et al., 2019, and torchtitan's Llama). The output layer has dim**-0.5, which gives
        logits of unit variance and a first loss half a nat above log(vocab). A tied matrix is drawn once, as
        the output layer. Raises RuntimeError on the meta device.
        """
        super().init_weights()
        self._build_rope_tables()

    def _draw_weights(self) -> None:
        if not self.config.tied_embeddings:
            truncated_normal(self.tok_embeddings.weight, EMBEDDING_STD)
        for depth, block in enumerate(self.layers, start=1):
            assert isinstance(block, Block)
            residual_std = 0.02 / math.sqrt(2 * depth)
            attention, feed_forward = block.attention, block.feed_forward
            for linear in (attention.wq, attention.wk, attention.wv, feed_forward.w1, feed_forward.w3):
                truncated_normal(linear.weight, 0.02)
            for linear in (attention.wo, feed_forward.w2):
                truncated_normal(linear.weight, residual_std)
            block.attention_norm.reset_parameters()
            block.ffn_norm.reset_parameters()
        self.norm.reset_parameters()
        truncated_normal(self.output.weight, self.config.dim**-0.5)

    def _build_rope_tables(self) -> None:
        # float32 positions are exact to 2**24, far beyond any table.
        positions = torch.arange(self.config.max_seq_len, dtype=torch.float32, device="cpu")
        angles = torch.outer(positions, rope_frequencies(self.config))
        self.rope_cos = angles.cos().to(self.rope_cos.device)
        self.rope_sin = angles.sin().to(self.rope_sin.device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Llama:
        super()._apply(fn, recurse)
        # `model.to(torch.bfloat16)` casts buffers as well; the tables have to stay float32.
        if self.rope_cos.dtype != torch.float32:
            self._build_rope_tables()
        return self

    def flops_per_token(self, seq_len: int) -> int:
        """Floating-point operations of forward and backward per trained token.

        6 per weight of a matrix multiplication (2 forward, 4 backward) plus 12 layers x width x length for
        the attention scores and their use: PaLM (Chowdhery et al., 2022), appendix B. As there, the causal
        half that is never needed is counted, embeddings (look-ups) and recomputation are not.
        """
        config = self.config
        attention = 2 * config.dim * config.dim + 2 * config.dim * config.n_kv_heads * config.head_dim
        per_layer = attention + 3 * config.dim * config.ffn_dim
        multiplied = config.n_layers * per_layer + config.dim * config.vocab_size
        return 6 * multiplied + 12 * config.n_layers * config.dim * seq_len
