"""The training loop of one rank, from the first sample to the last checkpoint. `runs` writes the files."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from rich.console import Console

import shardwright as sw
from shardwright import board as boards
from shardwright._torch import dump_memory_history, record_memory_history
from shardwright.comm.noted import noted
from shardwright.engine.front.report import in_units
from shardwright.extend import ExtensionError
from shardwright.train.config import Config
from shardwright.train.config.catalog.kinds import sizes_of
from shardwright.train.config.catalog.records import Incident, RunEnd, Sink, StepRecord
from shardwright.train.config.catalog.sinks import RunSite
from shardwright.train.config.catalog.sinks import sinks as named_sinks
from shardwright.train.data.dataset import Dataset
from shardwright.train.data.record import resumed_data, write_data_record
from shardwright.train.data.statement import ends_in_words, statement, tokens_of
from shardwright.train.data.tokens.tokenizers import pinned_name
from shardwright.train.errors import UserError, counted, note_steps_done
from shardwright.train.finetune import adapters, finetuning
from shardwright.train.launch.job_end import stopped_by
from shardwright.train.launch.opening import OpenedRun
from shardwright.train.launch.progress import START
from shardwright.train.launch.resume import changes_in_words, resume_command
from shardwright.train.launch.signals import StopRequest
from shardwright.train.parallel.activations import Recompiles
from shardwright.train.parallel.checks import no_more_steps, only_end_is_missing
from shardwright.train.parallel.world import World
from shardwright.train.report import plan_picture, plots
from shardwright.train.report.console import Bar, Lines, explain_figures, gib
from shardwright.train.report.device_peaks import peak_flops
from shardwright.train.report.jsonl import JsonLines, read_records
from shardwright.train.report.memory import Memory, device_name, measure_memory
from shardwright.train.report.reporter import Reporter
from shardwright.train.report.sink_thread import SinkThread
from shardwright.train.run.exits import DONE, End
from shardwright.train.run.folder import RunFolder, Session, checkpoints_of, now, versions
from shardwright.train.run.record import RunRecord
from shardwright.train.run.writing import write_json, write_text, writing
from shardwright.train.step import checkpoint
from shardwright.train.step.notices import before_steps, of_first_loss
from shardwright.train.step.numerics.acting import answer
from shardwright.train.step.numerics.looking import fault_of_state
from shardwright.train.step.numerics.summary import counts_of_incidents, incidents_in_words
from shardwright.train.step.saves import Saves
from shardwright.train.step.signal_answers import SignalAnswers
from shardwright.train.step.trainer import Sample, StepResult, Trainer, Untrained, learning_rate


def train(
    config: Config,
    run: OpenedRun,
    dataset: Dataset,
    world: World,
    saved: Callable[[int], None] | None = None,
) -> End:
    """Run the job to its last step, or until a signal stops it. Returns how it ended.

    If a rank was killed after the last step, only the end of the run is missing. Before the model exists there is
    nothing to save, so a signal ends the job like any program. `saved` is called on every rank after a checkpoint was
    written, with its step. Raises UserError for a registered value that is wrong.
    """
    try:
        return _train(config, run, dataset, world, saved)
    except ExtensionError as error:
        raise UserError(str(error)) from error


def _train(
    config: Config,
    run: OpenedRun,
    dataset: Dataset,
    world: World,
    saved: Callable[[int], None] | None,
) -> End:
    folder, resume, attempt = run.folder, run.resumes, run.attempt
    START.doing(f"building the model of {sizes_of(config.model.shape()).parameters:,} parameters")
    lines: list[str] = []
    if resume:
        dataset, lines = resumed_data(config, folder, dataset)
    with Reporter([Lines(0, 1)] if world.is_first else []) as notices:
        if resume and world.is_first and (changes := changes_in_words(folder.config(), config)):
            notices.say(changes)
        for line in lines:
            notices.say(line)
        trainer = Trainer(
            config, world, dataset, reads_weights=not resume or config.finetune.method != "full"
        )
        if resume:
            notices.say(f"reading the newest checkpoint in {checkpoints_of(folder, config)}")
            with START.left_to_others():
                trainer.load(folder, notices)
        if config.finetune.method != "full":
            finetuning.prepare(trainer.model, config, folder.base_file, resume, world.mesh)
            notices.say(adapters.statement(trainer.model))
    trainer.check_model()
    done = trainer.position.step
    if done >= config.train.steps and attempt == 1 and not only_end_is_missing(config, folder, done):
        raise UserError(no_more_steps(config, folder, done))
    START.doing("running the first step")
    answers = SignalAnswers(config, run.job_end, world)
    with answers.request() as stop, ExitStack() as stack:
        record = open_record(trainer, folder, attempt) if world.is_first else None
        try:
            reporter = Reporter([]) if record is None else open_reporter(trainer, folder, record, attempt)
            stack.enter_context(reporter)
            stack.callback(trainer.close)
            answers.say = reporter.answer
            answers.step = lambda: min(trainer.stops_after, config.train.steps)
            reporter.say(opening_line(trainer, folder))
            if trainer.world.is_first:
                reporter.say(data_in_words(trainer))
                for note in before_steps(config, dataset, resume):
                    reporter.say(note)
            reporter.say(figures_in_words(trainer))
            with Saves(config.checkpoint, checkpoints_of(folder, config), reporter, done, saved) as saves:
                more = done < config.train.steps
                ended_by = run_steps(trainer, folder, reporter, saves, stop) if more else 0
            answers.saves = False
        except BaseException as error:
            note_steps_done(error, trainer.position.step)
            raise
        return conclude(trainer, folder, record, ended_by, reporter)


def run_steps(
    trainer: Trainer, folder: RunFolder, reporter: Reporter, saves: Saves, stop: StopRequest
) -> int:
    """Run steps, validations and checkpoints until the end or a signal. Returns the signal, 0 for none.

    When this returns, the state is saved.
    """
    config, device = trainer.config, trainer.world.device
    trainer.continue_generators(reporter)
    steps_of_session = 0
    while True:
        started = time.perf_counter()
        with memory_history(trainer, folder), trainer.recompiles.step():
            result = trainer.train_step(stop, saves.has_ended())
        seconds = time.perf_counter() - started
        START.end()
        step = trainer.position.step
        leaving = result.stop != 0 or step == config.train.steps
        if result.stop and stop.signal_number is None:
            doing = "the run is at its end" if step == config.train.steps else f"saving step {step}"
            reporter.answer(f"{signal.Signals(result.stop).name} received by another rank; {doing}")
        validates = due(step, config.validation.every) or (
            step == config.train.steps and config.validation.every > 0
        )
        saving = leaving or due(step, config.checkpoint.every)
        if result.untrained is not None:
            report_untrained(trainer, result.untrained, reporter, step if result.fault else step - 1)
        if fault := result.fault or (fault_of_state(trainer) if saving or validates else None):
            answer(fault, trainer, saves, reporter)
            if result.save_ended:
                saves.conclude(goes_on=leaving)
            if result.stop and trainer.position.step:
                trainer.save(saves, last=True)
                return result.stop
            continue
        validation = trainer.validate() if validates else None
        memory = measure_memory(device)
        trainer.peak_memory = max(trainer.peak_memory, memory.reserved)
        reporter.step(step_record(trainer, result, seconds, validation, memory))
        if step == 1 and (note := of_first_loss(trainer, result.loss)):
            reporter.say(note)
        steps_of_session += 1
        if (
            steps_of_session == REPORTED
            and trainer.world.is_first
            and config.parallel.engine == "shardwright"
        ):
            reporter.say(report_memory(trainer, folder))
        if result.save_ended:
            saves.conclude(goes_on=leaving)
        if saving:
            trainer.save(saves, last=leaving)
        if leaving:
            return result.stop if step < config.train.steps else 0


def report_untrained(trainer: Trainer, untrained: Untrained, reporter: Reporter, done: int) -> None:
    """Record global batches without a trained token, which came after `done` steps. The log has the first of them, and
    those at which their number gets another digit; metrics.jsonl has all."""
    found = counted(untrained.batches, "global batch", "global batches")
    total = trainer.position.past.untrained
    before = total - untrained.batches
    reason = f"step {done + 1}: {found} without a trained token before it, of which no step is made ({total:,} so far)"
    if not before:
        reason += "; prompts may fill train.seq_len: raise train.seq_len or train.global_batch, or shorten the prompts"
    quiet = before > 0 and len(str(before)) == len(str(total))
    reporter.incident(Incident("untrained", done + 1, reason, (untrained.first, untrained.stop)), quiet=quiet)


@contextmanager
def memory_history(trainer: Trainer, folder: RunFolder) -> Iterator[None]:
    """Record this rank's GPU allocations in the next step, if `memory_snapshot` has that step; also if it fails."""
    step = trainer.position.step + 1
    if step not in trainer.config.train.memory_snapshot:
        yield
        return
    path = folder.memory_history(step, trainer.world.rank)
    record_memory_history(True)
    try:
        yield
    finally:
        boards.be_patient()
        with writing(path):
            path.parent.mkdir(exist_ok=True)
            dump_memory_history(str(path))
        record_memory_history(False)


