"""The places to which a run reports, run.json and the sinks, and the lines that it prints before its first step.

`step_reports` passes steps to these places, `conclusion` closes them. Nothing here computes a figure.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from rich.console import Console

from shardwright.train.config.catalog.figures import RunFacts
from shardwright.train.config.catalog.records import RunSink
from shardwright.train.config.catalog.sinks import RunSite, sinks as named_sinks
from shardwright.train.data.run_documents import write_data_record
from shardwright.train.data.statement import ends_in_words, statement, tokens_of
from shardwright.train.data.tokens.tokenizers import pinned_name
from shardwright.train.report.console import Bar, Lines, explain_figures
from shardwright.train.report.device_peaks import peak_flops
from shardwright.train.report.jsonl import JsonLines
from shardwright.train.report.memory import device_name
from shardwright.train.report.progress import START
from shardwright.train.report.reporter import Reporter
from shardwright.train.report.sink_thread import SinkThread, SlowSink
from shardwright.train.report.sinks.opening import open_sink
from shardwright.train.report.unit_norms import UnitNormsFile
from shardwright.train.run.folder import RunFolder, Session, now, versions
from shardwright.train.run.record import RunRecord
from shardwright.train.step.account.notices import before_steps
from shardwright.train.step.trainer import Trainer


def open_reporter(trainer: Trainer, folder: RunFolder, record: RunRecord, attempt: int) -> Reporter:
    """Return the reporter of the first rank: the run's own files and terminal, and the sinks of `[log] sinks`."""
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
    """Begin a session in run.json, and write what the run has of its data."""
    dataset, config, world = trainer.dataset, trainer.config, trainer.world
    parallel_config = config.parallel
    facts = {
        "parameters": trainer.facts.parameters,
        "flops_per_token": trainer.facts.flops_per_token,
        "vocab_size": dataset.vocab_size,
        "tokenizer": {
            "name": pinned_name(config.data.tokenizer, dataset.tokenizer),
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
    return RunRecord(folder, config.run.name, config.resolved().to_toml(), facts, session)


def introduction(trainer: Trainer, folder: RunFolder, resumes: bool) -> Iterator[str]:
    """Yield the lines before the first step. Only the first rank describes the data and looks for notices."""
    yield opening_line(trainer, folder)
    if trainer.world.is_first:
        config = trainer.config
        yield data_in_words(trainer)
        yield from before_steps(config.for_building, config.data, trainer.dataset, resumes)
    yield figures_in_words(trainer)


def opening_line(trainer: Trainer, folder: RunFolder) -> str:
    """Return the line about the run: its model, engine, devices, data and folder."""
    world, config = trainer.world, trainer.config
    parallel = config.parallel
    ranks = "1 rank" if world.size == 1 else f"{world.size} ranks"
    start = f"from step {trainer.position.step}" if trainer.position.step else "from the start"
    engine: str = parallel.engine
    if parallel.facts.has_own_keys:
        engine += f" (strategy {parallel.strategy}, layout {parallel.layout}, memory {parallel.memory})"
    return (
        f"{config.run.name}: {trainer.facts.parameters:,} parameters, engine {engine} on {ranks} "
        f"({device_name(world.device)}), {tokens_of(trainer.dataset.train):,} training tokens, {start}; "
        f"folder {folder.path}"
    )


def data_in_words(trainer: Trainer) -> str:
    """Return lines about the data of the run, and its next sample."""
    config, dataset = trainer.config, trainer.dataset
    return statement(
        dataset.train,
        dataset.validation,
        dataset.tokenizer.decode,
        packing=config.data.packing,
        first=trainer.position.samples,
        samples=config.train.steps * config.train.global_batch,
        ends=ends_in_words(dataset.tokenizer, [each.kind for each in config.data.training]),
        spelled=dataset.spelled,
        special_tokens=config.data.spelled,
    )


def figures_in_words(trainer: Trainer) -> str:
    """Return what the figures in this run's lines of steps mean."""
    config, device = trainer.config, trainer.world.device
    validates = config.validation.every > 0
    return explain_figures(
        RunFacts(
            on_gpu=device.type == "cuda",
            has_validation=validates,
            has_norm=not config.optimizer.in_backward,
            has_mfu=peak_flops(device_name(device), config.parallel.param_dtype) is not None,
            auxiliary=trainer.losses.auxiliary,
            meanings=trainer.losses.meanings,
            metrics=trainer.hooks.in_words(validates),
            has_perplexity=validates and not trainer.losses.has_loss,
            sets=trainer.dataset.validation_sets,
            **trainer.losses.in_words(),
        )
    )
