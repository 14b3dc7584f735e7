"""Changes of keys that may save memory, with the groups of memory that they can shrink. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardwright.engine.extend import strategies
from shardwright.train.config.schema import Config

Keys = Sequence[tuple[str, str]]
"""Keys of the configuration, as SECTION.KEY, and the texts of their values."""
_STATE = ("parameters", "gradients", "optimizer", "slabs")


def edits_of(config: Config, kind: str, is_padded: bool = False) -> Iterator[tuple[Keys, tuple[str, ...]]]:
    """Yield changes of a key that may save memory, with the groups of memory that they can shrink.

    The first ones change no number of the run, except for the order of sums. ``kind``: of the devices. ``is_padded``:
    whether ranks have more of the weights than their parts.
    """
    train, parallel = config.train, config.parallel
    if is_padded and parallel.facts.has_own_keys and parallel.layout == "per_parameter":
        yield [("parallel.layout", "ragged")], _STATE
    ways = {"none": ("ops", "full"), "ops": ("half_ops", "full"), "half_ops": ("full",), "layers": ("full",)}
    for way in ways.get(config.activations.checkpoint, ()):
        yield [("activations.checkpoint", way)], ("activations",)
    if not train.loss_chunks and not parallel.facts.flattens:
        yield [("train.loss_chunks", "auto")], ("activations", "temporary")
    if train.micro_batch > 1:
        part = max(n for n in range(1, train.micro_batch) if train.micro_batch % n == 0)
        yield [("train.micro_batch", str(part))], ("activations", "temporary")
    if train.accumulate == "hold":
        yield [("train.accumulate", "communicate")], ("gradients", "slabs", "other")
    if strategies.get(parallel.strategy).axes == 2:
        yield [("parallel.strategy", "zero3"), ("parallel.replicas", "1")], _STATE
    elif parallel.strategy in ("ddp", "zero1", "zero2"):
        yield [("parallel.strategy", "zero3")], _STATE
    if parallel.reshard_after_forward != "always":
        way = "always" if parallel.reshard_after_forward == "default" else "default"
        yield [("parallel.reshard_after_forward", way)], ("slabs",)
    if parallel.prefetch not in (0, 1):
        yield [("parallel.prefetch", "1")], ("slabs",)
    if kind == "cuda" and config.activations.offload == "none":
        way = "inputs" if config.activations.checkpoint == "full" else "blocks"
        yield [("activations.offload", way)], ("activations",)
    if kind == "cuda" and parallel.facts.has_own_keys and parallel.offload == "none":
        yield [("parallel.offload", "optimizer")], ("optimizer",)
        yield [("parallel.offload", "cpu")], ("optimizer", "parameters", "gradients")
    if config.finetune.method != "full" and config.finetune.base_dtype == "float32":
        yield [("finetune.base_dtype", "bfloat16")], ("parameters",)
    if parallel.param_dtype == "float32":
        keys = [("parallel.param_dtype", "bfloat16")]
        yield keys, ("activations", "temporary", "slabs")
    if config.optimizer.name == "adamw":
        yield [("optimizer.name", "adamw8bit")], ("optimizer",)


def edits_of_host(config: Config) -> Iterator[tuple[Keys, str]]:
    """Yield changes that save memory of the host, each with the group there that it shrinks."""
    if config.activations.offload == "blocks":
        yield [("activations.offload", "inputs"), ("activations.checkpoint", "full")], "activations"
    if config.activations.offload != "none":
        yield [("activations.offload", "none")], "activations"
        if config.train.micro_batch > 1:
            yield [("train.micro_batch", "1")], "activations"
    ways = {"cpu": ("optimizer", "none"), "optimizer": ("none",)}
    for way in ways.get(config.parallel.offload, ()):
        yield [("parallel.offload", way)], "optimizer"
    if config.checkpoint.asynchronous:
        yield [("checkpoint.asynchronous", "false")], "staging"


def in_words(keys: Keys) -> str:
    """Return an edit as options of the command line."""
    return " ".join(f"--{key} {value}" for key, value in keys)
