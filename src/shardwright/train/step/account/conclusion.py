"""The end of a run: its figures in run.json, the curve, a sample, the summary, and what the terminal says."""

from __future__ import annotations

import math
import signal
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import shardwright as sw
from shardwright.engine import heartbeat, in_units
from shardwright.engine.comm import noted
from shardwright.train.config import DataConfig
from shardwright.train.config.catalog.figures import gib
from shardwright.train.config.catalog.records import SET_PREFIX, RunEnd
from shardwright.train.errors import counted, printable
from shardwright.train.launch.forecast import note_reserved
from shardwright.train.launch.resume import resume_command
from shardwright.train.parallel.activations import Recompiles
from shardwright.train.report import plots
from shardwright.train.report.jsonl import read_records
from shardwright.train.report.reporter import Reporter
from shardwright.train.run.exits import Outcome
from shardwright.train.run.folder import RunFolder, checkpoints_of
from shardwright.train.run.position import FolderOrUrl, saved_steps, step_folder
from shardwright.train.run.record import RunRecord
from shardwright.train.run.writing import write_text, writing
from shardwright.train.step.account.memory_report import MemoryReporter
from shardwright.train.step.evaluation import Sample, sample_text
from shardwright.train.step.loop import LoopEnd
from shardwright.train.step.saving.best import BestCheckpoint
from shardwright.train.step.trainer import Trainer


class Reports(NamedTuple):
    """The places to which a session reports.

    Attributes:
        record: of the run, run.json; None on ranks but the first.
        reporter: of lines, steps and incidents, for the terminal and the sinks.
        memory: the reports of memory.
        best: finds the best checkpoint; None without `checkpoint.keep_best`.
    """

    record: RunRecord | None
    reporter: Reporter
    memory: MemoryReporter
    best: BestCheckpoint | None


def conclude(trainer: Trainer, folder: RunFolder, reports: Reports, ended: LoopEnd) -> Outcome:
    """Return the end of a session, after its last step. The order:

    1. All ranks: the memory of the rank with most, and a sample of text. After a signal there is no time for a sample.
    2. The first rank: the results, the picture, the end of hooks and sinks, the summary.
    3. run.json, which has the status "finished" only now: until then a resume does the end of the run again.
    4. The terminal.
    """
    heartbeat.at(heartbeat.END)
    memory = largest_memory(trainer, reports.memory.peak)
    reports.memory.after_last_step()  # before the sample, which leases in another way
    sample = sample_text(trainer) if trainer.config.run.sample_tokens and not ended.signal else None
    step, record = trainer.position.step, reports.record
    if record is None:
        trainer.hooks.end(RunEnd(ended.status, step))
        return ended.outcome
    records = read_records(folder.metrics_file)
    results = {**plots.results(records, record.content["sessions"]), **memory}
    results |= session_results(trainer, folder, reports, ended.early)
    draw_losses(trainer, folder, records)
    run_end = RunEnd(ended.status, step, results, folder.picture.absolute())
    trainer.hooks.end(run_end)
    reports.reporter.close(run_end)
    if ended.signal:
        text = stop_text(trainer, folder, reports.reporter, ended.signal)
    else:
        sessions = len(record.content["sessions"])
        text = summary(trainer, folder, results, sample, warnings_of(reports, results), sessions)
        write_text(folder.summary_file, text)
    record.close(ended.status, step, results, ended_by=ended.outcome.reason if ended.signal else "")
    print(text, end="", flush=True)
    return ended.outcome


def largest_memory(trainer: Trainer, peak: int) -> dict[str, int]:
    """Return the bytes for run.json, each of the rank with most. `peak`: of this rank. Called by all ranks together."""
    memory = torch.tensor([peak, *engine_memory(trainer)], device=trainer.world.device)
    with noted("all-reduce of memory", None):
        dist.all_reduce(memory, op=dist.ReduceOp.MAX)
        peak, held, leased = memory.tolist()
    return {"peak_memory": peak, **({"held_memory": held, "leased_memory": leased} if leased >= 0 else {})}


