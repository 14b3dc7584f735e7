"""Records of a run: run.json and the sinks are opened here, and each step becomes a record."""

from __future__ import annotations

from functools import partial

import torch
from rich.console import Console

from shardwright.strict_json import not_finite
from shardwright.train.config.catalog.hooks import TrainerHook
from shardwright.train.config.catalog.records import COMMON_LOSSES, Incident, RunSink, StepRecord
from shardwright.train.config.catalog.sinks import RunSite
from shardwright.train.config.catalog.sinks import sinks as named_sinks
from shardwright.train.data.run_documents import write_data_record
from shardwright.train.data.statement import tokens_of
from shardwright.train.data.tokens.tokenizers import pinned_name
from shardwright.train.errors import counted
from shardwright.train.report.console import Bar, Lines
from shardwright.train.report.device_peaks import peak_flops
from shardwright.train.report.jsonl import JsonLines
from shardwright.train.report.memory import device_name, measure_memory
from shardwright.train.report.progress import START
from shardwright.train.report.reporter import Reporter
from shardwright.train.report.sink_thread import SinkThread, SlowSink
from shardwright.train.run.folder import RunFolder, Session, now, versions
from shardwright.train.run.record import RunRecord
from shardwright.train.step.evaluation import Validation
from shardwright.train.step.feed import Untrained
from shardwright.train.step.numerics.not_finite import in_words
from shardwright.train.step.reduction import Agreed, StepResult
from shardwright.train.step.trainer import Trainer


def open_reporter(trainer: Trainer, folder: RunFolder, record: RunRecord, attempt: int) -> Reporter:
    """The first rank's: the run's own files and terminal, and the sinks of `[log] sinks`."""
    config, steps_done, past = trainer.config, trainer.position.step, trainer.position.past
    steps, every = config.train.steps, config.log.every
    console = Console()
    if console.is_terminal:
        START.end()  # from here on the progress bar moves
    site = RunSite(folder.path.absolute(), config, steps_done, record.facts, attempt)
    sinks: list[RunSink] = [
        JsonLines(folder.metrics_file, steps_done, folder.dropped_metrics_file, past.left_out)
    ]
    added: dict[str, SinkThread] = {}
    slow: dict[str, SlowSink] = {}
    for name in config.log.sinks:
        named = named_sinks.get(name)
        try:
            added[name] = SinkThread(name, partial(named.make, site), named.patience)
        except SlowSink as error:
            slow[name] = error
    sinks.append(
        Bar(steps, steps_done, every, console)
        if console.is_terminal
        else Lines(steps, every, printed=record.reached_before)
    )
    reporter = Reporter(sinks, added, steps_done)
    for name, problem in slow.items():
        reporter.not_opened(name, problem)
    return reporter


def open_record(trainer: Trainer, folder: RunFolder, attempt: int) -> RunRecord:
    dataset, parallel_config, world = trainer.dataset, trainer.config.parallel, trainer.world
    facts = {
        "parameters": trainer.facts.parameters,
        "flops_per_token": trainer.facts.flops_per_token,
        "vocab_size": dataset.vocab_size,
        "tokenizer": {
            "name": pinned_name(trainer.config.data.tokenizer, dataset.tokenizer),
            "fingerprint": dataset.tokenizer.fingerprint,
        },
        "corpus": {
            "sha256": dataset.sha256,
            "train_tokens": tokens_of(dataset.train),
            "validation_tokens": tokens_of(dataset.validation),
        },
    }
    plan = ("strategy", "layout", "memory") if parallel_config.facts.has_own_keys else ()
    session = Session(
        start=now(), from_step=trainer.position.step, engine=parallel_config.engine, ranks=world.size,
        device=world.device.type, device_name=device_name(world.device), threads=torch.get_num_threads(),
        param_dtype=parallel_config.param_dtype, reduce_dtype=parallel_config.reduce_dtype, versions=versions(),
        attempt=attempt,
        **{key: str(getattr(parallel_config, key)) for key in plan},
    )  # fmt: skip
    write_data_record(folder, dataset)
    return RunRecord(folder, trainer.config, facts, session)


def step_record(
    trainer: Trainer, result: StepResult, seconds: float, validation: Validation | None
) -> StepRecord:
    """The record of a step that is done."""
    config, world, position = trainer.config, trainer.world, trainer.position
    memory = measure_memory(world.device)
    tokens_per_second = config.train.global_batch * config.train.seq_len / seconds
    flops_per_second = tokens_per_second * trainer.facts.flops_per_token / world.size
    peak = peak_flops(device_name(world.device), config.parallel.param_dtype)
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
        extra_losses=result.auxiliary,
        metrics=result.agreed.metrics,
        validation_metrics={} if validation is None else validation.metrics,
    )


def report_not_finite(
    record: StepRecord, agreed: Agreed, validation: Validation | None, reporter: Reporter
) -> None:
    """Warn of each figure of a step, the first time that it is nan or infinite."""
    if not (wrong := not_finite(vars(record))):
        return
    ranks = {**agreed.not_finite, **({} if validation is None else validation.not_finite)}
    figures = {
        key.replace("_", " "): value
        for key, value in wrong.items()
        if isinstance(value, str) and key not in COMMON_LOSSES.values()  # these are in extra_losses, too
    }
    figures |= wrong.get("extra_losses", {}) | wrong.get("metrics", {})
    figures |= {f"validation {name}": value for name, value in wrong.get("validation_metrics", {}).items()}
    for name, value in figures.items():
        reporter.not_finite(name, in_words(name, value, record.step, ranks))


class StepReports(TrainerHook):
    """Passes each step to the sinks."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter

    def after_step(self, record: StepRecord) -> None:
        self._reporter.step(record)


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
