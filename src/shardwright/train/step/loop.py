"""The training loop of one rank: step, evaluate, log, save; until the last step, a signal, or the end by a hook."""

from __future__ import annotations

import signal
import time

from shardwright.train.launch.progress import START
from shardwright.train.launch.signals import StopRequest
from shardwright.train.report.reporter import Reporter
from shardwright.train.step.evaluation import validate
from shardwright.train.step.numerics.acting import answer
from shardwright.train.step.numerics.looking import fault_of_state
from shardwright.train.step.reporting.conclusion import LoopEnd
from shardwright.train.step.reporting.step_reports import (
    report_not_finite,
    report_untrained,
    step_record,
)
from shardwright.train.step.saving.checkpoint import LoadedRun
from shardwright.train.step.saving.saves import Saves
from shardwright.train.step.trainer import Trainer


def run_steps(
    trainer: Trainer, reporter: Reporter, saves: Saves, stop: StopRequest, loaded: LoadedRun | None = None
) -> LoopEnd:
    """Run steps, validations and checkpoints until the last step, a signal, or a hook that ends the run.

    Random generators go on from the `loaded` checkpoint. When this returns, the state is saved.
    """
    config = trainer.config
    if loaded is not None:
        trainer.continue_generators(loaded, reporter)
    while True:
        started = time.perf_counter()
        with trainer.recompiles.step():
            result = trainer.train_step(stop, saves.has_ended())
        agreed = result.agreed
        seconds = time.perf_counter() - started
        START.end()
        step = trainer.position.step
        is_last = step == config.train.steps
        ends = is_last or agreed.stops_early
        leaving = ends or agreed.signal != 0
        if agreed.signal and stop.signal_number is None:
            doing = "the run is at its end" if is_last else f"saving step {step}"
            reporter.answer(f"{signal.Signals(agreed.signal).name} received by another rank; {doing}")
        validates = config.validation.every > 0 and (ends or due(step, config.validation.every))
        saving = leaving or due(step, config.checkpoint.every)
        if result.untrained is not None:
            report_untrained(trainer, result.untrained, reporter, step if result.fault else step - 1)
        if fault := result.fault or (fault_of_state(trainer.state) if saving or validates else None):
            answer(fault, trainer, saves, reporter)
            if agreed.save_ended:
                saves.finish(raises=not leaving)
            if agreed.signal and trainer.position.step:
                trainer.save(saves, last=True)
                return LoopEnd(agreed.signal)
            continue
        validation = validate(trainer) if validates else None
        record = step_record(trainer, result, seconds, validation)
        report_not_finite(record, agreed, validation, reporter)
        trainer.hooks.after_step(record)
        if agreed.save_ended:
            saves.finish(raises=not leaving)
        if saving:
            trainer.save(saves, last=leaving)
        if leaving:
            early = trainer.hooks.stop_reason() if agreed.stops_early and not is_last else ""
            return LoopEnd(agreed.signal if not is_last else 0, early)


def due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
