"""Settings that a job cannot have together, checked when it starts or is planned. Nothing here imports torch."""

from __future__ import annotations

import importlib.util

from shardwright.train.config.axes import AXES, ParallelAxis, axes_that_divide
from shardwright.train.config.catalog.engines import engines_that
from shardwright.train.config.catalog.kinds import experts_of, kinds_that
from shardwright.train.config.conflicts.configurations import LENGTH, apart
from shardwright.train.config.conflicts.table import Conflict
from shardwright.train.config.sections.all import Sections


def _without_plan(axis: ParallelAxis) -> Conflict[Sections]:
    """Return the row for a kind of model that has no plan which divides layers or experts."""
    return Conflict(
        (axis.key, "model.kind"),
        lambda c: c.value_at(axis.key) > 1 and not c.model.facts.divides_layers,
        f"expected 1 with model.kind {{model.kind!r}}, found {{{axis.key}}}; only the kinds "
        f"{kinds_that(lambda kind: kind.divides_layers)} have a plan that divides layers",
    )


def _without_whole(axis: ParallelAxis) -> Conflict[Sections]:
    """Return the row for an optimizer that needs what this axis cuts."""
    return Conflict(
        ("optimizer.name", axis.key),
        lambda c: c.value_at(axis.key) > 1 and bool(c.optimizer.entry.whole),
        f"expected 'adamw' with {axis.key} = {{{axis.key}}}, found {{optimizer.name!r}}; it needs tensors or blocks "
        "that are not cut",
    )


def _experts(config: Sections) -> str:
    """Return the pattern of a model with experts; empty for other models."""
    experts = experts_of(config.model.shape())
    return "" if experts is None else experts.pattern


def _without_experts(axis: ParallelAxis) -> Conflict[Sections]:
    """Return the row for a model without the experts that this axis divides."""
    return Conflict(
        (axis.key, "model.pattern"),
        lambda c: c.value_at(axis.key) > 1 and not _experts(c),
        f"expected 1 for a model without experts, found {{{axis.key}}}",
    )


def _compiled_by_user(axis: ParallelAxis) -> Conflict[Sections]:
    """Return the row for code of a user whose attention exchanges parts of samples."""
    return Conflict(
        ("train.compile", axis.key, "model.kind"),
        lambda c: c.train.compile != "none" and c.value_at(axis.key) > 1 and c.model.facts.is_users_code,
        f"expected 'none' with {axis.key} = {{{axis.key}}} and model.kind {{model.kind!r}}, found "
        "{train.compile!r}; attention is exchanged outside of graphs there",
    )


STARTED: tuple[Conflict[Sections], ...] = (
    Conflict(
        ("parallel.reduce_dtype", "parallel.engine"),
        lambda c: c.parallel.reduce_dtype != "float32" and not c.parallel.facts.reduces_low,
        "expected float32 with engine {parallel.engine}, found {parallel.reduce_dtype}",
    ),
    *map(_without_plan, axes_that_divide("layers", "experts")),
    *map(_without_experts, axes_that_divide("experts")),
    *map(_without_whole, axes_that_divide("layers", "experts")),
    *(apart(key, axis.key, why) for axis in AXES for key, why in axis.needs.items()),
    *map(_compiled_by_user, axes_that_divide("samples")),
    Conflict(
        ("train.compile", "parallel.param_dtype", "model.pattern"),
        lambda c: c.train.compile != "none" and c.parallel.param_dtype == "float32" and bool(_experts(c)),
        lambda c: (
            f"expected none for a pattern with experts, {_experts(c)!r}, in float32, found {c.train.compile!r}; torch "
            "compiles grouped matrix products only in bfloat16: set parallel.param_dtype to bfloat16"
        ),
    ),
    Conflict(
        ("train.cuda_graph", "model.kind"),
        lambda c: c.train.cuda_graph and bool(c.model.facts.no_cuda_graph),
        "expected false with model.kind {model.kind!r}, found true; {model.facts.no_cuda_graph}",
    ),
)
"""Settings of a job that starts or is planned, checked on each rank, too. Commands that only read a run take them."""

NEW: tuple[Conflict[Sections], ...] = (
    Conflict(
        ("parallel.engine", "finetune.adapters"),
        lambda c: bool(c.finetune.adapters) and not c.parallel.facts.reads_adapters,
        f"expected {engines_that(lambda engine: engine.reads_adapters, style=repr)} with finetune.adapters, found "
        "{parallel.engine!r}, into whose parameters no files of adapters are read; choose another engine",
    ),
    *LENGTH,
)
"""Settings of a run that does not resume, checked when its folder is opened. Such a run begins with adapters from
files, and has no checkpoints of an earlier start. Commands that only read a run take them."""

PLANNED: tuple[Conflict[Sections], ...] = (
    Conflict(
        ("train.float8",),
        lambda c: c.train.float8 != "none" and importlib.util.find_spec("torchao") is None,
        "a plan with {train.float8!r} needs torchao, found none; install the extra float8",
    ),
    Conflict(
        ("parallel.engine",),
        lambda c: not c.parallel.facts.is_planned,
        f"a plan covers {engines_that(lambda engine: engine.is_planned, 'and', repr)}, found "
        "{parallel.engine!r}",
    ),
)
"""Settings of a job that is planned."""
