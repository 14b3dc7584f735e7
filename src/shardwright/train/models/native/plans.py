"""Plans of tensor and sequence parallelism for torch's ``parallelize_module``, from the model's configuration alone.

Between blocks the residual stream is cut along the sequence; the layers see all of it and have a part of the heads and
of the hidden units each ("Reducing Activation Recomputation in Large Transformer Models", Korthikanti et al., 2022).
Logits stay cut along the vocabulary, for a cross-entropy that never has them whole. Nothing here makes a mesh or
communicates.
"""

from __future__ import annotations

import functools

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

from shardwright.train.config.catalog.kinds import Layers
from shardwright.train.config.shapes.presets import HybridConfig, LlamaConfig, Shape
from shardwright.train.models.native.styles import Mamba2Part, NextToken, Sections, SummedParts, mixture_part

Plan = dict[str, ParallelStyle]
SEQUENCE = Shard(1)


def expert_layers(config: HybridConfig) -> list[str]:
    """Return the names of the modules that have experts."""
    return [name for name, kind in _mixers(config).items() if kind == "E"]


def llama_layers(config: LlamaConfig) -> Layers:
    """Return the layers, which are all alike."""
    return Layers("*" * config.n_layers, lambda kept: {"n_layers": len(kept)})


def hybrid_layers(config: HybridConfig) -> Layers:
    """Return the layers, by the letters of the pattern. Those of the head that predicts further are not among them."""
    return Layers(config.pattern, lambda kept: {"pattern": "".join(config.pattern[i] for i in kept)})


def llama_uneven(config: LlamaConfig, seq_len: int, ranks: int) -> list[tuple[str, int, int]]:
    return _uneven_layers(config, "*-", seq_len, ranks)


def _uneven_layers(config: Shape, kinds: str, seq_len: int, ranks: int) -> list[tuple[str, int, int]]:
    """Return sizes of attention ("*") and dense layers ("-") that the ranks do not divide: key, size and divisor."""
    sizes = {"train.seq_len": seq_len}
    if "*" in kinds:
        sizes |= {"model.n_heads": config.n_heads, "model.n_kv_heads": config.n_kv_heads}
    if "-" in kinds:
        sizes["model.ffn_dim"] = config.ffn_dim
    return [(key, size, ranks) for key, size in sizes.items() if size % ranks]


def hybrid_uneven(config: HybridConfig, seq_len: int, ranks: int) -> list[tuple[str, int, int]]:
    kinds = config.pattern + config.mtp_pattern
    uneven = _uneven_layers(config, kinds, seq_len, ranks)
    if "M" in kinds:
        if config.mamba_heads % ranks:
            uneven.append(("model.mamba_heads", config.mamba_heads, ranks))
        if config.mamba_groups % ranks and ranks % config.mamba_groups:
            uneven.append(("model.mamba_groups", config.mamba_groups, ranks))
    if "E" in kinds:
        if config.expert_dim % (8 * ranks):  # as without ranks: see `HybridConfig`
            uneven.append(("model.expert_dim", config.expert_dim, 8 * ranks))
        if config.shared_dim % ranks:
            uneven.append(("model.shared_dim", config.shared_dim, ranks))
    return uneven


def llama_plan(config: LlamaConfig, experts: DeviceMesh | None = None) -> Plan:
    """There are no experts to spread."""
    return {
        **_ends(),
        "layers.*.attention_norm": SequenceParallel(),
        "layers.*.attention": PrepareModuleInput(
            input_layouts=(SEQUENCE, None), desired_input_layouts=(Replicate(), None)
        ),
        "layers.*.attention.w[qkv]": ColwiseParallel(),
        "layers.*.attention.wo": RowwiseParallel(output_layouts=SEQUENCE),
        "layers.*.ffn_norm": SequenceParallel(),
        "layers.*.feed_forward": PrepareModuleInput(
            input_layouts=(SEQUENCE,), desired_input_layouts=(Replicate(),)
        ),
        "layers.*.feed_forward.w[13]": ColwiseParallel(),
        "layers.*.feed_forward.w2": RowwiseParallel(output_layouts=SEQUENCE),
    }


