"""One session of a run on one rank: the model is built or loaded, sinks and hooks open, steps run, the run ends."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from shardwright.engine import heartbeat
from shardwright.engine.comm import hears_dtensor
from shardwright.engine.extend import ExtensionError
from shardwright.train.config import Config
from shardwright.train.config.catalog.hooks import TrainerHook
from shardwright.train.config.catalog.records import RunEnd
from shardwright.train.data.dataset import Dataset
from shardwright.train.data.run_documents import resumed_data
from shardwright.train.errors import UserError, as_user_errors, note_steps_done
from shardwright.train.finetune import adapters, finetuning
from shardwright.train.launch.forecast import is_out_of_memory
from shardwright.train.launch.opening import OpenedRun
from shardwright.train.launch.resume import changes_in_words
from shardwright.train.launch.signals import StopRequest
from shardwright.train.models.offers import sizes_of
from shardwright.train.parallel.world import World
from shardwright.train.report.console import Lines
from shardwright.train.report.progress import START
from shardwright.train.report.reporter import Reporter
from shardwright.train.run.exits import Outcome
from shardwright.train.run.folder import RunFolder, checkpoints_of
from shardwright.train.run.steps_left import no_more_steps, only_end_is_missing
from shardwright.train.step.account.conclusion import Reports, conclude
from shardwright.train.step.account.memory_report import MemoryReporter, MemorySnapshots
from shardwright.train.step.account.notices import FirstLoss
from shardwright.train.step.account.out_of_memory import leave_owners
from shardwright.train.step.account.profile import StepProfile
from shardwright.train.step.account.report_places import introduction, open_record, open_reporter
from shardwright.train.step.account.step_notes import NotesOfStep, calls_dtensor
from shardwright.train.step.evaluation import check_model
from shardwright.train.step.hooks import hooks_of
from shardwright.train.step.loading import LoadedRun
from shardwright.train.step.loop import LoopEnd, run_steps
from shardwright.train.step.saving.best import BestCheckpoint
from shardwright.train.step.saving.saves import Saves
from shardwright.train.step.saving.task_evaluations import TaskEvaluations, await_tasks
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
    with as_user_errors(ExtensionError), _deterministic(config.train.deterministic):
        return _train(config, run, dataset, world, saved)


_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"  #: an environment variable, which is read at the first product on a GPU


@contextmanager
def _deterministic(is_asked: bool) -> Iterator[None]:
    """Inside the context PyTorch uses only operations that give the same bits each time, if asked for."""
    if not is_asked:
        yield
        return
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    filling: Any = torch.utils.deterministic
    fills, workspace = filling.fill_uninitialized_memory, os.environ.get(_CUBLAS)
    try:
        os.environ.setdefault(_CUBLAS, ":4096:8")
        torch.use_deterministic_algorithms(True)
        filling.fill_uninitialized_memory = False  # which changes no result, and takes time
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        filling.fill_uninitialized_memory = fills
        if workspace is None:
            os.environ.pop(_CUBLAS, None)


def _train(
    config: Config,
    run: OpenedRun,
    dataset: Dataset,
    world: World,
    saved: Callable[[int], None] | None,
) -> Outcome:
    trainer, loaded = _built(config, run, dataset, world)
    check_model(trainer)
    config = trainer.config  # with the steps that `train.epochs` makes of the data
    done = trainer.position.step
    if (
        done >= config.train.steps
        and run.attempt == 1
        and not only_end_is_missing(config.train, run.folder, done)
    ):
        raise UserError(no_more_steps(config.train, run.folder, done))
    START.doing("running the first step")
    answers = SignalAnswers(config.train.steps, config.fault.save_seconds, run.job_end, world)
    with answers.request() as stop, ExitStack() as stack:
        try:
            reports, evaluations = _opened_reports(trainer, loaded, run, stack, stop)
            answers.follow(reports.reporter.say_at_once)
            ended = _run_steps(trainer, run.folder, reports, stop, saved, evaluations)
            answers.reach_end()
            if ended.status == "finished" and config.validation.tasks:
                fault = config.fault
                await_tasks(evaluations, stop, trainer.position.step, world.device, fault.stall_seconds)
            return conclude(trainer, run.folder, reports, ended)
        except BaseException as error:
            note_steps_done(error, trainer.position.step)
            trainer.hooks.end(RunEnd("failed", trainer.position.step))
            if is_out_of_memory(error):
                leave_owners(trainer, run.folder)
            raise


def _built(
    config: Config, run: OpenedRun, dataset: Dataset, world: World
) -> tuple[Trainer, LoadedRun | None]:
    """Return the model in training, with its adapters. If the run goes on, it is at the newest checkpoint, which is
    returned, too."""
    folder, resumes = run.folder, run.resumes
    loaded = None
    START.doing(f"building the model of {sizes_of(config.model.shape()).parameters:,} parameters")
    lines: list[str] = []
    if resumes:
        dataset, lines = resumed_data(config.for_data, folder, dataset)
    with Reporter([Lines(0, 1)] if world.is_first else []) as notices:
        if resumes and world.is_first and (changes := changes_in_words(folder.config(), config)):
            notices.say(changes)
        for line in lines:
            notices.say(line)
        reads_weights = not resumes or config.finetune.has_base
        trainer = Trainer(config, world, dataset, reads_weights, hooks_of(config.run.hooks))
        if resumes:
            notices.say(f"reading the newest checkpoint in {checkpoints_of(folder, config.checkpoint)}")
            with START.left_to_others():
                loaded = trainer.load(folder, notices)
        if config.finetune.has_base:
            plain = trainer.engine.unwrapped(trainer.model)
            finetuning.prepare(plain, config.for_building, folder.base_file, resumes, world.mesh)
            notices.say(adapters.statement(trainer.model))
    return trainer, loaded


def _opened_reports(
    trainer: Trainer, loaded: LoadedRun | None, run: OpenedRun, stack: ExitStack, stop: StopRequest
) -> tuple[Reports, TaskEvaluations | None]:
    """Return the record and the sinks, with the lines before the first step, and the hooks, set up. `stack` closes
    them. Also the evaluations of tasks; None on ranks but the first, and without tasks."""
    folder, config = run.folder, trainer.config
    record = open_record(trainer, folder, run.attempt) if trainer.world.is_first else None
    reporter = Reporter([]) if record is None else open_reporter(trainer, folder, record, run.attempt)
    stack.enter_context(reporter)
    stack.callback(trainer.close)
    for line in introduction(trainer, folder, run.resumes):
        reporter.say(line)
    memory = MemoryReporter(trainer, folder, reporter)
    best = None
    if config.checkpoint.keep_best:
        best = BestCheckpoint(config.checkpoint.keep_best, config.data, folder, trainer.hooks, reporter.say)
    hooks: list[TrainerHook] = [MemorySnapshots(trainer, folder), FirstLoss(trainer, reporter), memory]
    if trainer.world.is_first:
        hooks.append(NotesOfStep(trainer, folder))
    evaluations = None
    if trainer.world.is_first and config.validation.tasks:
        evaluations = TaskEvaluations(
            config.validation, config.train.steps, folder, checkpoints_of(folder, config.checkpoint), reporter,
            lambda: stop.signal_number is not None,
        )  # fmt: skip
        hooks.append(evaluations)
    trainer.open_hooks(reporter, [*hooks, *([best] if best else [])], loaded)
    return Reports(record, reporter, memory, best), evaluations


def _run_steps(
    trainer: Trainer,
    folder: RunFolder,
    reports: Reports,
    stop: StopRequest,
    saved: Callable[[int], None] | None,
    evaluations: TaskEvaluations | None,
) -> LoopEnd:
    """Return the steps that the run still has to do, with its checkpoints."""

    def note_saved(step: int) -> None:
        if saved is not None:
            saved(step)
        trainer.hooks.saved(step)

    config, done = trainer.config, trainer.position.step
    checkpoints = checkpoints_of(folder, config.checkpoint)
    with Saves(
        config.checkpoint,
        checkpoints,
        reports.reporter,
        done,
        note_saved,
        reports.best,
        config.fault.rewind_steps,
        evaluations,
    ) as saves:
        if done >= config.train.steps:
            return LoopEnd()
        with ExitStack() as stack:
            stack.enter_context(heartbeat.listening(trainer.clock))
            if calls_dtensor(config.train, config.parallel) and trainer.world.device.type == "cpu":
                stack.enter_context(hears_dtensor(trainer.clock))
            profile = stack.enter_context(StepProfile(trainer, folder, reports.reporter))
            return run_steps(trainer, reports.reporter, saves, stop, profile)