REPORTED = 3
"""The step of a session after which the memory report is written. By then one step has run with the plan."""


def report_memory(trainer: Trainer, folder: RunFolder) -> str:
    """Write the memory report of this rank, and the plan if there is one, into the folder. Return lines to print."""
    boards.be_patient()  # The other ranks begin the next step, and to import what draws the picture may take long.
    memory = sw.memory_report(trainer.model, trainer.optimizer)
    trainer.reported_deviations = memory.deviations
    write_text(folder.memory_file, f"{memory}\n")
    parts = {"shards of parameters": memory.shards, "parameters not sharded": memory.rest}
    parts |= {"optimizer state": memory.optimizer, "buffers": memory.buffers}
    lines = [
        f"memory of rank {memory.rank} alone, without activations; all figures in {folder.memory_file}",
        "  held    " + ", ".join(f"{name} {in_units(nbytes)}" for name, nbytes in parts.items() if nbytes),
    ]
    if memory.peak is not None and memory.peak_at is not None:
        unit, kind = memory.peak_at
        lines.append(
            f"  leased  up to {in_units(memory.peak)} more during a step; the most when unit {unit} gets its {kind}"
        )
    if memory.plan is not None:
        write_json(folder.plan_file, memory.plan.as_dict())
        outside = plan_picture.outside_in_words(memory.deviations)
        with writing(folder.plan_picture):
            plan_picture.draw(
                memory.plan, folder.plan_picture, trainer.config.run.name, memory.memory, memory.rank, outside
            )
        use = "for parameters alone" if memory.plan.slots else "for all leases"
        size = in_units(memory.plan.nbytes)
        lines.append(f"  plan    {memory.memory} of {size} {use}; picture: {folder.plan_picture}")
        lines += [f"  outside {outside}"] if outside else []
    return "\n".join(lines)


