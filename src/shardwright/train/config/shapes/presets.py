"""The shapes of the models as plain numbers, and the presets that name well-known ones.

Nothing here imports torch, so that configurations can be checked and `--help` printed at once.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class RopeScaling:
    """Scaling of rotary frequencies to contexts longer than those of pre-training.

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


def _check_sizes(shape: LlamaConfig | HybridConfig, may_be_zero: Collection[str] = ()) -> None:
    """Raise ValueError for a field of type int that is too small."""
    for field in fields(shape):
        value, least = getattr(shape, field.name), 0 if field.name in may_be_zero else 1
        if field.type == "int" and value < least:
            raise ValueError(f"{field.name}: expected at least {least}, found {value}")


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
        _check_sizes(self)
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
    def table_numel(self) -> int:
        """Elements of the rotary tables."""
        return self.max_seq_len * self.head_dim

    @property
    def parameters(self) -> int:
        """Number of parameters, a tied matrix counted once."""
        attention = 2 * self.dim * self.dim + 2 * self.dim * self.n_kv_heads * self.head_dim
        block = attention + 3 * self.dim * self.ffn_dim + 2 * self.dim
        matrices = 1 if self.tied_embeddings else 2
        return self.n_layers * block + self.dim + matrices * self.vocab_size * self.dim

    @property
    def largest_parameter(self) -> int:
        """Elements of the largest parameter."""
        return self.dim * max(self.dim, self.ffn_dim, self.vocab_size)


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


LAYER_KINDS = {"M": "Mamba-2", "*": "attention", "E": "mixture of experts", "-": "dense MLP"}


