"""One session of a run on one rank: the model is built or loaded, sinks and hooks open, steps run, the run ends."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from shardwright.extend import ExtensionError
from shardwright.train.config import Config
from shardwright.train.config.catalog.kinds import sizes_of
from shardwright.train.config.catalog.records import RunEnd
from shardwright.train.data.dataset import Dataset
from shardwright.train.data.record import resumed_data
from shardwright.train.errors import UserError, as_user_errors, note_steps_done
from shardwright.train.finetune import adapters, finetuning
from shardwright.train.launch.opening import OpenedRun
from shardwright.train.launch.progress import START
from shardwright.train.launch.resume import changes_in_words
from shardwright.train.parallel.checks import no_more_steps, only_end_is_missing
from shardwright.train.parallel.world import World
from shardwright.train.report.console import Lines
from shardwright.train.report.reporter import Reporter
from shardwright.train.run.exits import Outcome
from shardwright.train.run.folder import checkpoints_of
from shardwright.train.step.evaluation import check_model
from shardwright.train.step.hooks import hooks_of
from shardwright.train.step.loop import run_steps
from shardwright.train.step.reporting.conclusion import LoopEnd, conclude
from shardwright.train.step.reporting.memory_report import MemoryReporter, MemorySnapshots
from shardwright.train.step.reporting.notices import FirstLoss
from shardwright.train.step.reporting.opening import opening
from shardwright.train.step.reporting.recording import (
    StepReports,
    open_record,
    open_reporter,
)
from shardwright.train.step.saving.best import BestCheckpoint
from shardwright.train.step.saving.saves import Saves
from shardwright.train.step.signal_answers import SignalAnswers
from shardwright.train.step.trainer import Trainer


def train(
    config: Config,
    run: OpenedRun,
    dataset: Dataset,
    world: World,
    saved: Callable[[int], None] | None = None,
) -> Outcome:
    """Run the job to its last step, or until a signal stops it. Returns how it ended.

    If a rank was killed after the last step, only the end of the run is missing. Before the model exists there is
    nothing to save, so a signal ends the job like any program. `saved` is called on every rank after a checkpoint was
    written, with its step. Raises UserError for a registered value that is wrong.
    """
    with as_user_errors(ExtensionError):
        return _train(config, run, dataset, world, saved)


def _train(
    config: Config,
    run: OpenedRun,
    dataset: Dataset,
    world: World,
    saved: Callable[[int], None] | None,
) -> Outcome:
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
        reads_weights = not resume or config.finetune.method != "full"
        trainer = Trainer(config, world, dataset, reads_weights, hooks_of(config))
        if resume:
            notices.say(f"reading the newest checkpoint in {checkpoints_of(folder, config)}")
            with START.left_to_others():
                trainer.load(folder, notices)
        if config.finetune.method != "full":
            finetuning.prepare(trainer.model, config, folder.base_file, resume, world.mesh)
            notices.say(adapters.statement(trainer.model))
    config = trainer.config  # with the steps that `train.epochs` makes of the data
    check_model(trainer)
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
            for lines_of_start in opening(trainer, folder, resume):
                reporter.say(lines_of_start)
            memory = MemoryReporter(trainer, folder, reporter)
            best = None
            if config.checkpoint.keep_best:
                best = BestCheckpoint(config, folder, trainer.hooks, reporter.say)
            trainer.hooks.own = [
                MemorySnapshots(trainer, folder), StepReports(reporter), FirstLoss(trainer, reporter), memory,
                *([best] if best else []),
            ]  # fmt: skip
            trainer.open_hooks(reporter)

            def note_saved(step: int) -> None:
                if saved is not None:
                    saved(step)
                trainer.hooks.saved(step)

            with Saves(
                config.checkpoint, checkpoints_of(folder, config), reporter, done, note_saved, best
            ) as saves:
                more = done < config.train.steps
                ended = run_steps(trainer, reporter, saves, stop) if more else LoopEnd()
            answers.saves = False
        except BaseException as error:
            note_steps_done(error, trainer.position.step)
            trainer.hooks.end(RunEnd("failed", trainer.position.step))
            raise
        return conclude(trainer, folder, record, ended, reporter, memory, best)
