"""The reports of a step: its record, warnings about its figures, and batches of which no step was made.

The loop calls these functions, and nothing else passes a step to the sinks. Hooks are for other actions after a step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from shardwright.common.json_text import not_finite
from shardwright.train.config.catalog.records import COMMON_LOSSES, Incident, StepRecord, of_sets
from shardwright.train.errors import counted
from shardwright.train.report.device_peaks import peak_flops
from shardwright.train.report.memory import device_name, measure_memory
from shardwright.train.report.reporter import Reporter
from shardwright.train.step.account.clock import Part
from shardwright.train.step.evaluation import Validation
from shardwright.train.step.feed import Untrained
from shardwright.train.step.numerics.not_finite import in_words
from shardwright.train.step.reduction import Agreed, StepResult
from shardwright.train.step.trainer import Trainer


def step_record(
    trainer: Trainer,
    result: StepResult,
    seconds: float,
    parts: Mapping[Part, float],
    validation: Validation | None,
) -> StepRecord:
    """Return the record of a step that is done. `parts`: of its `seconds`."""
    config, world, position = trainer.config, trainer.world, trainer.position
    memory = measure_memory(world.device)
    tokens_per_second = config.train.global_batch * config.train.seq_len / seconds
    flops_per_second = tokens_per_second * trainer.facts.flops_per_token / world.size
    peak = peak_flops(device_name(world.device), config.parallel.param_dtype)
    in_nats = not trainer.losses.has_loss  # a loss of the model's own need not be a cross-entropy
    on_sets = {} if validation is None else validation.losses
    return StepRecord(
        step=position.step,
        loss=result.loss,
        grad_norm=result.agreed.norm,
        lr=result.rate,
        samples=position.samples,
        seconds=seconds,
        data_seconds=result.agreed.data_seconds,
        tokens_per_second=tokens_per_second,
        flops_per_second=flops_per_second,
        mfu=None if peak is None else flops_per_second / peak,
        memory_active=memory.active,
        memory_reserved=memory.reserved,
        memory_total=memory.total,
        validation_loss=None if validation is None else validation.loss,
        parts=dict(parts.items()),
        perplexity=None if not in_nats or validation is None else perplexity_of(validation.loss),
        extra_losses=result.auxiliary,
        metrics=result.agreed.metrics,
        validation_metrics={} if validation is None else validation.metrics,
        validation_losses=on_sets,
        validation_perplexities={name: perplexity_of(loss) for name, loss in on_sets.items() if in_nats},
    )


def perplexity_of(loss: float) -> float:
    """e to the power of a cross-entropy in nats; infinite if that is beyond all floats."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def report_step(
    record: StepRecord, agreed: Agreed, validation: Validation | None, reporter: Reporter
) -> None:
    """Pass a step to the sinks, after warnings about its figures."""
    _warn_not_finite(record, agreed, validation, reporter)
    reporter.step(record)
    if agreed.unit_norms:
        reporter.unit_norms(record.step, agreed.unit_norms)


def _warn_not_finite(
    record: StepRecord, agreed: Agreed, validation: Validation | None, reporter: Reporter
) -> None:
    """Warn of each figure of a step, the first time that it is nan or infinite."""
    if not (wrong := not_finite(vars(record))):
        return
    ranks = {**agreed.not_finite, **({} if validation is None else validation.not_finite)}
    figures = {
        key.replace("_", " "): value
        for key, value in wrong.items()
        if isinstance(value, str)
        and key not in ("perplexity", *COMMON_LOSSES.values())  # of figures that are here
    }
    figures |= wrong.get("extra_losses", {}) | wrong.get("metrics", {})
    figures |= of_sets(wrong.get("validation_losses", {}))
    figures |= {f"validation {name}": value for name, value in wrong.get("validation_metrics", {}).items()}
    for name, value in figures.items():
        reporter.not_finite(name, in_words(name, value, record.step, ranks))


def report_untrained(trainer: Trainer, untrained: Untrained, reporter: Reporter, done: int) -> None:
    """Record global batches without a trained token, which came after `done` steps. The log has the first of them, and
    those at which their number gets another digit; metrics.jsonl has all."""
    count = counted(untrained.batches, "global batch", "global batches")
    total = trainer.position.past.untrained
    before = total - untrained.batches
    reason = f"step {done + 1}: {count} without a trained token before it, of which no step is made ({total:,} so far)"
    if not before:
        reason += "; prompts may fill train.seq_len: raise train.seq_len or train.global_batch, or shorten the prompts"
    quiet = before > 0 and len(str(before)) == len(str(total))
    reporter.incident(Incident("untrained", done + 1, reason, (untrained.first, untrained.stop)), quiet=quiet)