def engine_memory(trainer: Trainer) -> tuple[int, int]:
    """Return bytes of this rank: parameters, optimizer state and buffers between steps, and the most that the engine
    leased during a step. -1 with other engines, and before a whole step."""
    if not trainer.config.parallel.facts.reports_memory:
        return -1, -1
    memory = sw.memory_report(trainer.model, trainer.optimizer)
    if memory.peak is None:
        return -1, -1
    return memory.shards + memory.rest + memory.buffers + memory.optimizer, memory.peak


def session_results(trainer: Trainer, folder: RunFolder, reports: Reports, early: str) -> dict[str, Any]:
    """Results for run.json that are not in metrics.jsonl."""
    results: dict[str, Any] = {}
    if trainer.config.train.compile != "none":
        results |= {"graphs": trainer.recompiles.graphs, "recompiles": trainer.recompiles.later}
    results |= counts_of_incidents(trainer)
    if reports.best is not None:
        results |= best_result(
            reports.best, checkpoints_of(folder, trainer.config.checkpoint), reports.reporter
        )
    if early:
        results |= {"ended_early": early}
    if reports.reporter.failed_saves:
        results |= {"failed_saves": len(reports.reporter.failed_saves)}
    return results


def best_result(best: BestCheckpoint, checkpoints: FolderOrUrl, reporter: Reporter) -> dict[str, Any]:
    """Return the best checkpoint for run.json. Empty if no checkpoint has a finite value, or if their store does not
    answer: the run is done and saved all the same."""
    try:
        best_step = best.among(saved_steps(checkpoints))
    except OSError as error:
        reporter.say(f"warning: the best checkpoint is not known: {error}")
        return {}
    return {} if best_step is None else {"best": {"step": best_step.step, best.figure: best_step.value}}


def draw_losses(trainer: Trainer, folder: RunFolder, records: plots.Records) -> None:
    """Draw the losses of a run into its folder."""
    config = trainer.config
    with writing(folder.picture):
        figure = plots.loss_figure(
            records, config.run.name, config.model.shape().vocab_size, config.train.loss
        )
        figure.savefig(folder.picture, dpi=plots.DPI)


def stop_text(trainer: Trainer, folder: RunFolder, reporter: Reporter, number: int) -> str:
    """Return lines after a stop by a signal."""
    lines = [
        *reporter.stopped,
        *reporter.failed_saves,
        f"stopped by {signal.Signals(number).name} after step {trainer.position.step}, which is saved; to continue:",
        f"  {resume_command(folder, trainer.world.size)}",
        "",
    ]
    return "\n".join(lines)


def warnings_of(reports: Reports, results: Mapping[str, Any]) -> list[str]:
    """Return the warnings of the summary, in their order."""
    reporter, best = reports.reporter, reports.best
    return [
        *reporter.stopped,
        *reporter.failed_saves,
        *reporter.wrong_figures.values(),
        *(best.warnings if best is not None else ()),
        *incidents_in_words(results),
    ]


