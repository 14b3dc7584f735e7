"""Plans beside published figures of memory and speed: torch's FSDP2 in the loop of another trainer, run fakes.

    python -m benchmarks.published_rows [--layers 32]

Source of the rows: https://github.com/pytorch/torchtitan/pull/165 (26 March 2024). 8 H100 with 95.0396 GiB, limited to
500 W (``h100-96gb-500w.toml``), sequences of 2,048 tokens, bfloat16 with reductions in float32, AdamW. The text names
no model; the published MFU follows from a Llama of 7B. That trainer kept the float32 logits of a step until the next
forward had its own. The two rows "1-D" were used to find this out. Rows "8B": Llama 3.1 with sequences of 8,192 tokens
on the same devices, https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from shardwright.planner.allocator import GIB, CachingAllocator, run
from shardwright.planner.devices import parse_devices
from shardwright.planner.program import Program
from shardwright.planner.speed import speed_of
from shardwright.planner.tracing import local_device
from shardwright.planner.tracing.loop import program_of_loop
from shardwright.planner.verdict import FURTHER_STEPS, runtime_of

RANKS, DEVICE_GIB = 8, 95.0396
DEVICE = Path(__file__).with_name("h100-96gb-500w.toml")


class Shape(NamedTuple):
    dim: int
    heads: int
    kv_heads: int
    hidden: int
    vocabulary: int
    seq_len: int


SEVEN = Shape(4096, 32, 32, 11008, 32000, 2048)
EIGHT = Shape(4096, 32, 8, 14336, 128256, 8192)


class Row(NamedTuple):
    """A job, and its published figures.

    Attributes:
        checkpoint: of activations: "full", "selective" or "none".
        tensor: ranks of tensor parallelism.
        batch: the micro-batch.
        compiled: whether torch.compile gets the model.
        live: published percentage of the peak of live bytes; None: there is none.
        reserved: the same of reserved bytes.
        rate: published tokens a second of each device.
        shape: of the model and its sequences.
    """

    checkpoint: str
    tensor: int
    batch: int
    compiled: bool
    live: float | None
    reserved: float
    rate: float
    shape: Shape = SEVEN


ROWS = {
    "1-D, each block recomputed": Row("full", 1, 8, False, 23.92, 32.64, 6200),
    "1-D, every second product kept": Row("selective", 1, 8, False, 52.13, 62.51, 6700),
    "2-D, each block recomputed": Row("full", 2, 16, False, 50.12, 60.97, 5850),
    "2-D, every second product kept": Row("selective", 2, 16, False, 76.49, 90.14, 6200),
    "compiled, each block recomputed": Row("full", 1, 8, True, None, 30.40, 7350),
    "compiled, every second product kept": Row("selective", 1, 8, True, None, 56.64, 8250),
    "compiled, the same with micro-batch 16": Row("selective", 1, 16, True, None, 92.84, 8600),
    "compiled, all activations kept": Row("none", 1, 8, True, None, 94.99, 9200),
    "8B, every second product kept": Row(
        "selective", 1, 2, False, None, 100 * 82.4 / DEVICE_GIB, 5762, EIGHT
    ),
    "8B, the same compiled": Row("selective", 1, 2, True, None, 100 * 77.0 / DEVICE_GIB, 6667, EIGHT),
}


class Norm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return wide.type_as(x) * self.weight


def rotated(x: Tensor, turns: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns.view(1, x.shape[1], 1, -1)).flatten(3).type_as(x)


def repeated(x: Tensor, times: int) -> Tensor:
    """Each head as often: [batch, length, heads, width]."""
    if times == 1:
        return x
    batch, length, heads, width = x.shape
    return x[:, :, :, None, :].expand(batch, length, heads, times, width).reshape(batch, length, -1, width)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.width, self.times = shape.dim // shape.heads, shape.heads // shape.kv_heads
        of_kv = shape.kv_heads * self.width
        self.wq, self.wo = (nn.Linear(shape.dim, shape.dim, bias=False) for _ in range(2))
        self.wk, self.wv = (nn.Linear(shape.dim, of_kv, bias=False) for _ in range(2))

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        batch, length = x.shape[:2]
        projected = (each(x).view(batch, length, -1, self.width) for each in (self.wq, self.wk, self.wv))
        q, k, v = projected
        q, k = rotated(q, turns), rotated(k, turns)
        q, k, v = (each.transpose(1, 2) for each in (q, repeated(k, self.times), repeated(v, self.times)))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(mixed.transpose(1, 2).contiguous().view(batch, length, -1))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(shape.dim, shape.hidden, bias=False) for _ in range(2))
        self.w2 = nn.Linear(shape.hidden, shape.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(shape), FeedForward(shape)
        self.attention_norm, self.ffn_norm = Norm(shape.dim), Norm(shape.dim)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), turns)
        return x + self.feed_forward(self.ffn_norm(x))  # type: ignore[no-any-return]


class Llama(nn.Module):
    def __init__(self, layers: int, shape: Shape) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(shape.vocabulary, shape.dim)
        self.layers = nn.ModuleList(Block(shape) for _ in range(layers))
        self.norm, self.output = Norm(shape.dim), nn.Linear(shape.dim, shape.vocabulary, bias=False)
        turns = torch.zeros(shape.seq_len, shape.dim // shape.heads // 2, dtype=torch.complex64)
        self.register_buffer("turns", turns)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embeddings(tokens)
        for layer in self.layers:
            x = layer(x, self.turns)
        return self.output(self.norm(x)).float()  # type: ignore[no-any-return]


def selective() -> Any:
    """Keep every second matrix product, attention and the results of collectives."""
    products: Counter[bool] = Counter()
    kept = {
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops._c10d_functional.reduce_scatter_tensor.default,
    }

    def policy(context: Any, func: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        is_kept = func in kept
        if func == torch.ops.aten.mm.default:
            products[context.is_recompute] += 1
            is_kept = products[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def make_parallel(model: Llama, ranks: int) -> Any:
    """Tensor parallelism with sequence parallelism over ``ranks``. Returns the mesh of the other axis."""
    mesh = init_device_mesh("cpu", (RANKS // ranks, ranks), mesh_dim_names=("data", "tensor"))
    sharded, whole = Shard(1), Replicate()
    plan = {
        "embeddings": RowwiseParallel(input_layouts=whole, output_layouts=sharded),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=sharded, output_layouts=whole),
    }
    parallelize_module(model, mesh["tensor"], plan)
    of_block = {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(input_layouts=(sharded, None), desired_input_layouts=(whole, None)),
        **{f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")},
        "attention.wo": RowwiseParallel(output_layouts=sharded),
        "ffn_norm": SequenceParallel(),
        "feed_forward": PrepareModuleInput(input_layouts=(sharded,), desired_input_layouts=(whole,)),
        "feed_forward.w1": ColwiseParallel(),
        "feed_forward.w3": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(output_layouts=sharded),
    }
    for layer in model.layers:
        parallelize_module(layer, mesh["tensor"], of_block)  # type: ignore[arg-type]
    return mesh["data"]


def loop_of(layers: int, row: Row) -> Callable[[], Any]:
    checkpoint, tensor, batch = row[:3]

    def loop() -> Any:
        with torch.device("meta"):
            model = Llama(layers, row.shape)
        mesh = make_parallel(model, tensor) if tensor > 1 else init_device_mesh("cpu", (RANKS,))
        options: dict[str, Any] = {"context_fn": selective} if checkpoint == "selective" else {}
        for i, layer in enumerate(model.layers):
            if checkpoint != "none":
                model.layers[i] = checkpoint_wrapper(layer, preserve_rng_state=False, **options)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for i, layer in enumerate(model.layers):
            fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=i + 1 < layers)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        model.to_empty(device="cpu")
        called = torch.compile(model) if row.compiled else model
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        for _ in range(2):
            tokens, labels = (torch.zeros(batch, row.shape.seq_len, dtype=torch.int64) for _ in range(2))
            optimizer.zero_grad()
            logits = called(tokens)
            F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
            optimizer.step()
        return model, optimizer, logits

    return loop


def figures(program: Program) -> tuple[float, float, int]:
    """The peaks of live and of reserved bytes in a later step, in percent of the device, and how often PyTorch's
    allocator empties its cache in it. That trainer counted peaks from line to line of its log."""
    nbytes = DEVICE_GIB * GIB
    allocator = CachingAllocator(limit=int(nbytes) - runtime_of(RANKS)[1])
    *before, last, _ = program.with_further_steps(FURTHER_STEPS)
    for events in before:
        run(allocator, events)
    allocator.forget_peak()
    retries = allocator.retries
    run(allocator, last)
    peak = allocator.peak
    return 100 * peak.active / nbytes, 100 * peak.reserved / nbytes, allocator.retries - retries


def lines(layers: int, rows: Iterable[str]) -> Iterable[str]:
    device = parse_devices(str(DEVICE), local_device)[1]
    yield f"{'':40}percent of {DEVICE_GIB} GiB{'':37}tokens a second of each device"
    yield (
        f"{'row':40}{'live':>6}{'published':>10}{'reserved':>9}{'published':>10}{'retries':>8}"
        f"{'likely':>10}{'range':>14}{'published':>10}{'error':>8}"
    )
    for name in rows:
        row = ROWS[name]
        program = program_of_loop(loop_of(layers, row), RANKS)
        program.tokens = row.batch * row.shape.seq_len / row.tensor
        live, reserved, retries = figures(program)
        speed = speed_of(program, device, RANKS)
        assert speed is not None
        low, likely, high = speed.tokens_per_second
        published = "-" if row.live is None else f"{row.live:.2f}"
        between = f"{low:,.0f}-{high:,.0f}"
        yield (
            f"{name:40}{live:6.2f}{published:>10}{reserved:9.2f}{row.reserved:10.2f}{retries:8}"
            f"{likely:10,.0f}{between:>14}{row.rate:10,.0f}{likely / row.rate - 1:8.1%}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="rows whose names have this text")
    parser.add_argument("--layers", type=int, default=32, help="fewer are no published row (default: 32)")
    options = parser.parse_args()
    for line in lines(options.layers, [name for name in ROWS if options.only in name]):
        print(line, flush=True)


if __name__ == "__main__":
    main()
