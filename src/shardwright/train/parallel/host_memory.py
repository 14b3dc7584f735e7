"""Host memory that building the model needs, summed over all ranks of the host, before anything is built.

Arithmetic over shapes. Further memory of a step (gradients, optimizer state, activations) is not counted here.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

import psutil

from shardwright.engine.extend import resolve
from shardwright.train.config import ParallelConfig
from shardwright.train.config.catalog.engines import engines_that
from shardwright.train.config.catalog.kinds import kind_of
from shardwright.train.config.values import BuildSettings
from shardwright.train.errors import UserError
from shardwright.train.models.offers import sizes_of

STORED = 4
"""Bytes of a stored weight: float32."""


@dataclass(frozen=True)
class BuildingBytes:
    """Bytes of the host's memory that one rank needs until the model is built."""

    weights: int
    tables: int
    drawing: int
    """Bytes of the largest matrix while its values are drawn, where the weights do not hold it."""

    @property
    def total(self) -> int:
        return self.weights + self.tables + self.drawing


def building_bytes(settings: BuildSettings, ranks: int, device: str) -> BuildingBytes:
    """Return the bytes of one of `ranks` ranks that compute on `device`."""
    sizes, parallel = sizes_of(settings.model.shape()), settings.parallel
    tables = STORED * sizes.tables
    if not settings.builds_deferred:
        return BuildingBytes(STORED * sizes.parameters, tables, 0)
    kept_here = device == "cpu" or parallel.offload == "cpu"
    weights = math.ceil(STORED * sizes.parameters / cuts(parallel, ranks)) if kept_here else 0
    return BuildingBytes(weights, tables, STORED * sizes.largest)


def _reason(settings: BuildSettings) -> str:
    """Return the key for which every rank builds the whole model."""
    if settings.parallel.facts.builds_in_shards:
        return f"train.float8 = {settings.float8!r}; 'rowwise' and 'none' build it in shards"
    builders = engines_that(lambda engine: engine.builds_in_shards, style=repr)
    return f"parallel.engine = {settings.parallel.engine!r}; {builders} builds it in shards"


def cuts(parallel: ParallelConfig, ranks: int) -> int:
    """Return the number of parts into which the stored weights are cut."""
    dims = parallel.dims_near(ranks)
    axes = dims.data_axes.values()
    # Stored are the weights that the optimizer updates; what computes is gathered from them.
    kinds = resolve(parallel.strategy, len(axes)).optimizer
    return dims.parts_of("layers") * math.prod(
        size for size, kind in zip(axes, kinds, strict=True) if kind == "shard"
    )


def ranks_of_host(ranks: int, launched: bool) -> int:
    """Return the number of the ranks on this host. `launched`: another program started this rank; it may set
    LOCAL_WORLD_SIZE."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if launched else ranks


def check_model_fits(settings: BuildSettings, ranks: int, on_host: int, device: str) -> None:
    """Refuse a model that the `on_host` ranks of this host, out of `ranks`, cannot build in its memory."""
    shape, memory = settings.model.shape(), psutil.virtual_memory().total
    need = on_host * building_bytes(settings, ranks, device).total
    if need <= memory:
        return
    holders = "one rank" if on_host == 1 else f"the {on_host} ranks of this machine"
    kind = kind_of(shape)
    keys = [f"model.{key}" for key in ("dim", "vocab_size", "max_seq_len") if hasattr(shape, key)]
    keys[1:1] = filter(None, [kind.depth])
    smaller = f"a smaller preset, {', '.join(keys[:-1])} or {keys[-1]}"
    if not kind.presets:
        smaller = f"a smaller model in {kind.depth}"
    way_out = f"choose {smaller}"
    if on_host > 1:
        way_out = f"choose fewer ranks on this machine, {smaller}"
        if not settings.builds_deferred:
            way_out += f". Every rank builds the whole model with {_reason(settings)}"
    raise UserError(
        f"model: expected a model that fits into the {memory:,} bytes of this machine, found "
        f"{sizes_of(shape).parameters:,} parameters. With its tables {holders} need {need:,} bytes to build "
        f"it; {way_out}"
    )
