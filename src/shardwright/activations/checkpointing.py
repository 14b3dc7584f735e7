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
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shardwright.activations.offload import local_part, note_policy
from shardwright.engine.compat import kept_results, let_go_result, storage_key, tree_leaves, was_let_go

#: Matrix products, by name. "half_ops" keeps every second one.
PRODUCTS = frozenset(
    f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm")
)
#: Results that "ops" keeps, by name: what a block mostly works for, matrix products and attention.
SAVED_OPS = (
    PRODUCTS
    | frozenset({"torch_attn::_varlen_attn"})
    | frozenset(
        f"aten::{name}"
        for name in (
            "convolution",
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_efficient_attention",
            "_scaled_dot_product_cudnn_attention",
            "_scaled_dot_product_attention_math",
        )
    )
)


#: The kinds that keep some matrix products; a kind with the number n keeps every n-th product.
SELECTIVE = {"ops": 1, "half_ops": 2}


def compile_blocks(blocks: Iterable[nn.Module], backend: str, whole_graph: bool = True) -> None:
    """Compile the forward of each block with a backend of torch.compile. `whole_graph`: a graph break is an error."""
    for block in blocks:
        block.forward = torch.compile(block.forward, backend=backend, fullgraph=whole_graph)


def checkpoint_blocks(blocks: Iterable[nn.Module], kind: str, every: int = 1, draws: bool = False) -> None:
    """Checkpoint the activations of blocks.

    Args:
        blocks: in the order in which forward runs them.
        kind: "full" keeps the inputs of each block, "layers" does so for every k-th block, "ops" keeps also the results
            of matrix products and attention. "half_ops" does so for every second product alone, beginning with the
            first of each block, as the selective policy of torchtitan does. Other kinds keep everything.
        every: k.
        draws: whether forward draws random numbers. Then the state of generators is kept for backward, which costs a
            copy for each block.
    """
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": draws}
    if kind in SELECTIVE:
        options["context_fn"] = functools.partial(_contexts, kind)
    for number, block in enumerate(blocks):
        if kind in ("full", *SELECTIVE) or (kind == "layers" and number % every == 0):
            block.forward = functools.partial(checkpoint, block.forward, **options)


def _contexts(kind: str) -> tuple[Any, Any]:
    """Return the dispatch modes of one selective checkpoint: the one for forward, and the one for its recomputation.

    ``kind``: a key of `SELECTIVE`. torch.compile would take a number that differs between models for a symbol.
    """
    policy = _Policy(SELECTIVE[kind])
    keeps, recomputes = create_selective_checkpoint_contexts(policy)
    policy.storage = keeps.storage
    note_policy(keeps)
    return keeps, recomputes


class _Policy:
    """Decides which results one selective checkpoint keeps: those of `SAVED_OPS` that no later operation overwrites.

    A kept result that the block changes in place, as models with `logits.mul_()` or `states.clamp_()` do, no longer has
    the value that backward would take for the operation's result. Such a result is let go and computed again.

    One of ``every`` matrix products is kept. Forward and recomputation run the same products in the same order.
    """

    #: The kept results. Not the mode that has them: it refers to this object, and a circle would live until Python
    #: looks for circles, with all activations in it.
    storage: Any

    def __init__(self, every: int) -> None:
        self._every = every
        self._products = {False: 0, True: 0}  #: of forward, and of its recomputation

    def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        schema = getattr(op, "_schema", None)
        if schema is None:  # an operation of higher order
            return CheckpointPolicy.PREFER_RECOMPUTE
        if schema.is_mutable:
            if not ctx.is_recompute:
                self._let_go(schema, args, kwargs)
            return CheckpointPolicy.PREFER_RECOMPUTE
        if schema.name not in SAVED_OPS:
            return CheckpointPolicy.PREFER_RECOMPUTE
        if schema.name in PRODUCTS:
            self._products[ctx.is_recompute] += 1
            if (self._products[ctx.is_recompute] - 1) % self._every:
                return CheckpointPolicy.PREFER_RECOMPUTE
        if ctx.is_recompute and was_let_go(self.storage, op):
            return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE

    def _let_go(self, schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Let go of kept results whose memory an operation has written to."""
        written = [
            kwargs.get(argument.name) if i >= len(args) else args[i]
            for i, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        keys = {storage_key(local_part(t)) for t in tree_leaves(written) if isinstance(t, Tensor)}
        for container, key, entry in kept_results(self.storage):
            values = [getattr(leaf, "val", None) for leaf in tree_leaves(entry)]
            if any(isinstance(v, Tensor) and storage_key(local_part(v)) in keys for v in values):
                let_go_result(container, key)