def memory_since(trainer: Trainer, folder: RunFolder) -> str:
    """The lines of `report_memory` once more, if there were leases outside the plan since then; else empty."""
    if trainer.config.parallel.engine != "shardwright" or trainer.reported_deviations is None:
        return ""
    deviations = sw.memory_report(trainer.model, trainer.optimizer).deviations
    return report_memory(trainer, folder) if deviations != trainer.reported_deviations else ""


def due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def step_record(
    trainer: Trainer, result: StepResult, seconds: float, validation: float | None, memory: Memory
) -> StepRecord:
    config, world, position = trainer.config, trainer.world, trainer.position
    tokens_per_second = config.train.global_batch * config.train.seq_len / seconds
    flops_per_second = tokens_per_second * trainer.flops_per_token / world.size
    peak = peak_flops(device_name(world.device), config.parallel.param_dtype)
    return StepRecord(
        step=position.step,
        loss=result.loss,
        grad_norm=result.grad_norm,
        lr=learning_rate(position.step - 1, config.train.steps, config.optimizer),
        samples=position.samples,
        seconds=seconds,
        data_seconds=result.data_seconds,
        tokens_per_second=tokens_per_second,
        flops_per_second=flops_per_second,
        mfu=None if peak is None else flops_per_second / peak,
        memory_active=memory.active,
        memory_reserved=memory.reserved,
        memory_total=memory.total,
        validation_loss=validation,
        balance_loss=result.auxiliary.get("balance"),
        mtp_loss=result.auxiliary.get("mtp"),
        extra_losses=result.auxiliary,
    )


def open_reporter(trainer: Trainer, folder: RunFolder, record: RunRecord, attempt: int) -> Reporter:
    """The first rank's: the run's own files and terminal, and the sinks of `[log] sinks`."""
    config, steps_done, past = trainer.config, trainer.position.step, trainer.position.past
    steps, every = config.train.steps, config.log.every
    console = Console()
    if console.is_terminal:
        START.end()  # from here on the progress bar moves
    site = RunSite(folder.path.absolute(), config, steps_done, record.facts, attempt)
    sinks: list[Sink] = [
        JsonLines(folder.metrics_file, steps_done, folder.dropped_metrics_file, past.left_out)
    ]
    added = {}
    for name in config.log.sinks:
        named = named_sinks.get(name)
        added[name] = SinkThread(name, partial(named.make, site), named.patience)
    sinks.append(
        Bar(steps, steps_done, every, console)
        if console.is_terminal
        else Lines(steps, every, printed=record.reached_before)
    )
    return Reporter(sinks, added, steps_done)


