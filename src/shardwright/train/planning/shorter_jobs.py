"""The same job with fewer layers or micro-batches: series of configurations that differ in the number of equal parts.

A plan of many parts can be made from plans of few (``shardwright.planner.composition``) if the events of a step follow
their number. :func:`series_of` says for which configurations they do. Nothing here imports torch, before it looks up
the layers of a model.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from shardwright.engine.extend import layouts, memories, strategies
from shardwright.train.config.catalog.optimizers import optimizers
from shardwright.train.config.schema import Config
from shardwright.train.models.offers import layers_of

#: Kinds of memory whose blocks do not depend on the number of units. The others are planned from all units of a step.
MEMORIES = ("dynamic", "double_buffer")
#: Parts at each end that may differ from those between them; for layers beside units that are gathered ahead.
ENDS = 2


@dataclass(frozen=True)
class Series:
    """Configurations of ``of(1)``, ``of(2)`` and more equal parts.

    Attributes:
        parts: of the configuration that is planned.
        least: parts with which the first and the last ones no longer change.
        of: makes the configuration with a number of parts.
        traces: configurations from which a plan is made, each with one part more than the one before.
    """

    parts: int
    least: int
    of: Callable[[int], Config]
    traces: int = 2

    def saves(self, least: int) -> bool:
        """Return whether the configurations from which a plan is made, of ``least`` parts and more, have fewer
        together."""
        return self.parts > sum(least + i for i in range(self.traces))


def series_of(config: Config, ranks: int) -> Iterator[Series]:
    """Series of a configuration: in its micro-batches, then in its layers.

    One is left out if the step depends on the number in other ways, or may do so.
    """
    parallel = config.parallel
    origins = [strategies.origin(parallel.strategy), optimizers.origin(config.optimizer.name)]
    if isinstance(parallel.layout, str):
        origins.append(layouts.origin(parallel.layout))
    origins.append(memories.origin(parallel.memory))
    if all(origin == "built in" for origin in origins):
        yield _of_micro_batches(config, ranks)
        if (layers := _of_layers(config)) is not None:
            yield layers


def _of_micro_batches(config: Config, ranks: int) -> Series:
    count = config.train.accumulation_steps(config.parallel.dims(ranks).data)

    def of(parts: int) -> Config:
        train = config.train.model_copy(update={"global_batch": config.train.global_batch // count * parts})
        return config.model_copy(update={"train": train})

    return Series(count, 2 * ENDS, of, _traces(config))


def _of_layers(config: Config) -> Series | None:
    prefetch = config.parallel.prefetch
    patterns = (*config.finetune.targets, *config.finetune.train_also, *config.parallel.keep_float32)
    if (
        config.parallel.memory not in MEMORIES
        or not config.optimizer.entry.by_layer
        or not isinstance(prefetch, int)
        or any(letter.isdigit() or letter in "?[" for pattern in patterns for letter in pattern)
        or (layers := layers_of(config.model.shape())) is None
    ):
        return None
    every = config.activations.every if config.activations.checkpoint == "layers" else 1
    first, period, count = _repeated([(kind, i % every) for i, kind in enumerate(layers.kinds)])
    if not count:
        return None
    validates = 1 if config.validation.every else 0  # its second round gathers one layer less
    offloads = 2 if config.activations.offload != "none" else 0  # its copies are of neighbours
    least = max(-(-(2 * ENDS + validates + offloads + 2 * max(prefetch - 1, 0)) // period), 2)

    def keys(parts: int) -> dict[str, Any] | None:
        end = range(first + period * count, len(layers.kinds))
        return layers.with_these([*range(first + period * parts), *end])

    def of(parts: int) -> Config:
        return config.model_copy(update={"model": config.model.model_copy(update=keys(parts))})

    series = Series(count, least, of, _traces(config))
    is_possible = not series.saves(least) or all(keys(least + i) is not None for i in range(4))
    return series if is_possible else None


def _traces(config: Config) -> int:
    """Two, and a third as a check if checkpoints are written beside the steps: the memory of the host for one has space
    for names, which grows by steps."""
    return 3 if config.checkpoint.asynchronous else 2


def _repeated(items: Sequence[Hashable]) -> tuple[int, int, int]:
    """Return the longest part of a list that repeats a piece: its first item, the piece's length, and how often."""
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
