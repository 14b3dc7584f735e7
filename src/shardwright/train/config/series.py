"""The same model with fewer layers: a series of configurations that differ in the number of equal parts of the model.

A plan of a long model can be made from plans of short ones (``shardwright.planner.compose``) if the memory of a step
follows this number. :func:`series_of` says for which configurations it does. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shardwright.train.config.catalog.presets import HybridConfig, LlamaConfig
from shardwright.train.config.schema import Config

#: Kinds of memory whose blocks do not depend on the number of units. The others are planned from all units of a step.
MEMORIES = ("dynamic", "double_buffer")
#: Optimizers that do the same for the parameters of each layer. Muon makes rounds of all matrices.
OPTIMIZERS = ("adamw", "adamw8bit")
#: Layers at each end of the model that may differ from those between them, beside units that are gathered ahead.
ENDS = 2


@dataclass(frozen=True)
class Series:
    """Configurations of ``of(1)``, ``of(2)`` and more equal parts.

    Attributes:
        parts: of the configuration that is planned.
        least: parts with which the first and the last ones no longer change.
        of: the configuration with so many parts.
    """

    parts: int
    least: int
    of: Callable[[int], Config]


def series_of(config: Config) -> Series | None:
    """The series of a configuration. None: its step depends on the number of layers in other ways, or may do so."""
    parallel = config.parallel
    patterns = (*config.finetune.targets, *config.finetune.train_also, *parallel.keep_float32)
    if (
        parallel.memory not in MEMORIES
        or config.optimizer.name not in OPTIMIZERS
        or not isinstance(parallel.prefetch, int)
        or any(":" in str(name) for name in (parallel.strategy, parallel.layout, config.model.kind))
        or any(letter.isdigit() or letter in "?[" for pattern in patterns for letter in pattern)
    ):
        return None
    shape: Any = config.model.shape()
    made: Callable[[list[str]], object]
    every = config.activations.every if config.activations.checkpoint == "layers" else 1
    if type(shape) is LlamaConfig:
        layers = ["*"] * shape.n_layers
        key, made = "n_layers", len
    elif type(shape) is HybridConfig:
        layers = list(shape.pattern)
        key, made = "pattern", "".join
    else:
        return None
    first, period, count = _repeated([f"{kind}{i % every}" for i, kind in enumerate(layers)])
    if not count:
        return None
    end = first + period * count

    def of(parts: int) -> Config:
        piece = layers[first : first + period]
        value: Any = made([*layers[:first], *piece * parts, *layers[end:]])
        return config.model_copy(update={"model": config.model.model_copy(update={key: value})})

    least = -(-(2 * ENDS + 2 * max(parallel.prefetch - 1, 0)) // period)
    return Series(count, max(least, 2), of)


def _repeated(items: list[str]) -> tuple[int, int, int]:
    """The longest part that repeats a piece: its first item, the length of the piece, and how often it is there."""
    best = 0, 0, 0
    for period in range(1, len(items) // 2 + 1):
        first = 0
        for i in range(len(items) - period + 1):
            same = i + period < len(items) and items[i] == items[i + period]
            if not same:  # items[first : i + period] repeats
                count = (i + period - first) // period
                if count > 1 and (count - 1) * period > (best[2] - 1) * best[1]:
                    best = first, period, count
                first = i + 1
    return best