def summary(
    trainer: Trainer,
    folder: RunFolder,
    results: Mapping[str, Any],
    sampled: Sample | None,
    warnings: Sequence[str],
    sessions: int,
) -> str:
    """Return the lines after the last step of a run of `sessions` sessions, for the terminal and the summary's file."""
    sample_lines = []
    if sampled is not None:
        texts = (sampled.prompt, sampled.expected or "", sampled.generated)
        prompt, expected, generated = (printable(text, keeps="\n") for text in texts)
        sample_lines = [
            f"  sample          {prompt!r} ->",
            *("    " + line for line in generated.split("\n")),
        ]
        if sampled.expected is not None:
            sample_lines = [
                f"  sample          prompt     {prompt!r}",
                f"                  expected   {expected!r}",
                f"                  generated  {generated!r}",
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
    on_gpu = trainer.world.device.type == "cuda"
    memory_of = "held by torch's allocator" if on_gpu else "of the process"
    plan = note_reserved(folder, results["peak_memory"]) if on_gpu else []
    alike = trainer.config.model.shape().vocab_size
    of_speed, of_peak = ("", "") if sessions == 1 else (" over the sessions like this one", ", this session")
    lines = [
        "",
        f"done: {trainer.position.step} steps, {trainer.position.samples * trainer.config.train.seq_len:,} tokens",
        f"  loss            {results['first_loss']:.4f} -> {results['train_loss']:.4f}"
        + (
            f" (all {alike} tokens equally likely: ln({alike}) = {math.log(alike):.4f})"
            if trainer.losses.is_cross_entropy
            else ""
        ),
        *validation_lines(validation, results["train_loss"], trainer.config.data),
        *([f"  perplexity      {results['perplexity']:,.2f}"] if "perplexity" in results else []),
        *best_lines(results, checkpoints_of(folder, trainer.config.checkpoint)),
        *(
            f"  {name:<14}  {value:.4f}{_perplexity(name, value) if 'perplexity' in results else ''}"
            for name, value in results.get("metrics", {}).items()
        ),
        *([f"  ended early     {results['ended_early']}"] if "ended_early" in results else []),
        f"  tokens/s        {results['tokens_per_second']:,.0f} of all ranks (median{of_speed})",
        f"  data            {results['data_share']:.1%} of the steps' time spent waiting for data",
        *([f"  time            {in_shares(results['time_shares'])}"] if "time_shares" in results else []),
        f"  peak memory     {gib(results['peak_memory'])} GiB {memory_of} on the rank with the highest peak{of_peak}",
        *plan,
        *engine,
        *compiled,
        f"  checkpoint      {step_folder(checkpoints_of(folder, trainer.config.checkpoint), trainer.position.step)}",
        f"  loss curve      {folder.picture}",
        *(f"  warning         {warning}" for warning in warnings),
        *sample_lines,
        f"  next            shardwright generate {folder.path} --prompt TEXT, export {folder.path} FOLDER,",
        f"                  report {folder.path}",
        "",
    ]
    return "\n".join(lines)


def _perplexity(name: str, loss: float) -> str:
    """Return the perplexity of a loss on a set for validation, in words; empty for other metrics."""
    return f" (perplexity {math.exp(loss):,.2f})" if name.startswith(SET_PREFIX) and loss < 700 else ""


def in_shares(shares: Mapping[str, float]) -> str:
    """Shares of the steps' time, the largest first."""
    ordered = sorted(shares.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {share:.1%}" for name, share in ordered)


def best_lines(results: Mapping[str, Any], checkpoints: FolderOrUrl) -> list[str]:
    """Return the summary's line about the best checkpoint."""
    if "best" not in results:
        return []
    step, (name, value) = results["best"]["step"], list(results["best"].items())[-1]
    return [f"  best            {step_folder(checkpoints, step)} ({name} {value:.4f})"]


def validation_lines(validation: float | None, training: float, data: DataConfig) -> list[str]:
    """Return the summary's lines about the last validation. They explain a loss below the training loss."""
    if validation is None:
        return ["  validation      none"]
    lines = [f"  validation      {validation:.4f} on {validation_text(data)}"]
    if validation < training:
        lines += [
            "                  lower than the training loss: this text may be easier, and validation",
            "                  runs after the step's update, but the training loss is measured before",
        ]
    return lines


def validation_text(data: DataConfig) -> str:
    if data.validating:
        return "the validation source"
    return f"the text's last {100 * data.validation_fraction:.3g}%, which no step trains on"


def counts_of_incidents(trainer: Trainer) -> dict[str, int]:
    """Return the counts of skipped steps, rewinds and samples left out, for run.json. Empty if no sample was."""
    past = trainer.position.past
    if not past.left_out:
        return {}
    counts = {"skipped_steps": past.skips, "rewinds": past.rewinds, "samples_left_out": past.samples_left_out}
    return {**counts, "untrained_batches": past.untrained} if past.untrained else counts


def incidents_in_words(results: Mapping[str, Any]) -> list[str]:
    """Return the summary's line about samples that were left out, if there are any."""
    if "samples_left_out" not in results:
        return []
    samples, skips, rewinds = (results[key] for key in ("samples_left_out", "skipped_steps", "rewinds"))
    causes = [f"{counted(skips, 'step')} skipped", counted(rewinds, "rewind")] if skips or rewinds else []
    if untrained := results.get("untrained_batches", 0):
        causes.append(f"{counted(untrained, 'global batch', 'global batches')} without a trained token")
    return [f"{counted(samples, 'sample')} left out: {', '.join(causes)}; metrics.jsonl has the reasons"]
