"""The figures of a step: their names, their texts in the line of a step, and their meanings.

The terminal, the explanation before the first step and the reserved names follow from the rows here. Nothing here
imports torch, measures or prints.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple

from shardwright.train.config.catalog.records import COMMON_LOSSES, SET_PREFIX, StepRecord, of_sets

CROSS_ENTROPY = "cross-entropy per token in nats"


@dataclass(frozen=True)
class RunFacts:
    """Facts about a run that decide which figures its steps have, and the meaning of these.

    Attributes:
        on_gpu: whether the model is on a GPU. On the CPU memory is measured in another way.
        has_validation, has_norm, has_mfu: whether steps have these figures.
        auxiliary: weights of the losses beside the cross-entropy, by name.
        meanings: the meanings of these losses, by name, as the model says; of others only the weight is known.
        metrics: the meanings of the metrics of hooks, by their names in the line of a step.
        has_perplexity: whether validations have this figure.
        sets: the names of sets for validation.
        loss: the loss that is trained, in words.
        validated: the loss that validation measures, in words.
    """

    on_gpu: bool
    has_validation: bool
    has_norm: bool
    has_mfu: bool
    auxiliary: Mapping[str, float]
    meanings: Mapping[str, str]
    metrics: Mapping[str, str]
    has_perplexity: bool = False
    sets: Collection[str] = ()
    loss: str = CROSS_ENTROPY
    validated: str = "the same"

    def meaning_of_loss(self, name: str) -> str:
        """Return the meaning of a loss beside the cross-entropy. Empty if the model does not have it."""
        if name not in self.auxiliary:
            return ""
        weight = f"further loss of this model; its weight in training is {self.auxiliary[name]:g}"
        return self.meanings.get(name) or weight


class Figure(NamedTuple):
    """A figure with a name of the trainer's.

    Attributes:
        name: in the line of a step and in the explanation. No metric of a hook may have it.
        text: in the line of a step; empty if the step does not have the figure.
        meaning: in a run; empty if no step of the run has the figure.
    """

    name: str
    text: Callable[[StepRecord], str]
    meaning: Callable[[RunFacts], str]


def _text(name: str, value: float | None) -> str:
    """Return a loss or a metric in the line of a step; empty for None."""
    return "" if value is None else f"{name} {value:.4f}"


def _common_loss(name: str, field: str) -> Figure:
    return Figure(
        name,
        lambda step: _text(name, getattr(step, field)),
        lambda run: run.meaning_of_loss(name),
    )


def _memory(step: StepRecord) -> str:
    active, reserved = step.memory_active, step.memory_reserved
    parts = f"{active / step.memory_total:.0%}/{reserved / step.memory_total:.0%}"
    return f"mem {gib(active)}/{gib(reserved)} GiB ({parts})"


FIRST_FIGURES = (
    Figure(
        "loss",
        lambda step: _text("loss", step.loss),
        lambda run: f"{run.loss}, before the step's update",
    ),
    Figure(
        "validation",
        lambda step: _text("validation", step.validation_loss),
        lambda run: (
            f"{run.validated} after the update, on text that no step trains on" if run.has_validation else ""
        ),
    ),
    Figure(
        "perplexity",
        lambda step: "" if step.perplexity is None else f"perplexity {step.perplexity:,.2f}",
        lambda run: "e to the power of the validation loss" if run.has_perplexity else "",
    ),
    *(_common_loss(name, field) for name, field in COMMON_LOSSES.items()),
)
"""The first figures of a line. Other losses of the model and metrics of hooks come after them."""

LAST_FIGURES = (
    Figure(
        "norm",
        lambda step: "" if step.grad_norm is None else f"norm {step.grad_norm:.2f}",
        lambda run: "gradient norm over all ranks, before clipping" if run.has_norm else "",
    ),
    Figure(
        "tok/s",
        lambda step: f"{step.tokens_per_second:,.0f} tok/s",
        lambda run: "tokens per second, all ranks together",
    ),
    Figure(
        "FLOP/s",
        lambda step: f"{with_prefix(step.flops_per_second)}FLOP/s",
        lambda run: "operations that the model needs, per second and device",
    ),
    Figure(
        "MFU",
        lambda step: "" if step.mfu is None else f"MFU {step.mfu:.1%}",
        lambda run: "FLOP/s as a fraction of the device's peak" if run.has_mfu else "",
    ),
    Figure(
        "mem",
        _memory,
        lambda run: (
            "peak of rank 0's GPU: tensors / held by torch (part of its memory)"
            if run.on_gpu
            else "rank 0's process: now / peak so far (part of the machine's RAM)"
        ),
    ),
    Figure(
        "data",
        lambda step: f"data {step.data_seconds / step.seconds if step.seconds else 0.0:.1%}",
        lambda run: "share of the step in which the slowest rank waited for data",
    ),
)
"""The last figures of a line."""


def texts_of(step: StepRecord) -> list[str]:
    """Return the figures of a step, in the order of its line."""
    others = [
        *of_sets(step.validation_losses).items(),
        *((name, loss) for name, loss in step.extra_losses.items() if name not in COMMON_LOSSES),
        *((f"validation {name}", value) for name, value in step.validation_metrics.items()),
        *step.metrics.items(),
    ]
    texts = [
        *(figure.text(step) for figure in FIRST_FIGURES),
        *(_text(name, value) for name, value in others),
        *(figure.text(step) for figure in LAST_FIGURES),
    ]
    return [text for text in texts if text]


def meanings_of(run: RunFacts) -> dict[str, str]:
    """Return the meaning of each figure that steps of the run have, by its name, in the order of a line."""
    meanings = {
        **{figure.name: figure.meaning(run) for figure in FIRST_FIGURES},
        **{f"{SET_PREFIX}{name}": f"the validation loss on the set {name} alone" for name in run.sets},
        **{name: run.meaning_of_loss(name) for name in run.auxiliary if name not in COMMON_LOSSES},
        **run.metrics,
        **{figure.name: figure.meaning(run) for figure in LAST_FIGURES},
    }
    return {name: meaning for name, meaning in meanings.items() if meaning}


def is_reserved(name: str) -> bool:
    """Return whether no metric of a hook may have this name: a figure here has it, or a field of a record."""
    names = [figure.name for figure in (*FIRST_FIGURES, *LAST_FIGURES)]
    names += [field.name for field in fields(StepRecord)]
    return name.startswith("validation") or name in names


def gib(nbytes: float) -> str:
    return f"{nbytes / 2**30:.2f}"


def with_prefix(value: float) -> str:
    """Return a number and the prefix of its unit, such as "2.0 T"."""
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= factor:
            return f"{value / factor:.1f} {prefix}"
    return f"{value:.0f} "
