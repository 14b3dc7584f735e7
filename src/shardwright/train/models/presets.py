"""The shapes of the models as plain numbers, and the presets that name well-known ones.

Nothing here imports torch, so that configurations can be checked and `--help` printed at once.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched to contexts longer than those of pre-training.

    The scheme is that of Llama 3.1 ("The Llama 3 Herd of Models", 2024, section 3.4.2, and its reference
    code): wavelengths up to `original_max_seq_len / high_freq_factor` positions are kept, those beyond
    `original_max_seq_len / low_freq_factor` are multiplied by `factor`, and those between are blended.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq_len: int = 8192

    def __post_init__(self) -> None:
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"rope_scaling.high_freq_factor: expected more than low_freq_factor = "
                f"{self.low_freq_factor}, found {self.high_freq_factor}"
            )


@dataclass(frozen=True)
class LlamaConfig:
    """The shape of a Llama model. Lengths are in tokens, widths in elements."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    ffn_dim: int
    vocab_size: int
    max_seq_len: int
    rope_theta: float = 500_000.0
    rope_scaling: RopeScaling | None = None
    tied_embeddings: bool = False
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        for name in ("dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim", "vocab_size", "max_seq_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, found {getattr(self, name)}")
        if self.dim % (2 * self.n_heads):
            raise ValueError(
                f"dim: expected a multiple of 2 x n_heads = {2 * self.n_heads} (rotary embeddings turn pairs "
                f"inside each head), found {self.dim}"
            )
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"n_kv_heads: expected a divisor of n_heads = {self.n_heads}, found {self.n_kv_heads}"
            )

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads

    @property
    def parameters(self) -> int:
        """Number of parameters, a tied matrix counted once."""
        attention = 2 * self.dim * self.dim + 2 * self.dim * self.n_kv_heads * self.head_dim
        block = attention + 3 * self.dim * self.ffn_dim + 2 * self.dim
        matrices = 1 if self.tied_embeddings else 2
        return self.n_layers * block + self.dim + matrices * self.vocab_size * self.dim


# debug and 150M carry the vocabulary of the byte tokenizer; the others are the published shapes of
# Llama 3.2 (1B, 3B) and Llama 3.1 (8B, 70B, 405B).
PRESETS: dict[str, LlamaConfig] = {
    "debug": LlamaConfig(
        dim=128, n_layers=4, n_heads=4, n_kv_heads=2, ffn_dim=448, vocab_size=256, max_seq_len=2048,
        rope_theta=10_000.0,
    ),
    "150M": LlamaConfig(
        dim=1024, n_layers=12, n_heads=16, n_kv_heads=8, ffn_dim=3072, vocab_size=256, max_seq_len=8192,
    ),
    "1B": LlamaConfig(
        dim=2048, n_layers=16, n_heads=32, n_kv_heads=8, ffn_dim=8192, vocab_size=128_256,
        max_seq_len=131_072, rope_scaling=RopeScaling(factor=32.0), tied_embeddings=True,
    ),
    "3B": LlamaConfig(
        dim=3072, n_layers=28, n_heads=24, n_kv_heads=8, ffn_dim=8192, vocab_size=128_256,
        max_seq_len=131_072, rope_scaling=RopeScaling(factor=32.0), tied_embeddings=True,
    ),
    "8B": LlamaConfig(
        dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, ffn_dim=14_336, vocab_size=128_256,
        max_seq_len=131_072, rope_scaling=RopeScaling(),
    ),
    "70B": LlamaConfig(
        dim=8192, n_layers=80, n_heads=64, n_kv_heads=8, ffn_dim=28_672, vocab_size=128_256,
        max_seq_len=131_072, rope_scaling=RopeScaling(),
    ),
    "405B": LlamaConfig(
        dim=16_384, n_layers=126, n_heads=128, n_kv_heads=8, ffn_dim=53_248, vocab_size=128_256,
        max_seq_len=131_072, rope_scaling=RopeScaling(),
    ),
}  # fmt: skip
