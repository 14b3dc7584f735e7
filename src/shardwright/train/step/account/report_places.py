"""The places to which a run reports: run.json and the sinks, opened before the first step.

`step_reports` passes steps to them, `conclusion` closes them. Nothing here computes a figure.
"""

from __future__ import annotations

from functools import partial

import torch
from rich.console import Console

from shardwright.train.config.catalog.records import RunSink
from shardwright.train.config.catalog.sinks import RunSite, sinks as named_sinks
from shardwright.train.data.run_documents import write_data_record
from shardwright.train.data.statement import tokens_of
from shardwright.train.data.tokens.tokenizers import pinned_name
from shardwright.train.report.console import Bar, Lines
from shardwright.train.report.jsonl import JsonLines
from shardwright.train.report.memory import device_name
from shardwright.train.report.progress import START
from shardwright.train.report.reporter import Reporter
from shardwright.train.report.sink_thread import SinkThread, SlowSink
from shardwright.train.report.sinks.opening import open_sink
from shardwright.train.report.unit_norms import UnitNormsFile
from shardwright.train.run.folder import RunFolder, Session, now, versions
from shardwright.train.run.record import RunRecord
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
    if config.log.unit_norms:
        sinks.append(UnitNormsFile(folder.unit_norms_file, steps_done))
    added: dict[str, SinkThread] = {}
    slow: dict[str, SlowSink] = {}
    for name in config.log.sinks:
        named = named_sinks.get(name)
        try:
            added[name] = SinkThread(name, partial(open_sink, named, site), named.patience)
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
