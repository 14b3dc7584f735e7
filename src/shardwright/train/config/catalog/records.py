"""Records of a run: of each step, of samples that were left out, and of the end; and the protocol of a sink.

Nothing here imports torch, measures or writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, Protocol

APART = {"apart": True}
"""Metadata of a field of `StepRecord` that `scalars` shows under names of its own, or not at all."""
OPTIONAL = {"optional": True}
"""Metadata of a field that may be None."""
NUMBERS = {"numbers": True}
"""Metadata of a field that has numbers by name."""
SET_PREFIX = "validation_loss/"
"""Begins the name of the loss on a set for validation, everywhere except in `StepRecord.validation_losses`."""
COMMON_LOSSES: Mapping[str, str] = {"mtp": "mtp_loss", "balance": "balance_loss"}
"""Losses of models that have a field of their own in `StepRecord`, which is the value here. They come first."""


@dataclass(frozen=True)
class StepRecord:
    """One line of metrics.jsonl.

    Losses are means over all tokens of the step on all ranks; `loss` is the cross-entropy alone. `extra_losses` has
    all other losses of the model, by the names in `LanguageModel.auxiliary`.
    """

    step: int = field(metadata=APART)  # optimizer steps done, this one included
    loss: float = field(metadata=APART)
    grad_norm: float | None = field(metadata=OPTIONAL)  # before clipping; None with an optimizer in backward
    lr: float
    samples: int  # seen since the start of the run
    seconds: float  # of the step, without validation and checkpoints
    data_seconds: float  # part of `seconds` in which the rank that waited longest waited for data
    tokens_per_second: float  # of all ranks
    flops_per_second: float  # of the model (not of the hardware), per device
    #: part of the device's bf16 peak; None in float32 or where the peak is not known
    mfu: float | None = field(metadata=OPTIONAL)
    memory_active: int  # bytes of rank 0, as the two below: see Memory
    memory_reserved: int
    memory_total: int
    validation_loss: float | None = field(default=None, metadata=APART | OPTIONAL)
    #: exp(validation_loss); None also for a model with a loss of its own
    perplexity: float | None = field(default=None, metadata=APART | OPTIONAL)
    #: if the model has experts: their load; the model says what equal loads give
    balance_loss: float | None = field(init=False, metadata=APART | OPTIONAL)
    #: if the model has this head: cross-entropy of the token after the next
    mtp_loss: float | None = field(init=False, metadata=APART | OPTIONAL)
    #: seconds of rank 0's forward, backward, optimizer, communication, data and host, which add up to `seconds`
    parts: Mapping[str, float] = field(default_factory=dict, metadata=APART | NUMBERS)
    extra_losses: Mapping[str, float] = field(default_factory=dict, metadata=APART | NUMBERS)
    #: metrics of hooks, over all ranks
    metrics: Mapping[str, float] = field(default_factory=dict, metadata=APART | NUMBERS)
    #: likewise, at steps with a validation
    validation_metrics: Mapping[str, float] = field(default_factory=dict, metadata=APART | NUMBERS)
    #: by name of a set in `[[data.validation_sources]]`, at steps with a validation
    validation_losses: Mapping[str, float] = field(default_factory=dict, metadata=APART | NUMBERS)
    #: exp of these losses, by the same names; empty also for a model with a loss of its own
    validation_perplexities: Mapping[str, float] = field(default_factory=dict, metadata=APART | NUMBERS)

    def __post_init__(self) -> None:
        for name, key in COMMON_LOSSES.items():
            object.__setattr__(self, key, self.extra_losses.get(name))


@dataclass(frozen=True)
class RunEnd:
    """The end of a run, or of one session of it.

    Attributes:
        status: "finished" after its last step; "interrupted" by a signal, with the state saved; "failed".
        step: optimizer steps done.
        results: figures of the whole run, as in run.json; empty for a run that failed.
        picture: the picture of the loss; None for a run that failed.
    """

    status: Literal["finished", "interrupted", "failed"]
    step: int
    results: Mapping[str, Any] = field(default_factory=dict)
    picture: Path | None = None


class Sink(Protocol):
    """A place for the metrics of a run: a file, a terminal or a service.

    The function `open` of `NamedSink` makes it, with the run's configuration and facts. There is no method for pictures
    and results: a run has them once, when it ends, so `close` gets them.
    """

    def step(self, record: StepRecord) -> None:
        """Write one step."""

    def say(self, text: str) -> None:
        """Write one or more lines that the run prints."""

    def close(self, end: RunEnd) -> None:
        """Write how the run ended, and release everything."""


class RunSink(Sink):
    """A place of the run's own, which also gets what other sinks learn as lines. Methods that it has no use for stay
    empty."""

    def save_failed(self, step: int, reason: str) -> None:
        """A checkpoint could not be written, and the run goes on."""

    def incident(self, incident: Incident) -> None:
        """Samples were left out, and the run goes on."""

    def unit_norms(self, step: int, norms: Mapping[str, float], left_out: bool = False) -> None:
        """The gradient norms of a step, by unit. `left_out`: of a step that was not made, for a fault."""

    def rewind(self, step: int) -> None:
        """The run goes on after `step`, so later steps come again."""


LOSSES = ("loss", "validation_loss")
"""The figures of losses that every run has."""


def of_sets(losses: Mapping[str, Any]) -> dict[str, Any]:
    """Losses on sets for validation, by the names of these figures."""
    return {f"{SET_PREFIX}{name}": loss for name, loss in losses.items()}


def scalars(record: StepRecord, every: int) -> dict[str, float]:
    """Return the figures of a step, by the names that TensorBoard and services show.

    Steps that `every` does not divide have only the figures of a validation, if there is one.
    """
    validation = record.validation_loss
    values = {} if validation is None else {"loss/validation": validation}
    if record.perplexity is not None:
        values["loss/perplexity"] = record.perplexity
    values |= of_sets(record.validation_losses)
    values |= {f"validation/{name}": value for name, value in record.validation_metrics.items()}
    if record.step % every:
        return values
    values["loss/train"] = record.loss
    values |= {f"loss/{name}": loss for name, loss in record.extra_losses.items()}
    values |= {f"metrics/{name}": value for name, value in record.metrics.items()}
    values |= {f"parts/{name}": value for name, value in record.parts.items()}
    names = [each.name for each in fields(record) if not each.metadata.get("apart")]
    others = {name: getattr(record, name) for name in names}
    return values | {f"step/{name}": value for name, value in others.items() if value is not None}


@dataclass(frozen=True)
class Incident:
    """Samples that a run has left out, because numbers had gone wrong or no token of them is trained; or a step that
    it has done twice.

    Attributes:
        action: "skip": the step was not made. "rewind": the run went back to a checkpoint. "untrained": no step was
            made of global batches without a trained token. "repeat": the step had wrong numbers when it was done first,
            and good ones when it was done again.
        step: the optimizer step that comes next; of a repeat, the step itself.
        reason: what was found, in one line.
        samples: those that are left out, [first, stop); of a repeat, those of the step.
        from_step: optimizer steps done when it went back.
    """

    action: Literal["skip", "rewind", "untrained", "repeat"]
    step: int
    reason: str
    samples: tuple[int, int]
    from_step: int | None = None

    @property
    def in_words(self) -> str:
        if self.action == "repeat":
            return self.reason
        first, stop = self.samples
        left_out = f"samples {first:,} to {stop - 1:,} are left out"
        back = f"the run goes back to step {self.step - 1}; " if self.action == "rewind" else ""
        return f"{self.reason}; {back}{left_out}"