def hybrid_plan(config: HybridConfig, experts: DeviceMesh | None = None) -> Plan:
    plan: Plan = {**_ends(), "layers.*.norm": SequenceParallel()}
    if config.mtp_pattern:
        plan |= {
            "mtp": NextToken(),
            "mtp.stream_norm": SequenceParallel(),
            "mtp.token_norm": SequenceParallel(),
            "mtp.proj": ColwiseParallel(input_layouts=SEQUENCE, output_layouts=SEQUENCE),
            "mtp.layers.*.norm": SequenceParallel(),
            "mtp.norm": SequenceParallel(use_local_output=True),
        }
    for name, kind in _mixers(config).items():
        plan |= _mixer(config, name, kind, experts)
    return plan


def _ends() -> Plan:
    """Return the plan of the layers before and after the blocks, which every decoder has."""
    return {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=SEQUENCE),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=SEQUENCE, output_layouts=Shard(-1), use_local_output=False),
    }


def _mixers(config: HybridConfig) -> dict[str, str]:
    """Return the kind of every layer, by the name of what does its work."""
    return {
        f"{layers}.{number}.mixer": kind
        for layers, pattern in (("layers", config.pattern), ("mtp.layers", config.mtp_pattern))
        for number, kind in enumerate(pattern)
    }


def _mixer(config: HybridConfig, name: str, kind: str, experts: DeviceMesh | None) -> Plan:
    # The further prediction runs on as many tokens as the rest, of which the last is a filler. Layers in which tokens
    # only look back may see it; experts count their tokens.
    left_out = 1 if name.startswith("mtp.") and kind == "E" else 0
    if kind == "M":
        return {name: _mamba(config)}
    if kind == "E":
        return {name: _experts(config, experts, left_out)}
    inner = {"*": ("w[qkv]", "wo"), "-": ("up", "down")}[kind]
    return {
        name: PrepareModuleInput(input_layouts=(SEQUENCE,), desired_input_layouts=(Replicate(),)),
        f"{name}.{inner[0]}": ColwiseParallel(),
        f"{name}.{inner[1]}": RowwiseParallel(output_layouts=SEQUENCE),
    }


def _mamba(config: HybridConfig) -> ParallelStyle:
    """Heads and groups are divided. The in-projection is cut into equal blocks of rows, of which each rank sends the
    others what they compute with: a block has rows of some parts (gate, channels, B, C, steps) of many heads, a rank
    computes with all parts of few. The convolution is small, so every rank keeps it whole."""
    shared = config.mamba_groups * config.mamba_state
    convolved: Sections = [
        (config.mamba_dim, config.mamba_heads),
        (shared, config.mamba_groups),
        (shared, config.mamba_groups),
    ]
    heads = config.mamba_heads
    return SummedParts(
        functools.partial(Mamba2Part, config),
        {
            "in_proj.weight": Shard(0),
            "conv_weight": Replicate(),
            "conv_bias": Replicate(),
            "dt_bias": Shard(0),
            "a_log": Shard(0),
            "skip": Shard(0),
            "norm_weight": Shard(0),
            "out_proj.weight": Shard(1),
        },
        {
            "in_proj.weight": [(config.mamba_dim, heads), *convolved, (heads, heads)],
            "conv_weight": convolved,
            "conv_bias": convolved,
        },
    )


def _experts(config: HybridConfig, experts: DeviceMesh | None, left_out: int) -> ParallelStyle:
    """Hidden units are divided: the weights of experts, most of a model that has any, are then cut, too, and every rank
    has as much to do whatever the routing. The router runs on all tokens everywhere, so that all choose the same."""
    placements: dict[str, Placement] = {"router.weight": Replicate()}
    if experts is None:
        placements |= {"up": Shard(2), "down": Shard(1)}
    if config.shared_dim:
        placements |= {"shared.up.weight": Shard(0), "shared.down.weight": Shard(1)}
    return SummedParts(functools.partial(mixture_part, config, experts), placements, left_out=left_out)