def open_record(trainer: Trainer, folder: RunFolder, attempt: int) -> RunRecord:
    dataset, parallel_config, world = trainer.dataset, trainer.config.parallel, trainer.world
    facts = {
        "parameters": trainer.parameters,
        "flops_per_token": trainer.flops_per_token,
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
    plan = ("strategy", "layout", "memory") if parallel_config.engine == "shardwright" else ()
    session = Session(
        start=now(), from_step=trainer.position.step, engine=parallel_config.engine, ranks=world.size,
        device=world.device.type, device_name=device_name(world.device), threads=torch.get_num_threads(),
        param_dtype=parallel_config.param_dtype, reduce_dtype=parallel_config.reduce_dtype, versions=versions(),
        attempt=attempt,
        **{key: str(getattr(parallel_config, key)) for key in plan},
    )  # fmt: skip
    write_data_record(folder, dataset)
    return RunRecord(folder, trainer.config, facts, session)


def data_in_words(trainer: Trainer) -> str:
    """The data of the run, and its next sample."""
    config, dataset = trainer.config, trainer.dataset
    return statement(
        dataset.train,
        dataset.validation,
        dataset.tokenizer.decode,
        packing=config.data.packing,
        first=trainer.position.samples,
        samples=config.train.steps * config.train.global_batch,
        ends=ends_in_words(
            dataset.tokenizer, [each.kind for each in config.data.sources] or [config.data.kind]
        ),
        spelled=dataset.spelled,
        special_tokens=config.data.spelled,
    )


def opening_line(trainer: Trainer, folder: RunFolder) -> str:
    world, config = trainer.world, trainer.config
    parallel = config.parallel
    ranks = "1 rank" if world.size == 1 else f"{world.size} ranks"
    start = f"from step {trainer.position.step}" if trainer.position.step else "from the start"
    engine: str = parallel.engine
    if engine == "shardwright":
        engine += f" (strategy {parallel.strategy}, layout {parallel.layout}, memory {parallel.memory})"
    return (
        f"{config.run.name}: {trainer.parameters:,} parameters, engine {engine} on {ranks} "
        f"({device_name(world.device)}), {tokens_of(trainer.dataset.train):,} training tokens, {start}; "
        f"folder {folder.path}"
    )


def figures_in_words(trainer: Trainer) -> str:
    """The meaning of the figures in this run's lines of steps."""
    config, world = trainer.config, trainer.world
    return explain_figures(
        world.device,
        mfu=peak_flops(device_name(world.device), config.parallel.param_dtype) is not None,
        norm=not config.optimizer.in_backward,
        auxiliary=trainer.losses.auxiliary,
        meanings=trainer.losses.meanings,
        validation=config.validation.every > 0,
    )


def validation_text(config: Config) -> str:
    if config.data.validation_source or config.data.validation_sources:
        return "the validation source"
    return f"the text's last {100 * config.data.validation_fraction:.3g}%, which no step trains on"


def vocabulary(config: Config) -> int:
    return config.model.shape().vocab_size


def conclude(
    trainer: Trainer, folder: RunFolder, record: RunRecord | None, ended_by: int, reporter: Reporter
) -> End:
    """After the last step: record how the run ended, draw, sample, close the sinks, print the summary."""
    boards.at(boards.END)
    end = stopped_by(ended_by) if ended_by else End(DONE, "done")
    memory = torch.tensor([trainer.peak_memory, *engine_memory(trainer)], device=trainer.world.device)
    with noted("all-reduce of memory", None):
        dist.all_reduce(memory, op=dist.ReduceOp.MAX)
        peak, held, leased = memory.tolist()
    again = memory_since(trainer, folder) if record is not None else ""  # the sample leases in another way
    sampled = trainer.sample() if trainer.config.run.sample_tokens and not ended_by else None
    if record is None:
        return end
    if again:
        reporter.say(again)
    records = read_records(folder.metrics_file)
    results = {**plots.results(records, record.content["sessions"]), "peak_memory": peak}
    if leased >= 0:
        results |= {"held_memory": held, "leased_memory": leased}
    if trainer.config.train.compile != "none":
        results |= {"graphs": trainer.recompiles.graphs, "recompiles": trainer.recompiles.later}
    results |= counts_of_incidents(trainer)
    if reporter.failed_saves:
        results |= {"failed_saves": len(reporter.failed_saves)}
    status: Literal["interrupted", "finished"] = "interrupted" if ended_by else "finished"
    record.close(status, trainer.position.step, results, end.reason if ended_by else "")
    with writing(folder.picture):
        plots.loss_curve(records, folder.picture, trainer.config.run.name, vocabulary(trainer.config))
    reporter.close(RunEnd(status, trainer.position.step, results, folder.picture.absolute()))
    if ended_by:
        print(
            *reporter.stopped,
            *reporter.failed_saves,
            f"stopped by {signal.Signals(ended_by).name} after step {trainer.position.step}, which is saved; "
            f"to continue:\n  {resume_command(folder, trainer.world.size)}",
            sep="\n",
            flush=True,
        )
        return end
    warnings = [*reporter.stopped, *reporter.failed_saves, *incidents_in_words(results)]
    text = summary(trainer, folder, results, sampled, warnings)
    write_text(folder.summary_file, text)
    print(text, end="", flush=True)
    return end


def engine_memory(trainer: Trainer) -> tuple[int, int]:
    """Bytes of this rank: parameters, optimizer state and buffers between steps, and the most that the engine leased
    during a step. -1 with other engines, and before a whole step."""
    if trainer.config.parallel.engine != "shardwright":
        return -1, -1
    memory = sw.memory_report(trainer.model, trainer.optimizer)
    if memory.peak is None:
        return -1, -1
    return memory.shards + memory.rest + memory.buffers + memory.optimizer, memory.peak


def summary(
    trainer: Trainer,
    folder: RunFolder,
    results: Mapping[str, Any],
    sampled: Sample | None,
    warnings: Sequence[str],
) -> str:
    sample_lines = []
    if sampled is not None and sampled.expected is not None:
        sample_lines = [
            f"  sample          prompt     {printable(sampled.prompt)!r}",
            f"                  expected   {printable(sampled.expected)!r}",
            f"                  generated  {printable(sampled.generated)!r}",
        ]
    elif sampled is not None:
        sample_lines = [
            f"  sample          {printable(sampled.prompt)!r} ->",
            *("    " + line for line in printable(sampled.generated).split("\n")),
        ]
    validation = results["validation_loss"]
    compiled = []
    if "graphs" in results:
        later = f"{results['recompiles']} of them after step {Recompiles.WARM_UP}"
        compiled = [f"  compiled        {results['graphs']} graphs, {later}"]
    engine = []
    if "leased_memory" in results:
        held, leased = (in_units(results[key]) for key in ("held_memory", "leased_memory"))
        engine = [
            f"  engine memory   {held} always, and up to {leased} more during a step (largest of all ranks)"
        ]
    memory_of = "held by torch's allocator" if trainer.world.device.type == "cuda" else "of the process"
    alike = vocabulary(trainer.config)
    lines = [
        "",
        f"done: {trainer.position.step} steps, {trainer.position.samples * trainer.config.train.seq_len:,} tokens",
        f"  loss            {results['first_loss']:.4f} -> {results['train_loss']:.4f} "
        f"(all {alike} tokens equally likely: ln({alike}) = {math.log(alike):.4f})",
        *validation_lines(validation, results["train_loss"], trainer.config),
        f"  tokens/s        {results['tokens_per_second']:,.0f} of all ranks (median)",
        f"  data            {results['data_share']:.1%} of the steps' time spent waiting for data",
        f"  peak memory     {gib(results['peak_memory'])} GiB {memory_of} on the rank with the highest peak",
        *engine,
        *compiled,
        f"  checkpoint      {checkpoint.step_folder(checkpoints_of(folder, trainer.config), trainer.position.step)}",
        f"  loss curve      {folder.picture}",
        *(f"  warning         {warning}" for warning in warnings),
        *sample_lines,
        "",
    ]
    return "\n".join(lines)


def validation_lines(validation: float | None, training: float, config: Config) -> list[str]:
    """The summary's lines about the last validation. They explain a loss below the training loss."""
    if validation is None:
        return ["  validation      none"]
    lines = [f"  validation      {validation:.4f} on {validation_text(config)}"]
    if validation < training:
        lines += [
            "                  lower than the training loss: this text may be easier, and validation",
            "                  runs after the step's update, but the training loss is measured before",
        ]
    return lines


def printable(text: str) -> str:
    """The text without control characters, which would change the terminal. A model may produce any byte."""
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)