@dataclass(frozen=True)
class HybridConfig:
    """The shape of a model of unlike layers. Lengths are in tokens, widths in elements.

    `pattern` has a character for each layer: M (Mamba-2), * (attention), E (mixture of experts), - (dense MLP), as
    NVIDIA writes the shapes of Nemotron-H. `mtp_pattern` has the layers of the head that predicts one token further.
    """

    dim: int
    pattern: str
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn_dim: int  # of dense layers
    vocab_size: int
    max_seq_len: int
    mamba_heads: int
    mamba_head_dim: int
    mamba_groups: int = 1  # of heads that share what is written to and read from the state
    mamba_state: int = 128  # numbers kept for each channel
    conv_width: int = 4
    chunk_size: int = 64  # of the scan: how it is computed, not what
    n_experts: int = 8
    top_k: int = 2
    expert_dim: int = 512
    shared_dim: int = 512  # of the expert that sees every token; 0: there is none
    balance_weight: float = 0.01
    mtp_pattern: str = ""
    mtp_weight: float = 0.3
    tied_embeddings: bool = False
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        _check_sizes(self, may_be_zero=("shared_dim",))
        if not self.pattern:
            raise ValueError("pattern: expected at least one layer, found none")
        for name in ("pattern", "mtp_pattern"):
            unknown = sorted(set(getattr(self, name)) - set(LAYER_KINDS))
            if unknown:
                kinds = ", ".join(f"{key!r} ({kind})" for key, kind in LAYER_KINDS.items())
                raise ValueError(f"{name}: expected only the characters {kinds}, found {unknown[0]!r}")
        for name, whole in (("n_kv_heads", "n_heads"), ("mamba_groups", "mamba_heads")):
            if getattr(self, whole) % getattr(self, name):
                raise ValueError(
                    f"{name}: expected a divisor of {whole} = {getattr(self, whole)}, found {getattr(self, name)}"
                )
        if self.top_k > self.n_experts:
            raise ValueError(f"top_k: expected at most n_experts = {self.n_experts}, found {self.top_k}")
        for name in ("dim", "expert_dim") if "E" in self.pattern + self.mtp_pattern else ():
            if getattr(self, name) % 8:  # torch's grouped_mm wants rows of a multiple of 16 bytes
                raise ValueError(
                    f"{name}: expected a multiple of 8 if the pattern has experts ('E'), found {getattr(self, name)}"
                )
        for name in ("balance_weight", "mtp_weight"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: expected at least 0, found {getattr(self, name)}")

    @property
    def mamba_dim(self) -> int:
        """Channels of the scan."""
        return self.mamba_heads * self.mamba_head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution: those of the scan and, for each group, what is written and what is read."""
        return self.mamba_dim + 2 * self.mamba_groups * self.mamba_state

    @property
    def mamba_in_dim(self) -> int:
        """Width of what a Mamba-2 layer makes of its input: gate, convolved channels, and a step for each head."""
        return self.mamba_dim + self.conv_dim + self.mamba_heads

    @property
    def table_numel(self) -> int:
        """Elements of tables: there are none, as no layer knows positions."""
        return 0

    @property
    def parameters(self) -> int:
        """Number of parameters, a tied matrix counted once."""
        layers = sum(map(self.layer_parameters, self.pattern + self.mtp_pattern))
        mtp = 2 * self.dim * self.dim + 3 * self.dim if self.mtp_pattern else 0
        matrices = 1 if self.tied_embeddings else 2
        return layers + mtp + self.dim + matrices * self.vocab_size * self.dim

    @property
    def largest_parameter(self) -> int:
        """Elements of the largest parameter."""
        widths = {
            "M": max(self.mamba_in_dim, self.mamba_dim),
            "*": self.n_heads * self.head_dim,
            "E": max(self.n_experts * self.expert_dim, self.shared_dim),
            "-": self.ffn_dim,
        }
        used = [widths[kind] for kind in self.pattern + self.mtp_pattern]
        return self.dim * max(self.vocab_size, *used, 2 * self.dim if self.mtp_pattern else 0)

    def layer_parameters(self, kind: str) -> int:
        """Return the number of parameters of one layer of that kind."""
        if kind == "M":
            own = (
                self.dim * (self.mamba_in_dim + self.mamba_dim)
                + self.conv_dim * (self.conv_width + 1)
                + 3 * self.mamba_heads
                + self.mamba_dim
            )
        elif kind == "*":
            own = 2 * self.dim * self.head_dim * (self.n_heads + self.n_kv_heads)
        elif kind == "E":
            experts = 2 * self.n_experts * self.dim * self.expert_dim
            own = self.dim * self.n_experts + experts + 2 * self.dim * self.shared_dim
        else:
            own = 2 * self.dim * self.ffn_dim
        return own + self.dim


Shape = LlamaConfig | HybridConfig
"""The numbers that make a native model. Other kinds have shapes of other classes: see `shapes` and `kinds`."""


# debug and 150M have the vocabulary of the byte tokenizer and all kinds of layers. 9B is the published shape of
# NVIDIA-Nemotron-Nano-9B-v2 (its config.json on Hugging Face; "NVIDIA Nemotron Nano 2", 2025, arXiv 2508.14444): no
# experts, no position embedding, squared ReLU.
HYBRID_PRESETS: dict[str, HybridConfig] = {
    "debug": HybridConfig(
        dim=128, pattern="M*ME*-", n_heads=4, n_kv_heads=2, head_dim=32, ffn_dim=384, vocab_size=256,
        max_seq_len=2048, mamba_heads=4, mamba_head_dim=64, mamba_state=32, n_experts=8, top_k=2, expert_dim=128,
        shared_dim=128, mtp_pattern="*", tied_embeddings=True,
    ),
    "150M": HybridConfig(
        dim=1024, pattern="M*ME-M*ME-M*ME-", n_heads=16, n_kv_heads=8, head_dim=64, ffn_dim=4096, vocab_size=256,
        max_seq_len=8192, mamba_heads=32, mamba_head_dim=64, n_experts=8, top_k=2, expert_dim=1024,
        shared_dim=2048, mtp_pattern="*-", tied_embeddings=True,
    ),
    "9B": HybridConfig(
        dim=4480, pattern="M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-", n_heads=40, n_kv_heads=8,
        head_dim=128, ffn_dim=15_680, vocab_size=131_072, max_seq_len=131_072, mamba_heads=128, mamba_head_dim=80,
        mamba_groups=8, mamba_state=128, chunk_size=128,
    ),
}  # fmt: skip
