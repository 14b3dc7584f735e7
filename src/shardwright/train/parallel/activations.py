"""The activations of a job's model, as its configuration says, and the graphs that compiled blocks make.

`shardwright.activations` has the mechanisms. Nothing here changes a model by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from shardwright.activations import (
    SELECTIVE,
    SMALLEST,
    LossInForward,
    checkpoint_blocks,
    compile_blocks,
    offload_activations,
)
from shardwright.engine.compat import allow_graphs, compiled_graphs, set_activation_memory_budget
from shardwright.train.models.language_model import LanguageModel

if TYPE_CHECKING:  # pydantic is not there where only the benchmarks run
    from shardwright.train.config import ActivationConfig

GRAPHS = 8  #: that torch may make of each kind of block


def prepare_blocks(
    model: LanguageModel, settings: ActivationConfig, compile: str = "none", are_cut: bool = False
) -> None:
    """Checkpoint the activations of the model's blocks, compile the blocks, and let activations wait in the host's
    memory, as far as `settings` say so.

    Args:
        model: the model.
        settings: `[activations]`.
        compile: the value of `train.compile`.
        are_cut: ranks divide the layers of the model.
    """
    _checkpoint_and_compile(model, settings, compile, are_cut)
    blocks = model.blocks()
    if settings.offload == "inputs" and settings.checkpoint == "layers":
        blocks = blocks[:: settings.every]
    if settings.offload != "none":
        offload_activations(blocks, settings.offload, min_bytes=SMALLEST)


def _checkpoint_and_compile(
    model: LanguageModel, settings: ActivationConfig, compile: str, are_cut: bool
) -> None:
    blocks = model.blocks()
    if compile == "none":
        checkpoint_blocks(blocks, settings.checkpoint, settings.every, model.draws)
        return
    # The setting is one of the whole process. With less than 1 "ops" cannot be compiled.
    set_activation_memory_budget(settings.budget if settings.checkpoint == "budget" else 1.0)
    # torch counts graphs by function, and checkpoints of unlike blocks are one function.
    allow_graphs(GRAPHS * len({tuple(map(type, block.modules())) for block in blocks}))
    # torch compiles a block with its checkpoint, and so computes again only what backward reads. Not where layers are
    # cut over tensor-parallel ranks: of blocks that keep nothing it takes the mesh for a tensor to keep.
    apart = are_cut and settings.checkpoint not in SELECTIVE
    if not apart:
        checkpoint_blocks(blocks, settings.checkpoint, settings.every, model.draws)
    compile_blocks(blocks, compile, model.whole_graph)
    if apart:
        checkpoint_blocks(blocks, settings.checkpoint, settings.every, model.draws)


def prepare_loss(model: LanguageModel, chunks: int | Literal["auto"]) -> LossInForward | None:
    """Let the model's forward end with a loss of logits that are never whole, if there are `chunks` of them."""
    if not chunks:
        return None
    head = model.output_layer()
    assert head is not None  # else `model_conflicts` has refused it
    return LossInForward(model, head, chunks)


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
