"""Activation checkpointing and block compilation, applied before sharding.

Both exchange a block's `forward` on the instance. So modules, their classes and the names of their parameters, which
are those of checkpoints, stay as they are; and an engine's hooks stay outside, so that a recomputation finds the
weights that were gathered for backward.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shardwright._torch import compiled_graphs, set_activation_memory_budget
from shardwright.train.models.language_model import LanguageModel

if TYPE_CHECKING:  # pydantic is not there where only the benchmarks run
    from shardwright.train.config import Config

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


def prepare_blocks(model: LanguageModel, config: Config) -> None:
    """Checkpoint the activations of the model's blocks and compile them, as far as `config` says so."""
    settings = config.activations
    if config.train.compile == "none":
        checkpoint_blocks(model, settings.checkpoint, settings.every)
        return
    # The setting is one of the whole process. With less than 1 "ops" cannot be compiled.
    set_activation_memory_budget(settings.budget if settings.checkpoint == "budget" else 1.0)
    # torch compiles a block with its checkpoint, and so computes again only what backward reads. Not where layers are
    # cut over tensor-parallel ranks: of blocks that keep nothing it takes the mesh for a tensor to keep.
    apart = config.parallel.tensor > 1 and settings.checkpoint != "ops"
    if not apart:
        checkpoint_blocks(model, settings.checkpoint, settings.every)
    compile_blocks(model, config.train.compile)
    if apart:
        checkpoint_blocks(model, settings.checkpoint, settings.every)


def compile_blocks(model: LanguageModel, backend: str) -> None:
    """Compile the forward of each block with a backend of torch.compile."""
    for block in model.blocks():
        block.forward = torch.compile(block.forward, backend=backend, fullgraph=model.whole_graph)


def checkpoint_blocks(model: LanguageModel, kind: str, every: int = 1) -> None:
    """Checkpoint the activations of blocks. `kind` and `every` are `checkpoint` and `every` of `[activations]`."""
    # The state of generators is kept for backward only if forward draws numbers: that costs a copy for each block.
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": model.draws}
    if kind == "ops":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)
    for number, block in enumerate(model.blocks()):
        if kind in ("full", "ops") or (kind == "layers" and number % every == 0):
            block.forward = functools.partial(checkpoint, block.forward, **options)


def _policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saved = op._schema.name in SAVED_OPS
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


class Recompiles:
    """Counts graphs that torch.compile makes from now on, and separately those made in later steps."""

    WARM_UP = 3

    def __init__(self) -> None:
        self._earlier = compiled_graphs()
        self.steps = 0
        self.later = 0  #: graphs made after the warm-up

    @contextmanager
    def step(self) -> Iterator[None]:
        before = compiled_graphs()
        yield
        self.steps += 1
        if self.steps > self.WARM_UP:
            self.later += compiled_graphs() - before

    @property
    def graphs(self) -> int:
        """All that were made since."""
        return compiled_graphs() - self._earlier
