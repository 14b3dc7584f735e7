"""Activation checkpointing and compilation of blocks, before they are sharded.

Both exchange a block's `forward` on the instance. So modules, their classes and the names of their parameters, which
are those of checkpoints, stay as they are; and an engine's hooks stay outside, so that a recomputation finds the
weights that were gathered for backward. Nothing here shards.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shardwright.activations.offload import note_policy

#: Results that "ops" keeps, by name: what a block mostly works for, matrix products and attention.
SAVED_OPS = frozenset({"torch_attn::_varlen_attn"}) | frozenset(
    f"aten::{name}"
    for name in (
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "_scaled_mm",
        "_grouped_mm",
        "convolution",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_attention_math",
    )
)


def compile_blocks(blocks: Iterable[nn.Module], backend: str, whole_graph: bool = True) -> None:
    """Compile the forward of each block with a backend of torch.compile. `whole_graph`: a graph break is an error."""
    for block in blocks:
        block.forward = torch.compile(block.forward, backend=backend, fullgraph=whole_graph)


def checkpoint_blocks(blocks: Iterable[nn.Module], kind: str, every: int = 1, draws: bool = False) -> None:
    """Checkpoint the activations of blocks.

    Args:
        blocks: in the order in which forward runs them.
        kind: "full" keeps the inputs of each block, "layers" does so for every k-th block, "ops" keeps also the results
            of matrix products and attention. Other kinds keep everything.
        every: k.
        draws: whether forward draws random numbers. Then the state of generators is kept for backward, which costs a
            copy for each block.
    """
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": draws}
    if kind == "ops":
        options["context_fn"] = _contexts
    for number, block in enumerate(blocks):
        if kind in ("full", "ops") or (kind == "layers" and number % every == 0):
            block.forward = functools.partial(checkpoint, block.forward, **options)


def _contexts() -> tuple[Any, Any]:
    """The dispatch modes of one selective checkpoint, in forward and in its recomputation."""
    keeps, recomputes = create_selective_checkpoint_contexts(_policy)
    note_policy(keeps)
    return keeps, recomputes


def _policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saved = op._schema.name in SAVED_OPS
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE
