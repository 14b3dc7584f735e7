"""A small Qwen3 and text for the programs of this folder: nothing is downloaded."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist


def choose_engine() -> None:
    """Call this before a framework imports torch's ``fully_shard``. ``ENGINE=torch`` keeps torch's FSDP2."""
    if os.environ.get("ENGINE", "shardwright") == "shardwright":
        import shardwright as sw

        sw.replace_torch()


def config(vocabulary: int = 64):
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=vocabulary, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip


def model():
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config(), dtype=torch.float32)


def batch(step: int, rows: int = 4) -> torch.Tensor:
    """Rows that count upwards, others on every rank and in every step. Shape (rows, 16), int64."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    starts = torch.randint(64, (rows, 1), generator=generator)
    return (starts + torch.arange(16)) % 64


def report(step: int, loss: torch.Tensor) -> None:
    """Print the mean loss of all ranks."""
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    if dist.get_rank() == 0:
        print(f"step {step} loss {mean.item() / dist.get_world_size():.6f}", flush=True)


def say_engine(sharded: torch.nn.Module) -> None:
    import shardwright as sw

    if dist.get_rank() == 0:
        print(sw.describe(sharded), flush=True)
