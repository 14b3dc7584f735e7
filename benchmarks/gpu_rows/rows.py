"""The rows of the benchmark as plain data, the most important first, and the bytes that each needs by arithmetic.

A row is one model and one way to run it. Its variants are the engines that run it, the reference first.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from shardwright.train.config.shapes.presets import PRESETS, LlamaConfig

PLAIN, FSDP2, SHARDWRIGHT = "plain torch", "FSDP2", "shardwright"
WARM_UP = 6
"""Steps before the timed ones. By then memory is planned, graphs are captured, and blocks are compiled."""
TINY = LlamaConfig(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=128, vocab_size=256, max_seq_len=32)
OVERHEAD = 1.5e9
"""Bytes for what the arithmetic leaves out: workspaces, buffers of NCCL, and memory that the allocator cannot use."""


@dataclass(frozen=True)
class Variant:
    """One engine, and for shardwright its kind of memory.

    graph: forward and backward in a CUDA graph. waiting: the host waits for the device before and after each block.
    communicating: on one device, too, units gather and reduce by collectives, in a group of one rank, as they do on
    several. Without it the engine communicates nothing there.
    """

    engine: str
    memory: str = "dynamic"
    graph: bool = False
    waiting: bool = False
    communicating: bool = False

    @property
    def name(self) -> str:
        options = [self.memory] * (self.memory != "dynamic") + ["graph"] * self.graph
        options += ["waiting"] * self.waiting + ["communicating"] * self.communicating
        return " ".join([self.engine, *options])


@dataclass(frozen=True)
class Row:
    """One model with its batch, and the variants that train it.

    Attributes:
        model: name of a preset, or "tiny".
        seq: tokens of a sequence; ``batch`` sequences make a step of one device.
        checkpoint: "none", "ops" or "full", as `[activations] checkpoint` of the trainer.
        steps: timed steps of one turn.
        turns: how often each variant is built and measured.
        exact: all variants of shardwright must have the same bits in every loss; algorithms are deterministic.
        seconds: limit for the whole row.
    """

    name: str
    model: str
    seq: int
    variants: tuple[Variant, ...]
    batch: int = 1
    checkpoint: str = "none"
    compile: bool = False
    steps: int = 10
    turns: int = 2
    exact: bool = False
    seconds: int = 90

    @property
    def title(self) -> str:
        how = "compiled" if self.compile else "eager"
        text = (
            f"Llama {self.model}, {self.batch} x {self.seq:,} tokens, checkpointing {self.checkpoint}, {how}"
        )
        return text + (", deterministic" if self.exact else "")

    def shape(self) -> LlamaConfig:
        """Raises KeyError for an unknown model."""
        return replace(TINY if self.model == "tiny" else PRESETS[self.model], max_seq_len=self.seq)

    def order(self) -> list[Variant]:
        """All turns: forwards, backwards, forwards, ... so that a slow drift of the clock changes no ratio."""
        both = [self.variants, self.variants[::-1]]
        return [variant for turn in range(self.turns) for variant in both[turn % 2]]

    def tiny(self) -> Row:
        """The same row with a model that the CPU trains in a moment."""
        return replace(self, model="tiny", seq=32, batch=2, steps=2, seconds=240)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_json(cls, fields: dict[str, Any]) -> Row:
        return cls(**fields | {"variants": tuple(Variant(**each) for each in fields["variants"])})


_ALL = (Variant(PLAIN), Variant(FSDP2), Variant(SHARDWRIGHT))
_ARENA = Variant(SHARDWRIGHT, "arena")
_EXACT = tuple(
    Variant(SHARDWRIGHT, memory, **option)
    for memory in ("dynamic", "arena", "max_pool", "double_buffer")
    for option in ({}, {"graph": True}, {"waiting": True})
)
_COMMUNICATING = Variant(SHARDWRIGHT, communicating=True)
_ARENA_COMMUNICATING = replace(_ARENA, communicating=True)

ROWS = (
    Row("150M", "150M", 2048, (*_ALL, _ARENA), batch=4, steps=20),
    Row("1B", "1B", 4096, _ALL),
    Row("1B memory and graphs", "1B", 4096, (
        Variant(FSDP2), Variant(SHARDWRIGHT), _ARENA, Variant(SHARDWRIGHT, graph=True),
        Variant(SHARDWRIGHT, "arena", graph=True), _ARENA_COMMUNICATING,
    ), seconds=98),
    Row("150M exact", "150M", 2048, (
        Variant(FSDP2), *_EXACT, _COMMUNICATING, replace(_ARENA_COMMUNICATING, graph=True),
    ), steps=24, turns=1, exact=True, seconds=98),
    Row("3B compiled", "3B", 4096, _ALL, compile=True, seconds=98),
    Row("1B compiled", "1B", 4096, (*_ALL, _COMMUNICATING), compile=True, seconds=98),
    Row("3B 8k full compiled", "3B", 8192, (*_ALL, _ARENA), checkpoint="full", compile=True, steps=6, seconds=98),
    Row("3B full", "3B", 4096, _ALL, checkpoint="full", steps=8),
    Row("1B 8k ops", "1B", 8192, _ALL, checkpoint="ops"),
    Row("1B 8k ops compiled", "1B", 8192, _ALL, checkpoint="ops", compile=True, seconds=98),
)  # fmt: skip


@dataclass(frozen=True)
class Need:
    """Bytes of a device for one variant of a row. What is largest at the start of backward is gone at its end."""

    weights: float  #: master weights, moments, and those in bfloat16 that stay
    activations: float  #: kept for backward, the logits among them, before backward
    gradients: float  #: at the end of backward

    @property
    def total(self) -> float:
        return self.weights + max(self.activations, self.gradients) + OVERHEAD

    def __str__(self) -> str:
        parts = {
            "weights and moments": self.weights,
            "activations": self.activations,
            "gradients": self.gradients,
        }
        text = ", ".join(f"{name} {nbytes / 1e9:.1f}" for name, nbytes in parts.items())
        return (
            f"{self.total / 1e9:.1f} GB ({text}, the rest {OVERHEAD / 1e9:.1f}; the larger of the last two)"
        )


def need(row: Row, variant: Variant, ranks: int) -> Need:
    """The memory that a variant needs on each of so many devices.

    A parameter has 4 bytes of master weight, 8 of AdamW's moments, and at the end of backward 4 of gradient: 16. Plain
    torch has 2 more of the weight in bfloat16 that it computes with, and 2 of that weight's gradient. The engines have
    1 / ranks of the 16, and gathered weights of the root and three blocks.
    """
    shape, tokens = row.shape(), row.batch * row.seq
    kv = shape.n_kv_heads * shape.head_dim
    head = shape.vocab_size * shape.dim
    block = (shape.parameters - head * (1 if shape.tied_embeddings else 2)) / shape.n_layers
    if variant.engine == PLAIN:
        weights, gradients = 14.0 * shape.parameters, 6.0 * shape.parameters
    else:
        gathered = 2 * (shape.parameters - shape.n_layers * block) + 3 * 2 * block
        weights = 12 * shape.parameters / ranks + gathered
        gradients = 4 * shape.parameters / ranks + (2 + 4) * max(head, block)
    # In bfloat16. All: inputs and outputs of norms and products, queries, keys, values, and what attention returns.
    every = 2 * tokens * (8 * shape.dim + 2 * kv + 4 * shape.ffn_dim)
    products = 2 * tokens * (5 * shape.dim + 2 * kv + 2 * shape.ffn_dim)
    inputs = 2 * tokens * shape.dim
    kept = {
        "none": shape.n_layers * every,
        "ops": shape.n_layers * products + every,
        "full": shape.n_layers * inputs + every,
    }
    logits = (
        14 * tokens * shape.vocab_size
    )  # bfloat16; float32: log-softmax, its gradient, the loss's gradient
    activations = kept[row.checkpoint] + logits
    if (
        variant.graph
    ):  # what the graph writes, beside what the allocator keeps of the steps before the capture
        activations *= 2
    return Need(weights, activations, gradients)
