"""How a model is cut by tensor and sequence parallelism: plans for torch's ``parallelize_module``, from a model alone.

Between blocks the residual stream is cut along the sequence; attention and feed-forward see all of it and have a part
of the heads and of the hidden units each ("Reducing Activation Recomputation in Large Transformer Models", Korthikanti
et al., 2022). Logits stay cut along the vocabulary, for a cross-entropy that never has them whole. Nothing here makes a
mesh or communicates.
"""

from __future__ import annotations

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

from shardwright.train.models.presets import LlamaConfig


def tensor_plan(config: LlamaConfig) -> dict[str, ParallelStyle]:
    """By pattern of module names, what each becomes in a Llama of any size."""
    sequence = Shard(1)
    return {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=sequence),
        "layers.*.attention_norm": SequenceParallel(),
        "layers.*.attention": PrepareModuleInput(
            input_layouts=(sequence, None), desired_input_layouts=(Replicate(), None)
        ),
        "layers.*.attention.w[qkv]": ColwiseParallel(),
        "layers.*.attention.wo": RowwiseParallel(output_layouts=sequence),
        "layers.*.ffn_norm": SequenceParallel(),
        "layers.*.feed_forward": PrepareModuleInput(
            input_layouts=(sequence,), desired_input_layouts=(Replicate(),)
        ),
        "layers.*.feed_forward.w[13]": ColwiseParallel(),
        "layers.*.feed_forward.w2": RowwiseParallel(output_layouts=sequence),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=sequence, output_layouts=Shard(-1), use_local_output=False),
    }


def uneven(config: LlamaConfig, seq_len: int, ranks: int) -> list[tuple[str, int]]:
    """Keys whose values these many tensor-parallel ranks do not divide, and the values."""
    sizes = {
        "model.n_heads": config.n_heads,
        "model.n_kv_heads": config.n_kv_heads,
        "model.ffn_dim": config.ffn_dim,
        "train.seq_len": seq_len,
    }
    return [(key, size) for key, size in sizes.items() if size % ranks]
