"""The training loop of one rank: step, evaluate, log, save; until the last step, a signal, or the end by a hook."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Literal

from shardwright.train.launch.job_end import stopped_by
from shardwright.train.launch.signals import StopRequest
from shardwright.train.report.progress import START
from shardwright.train.report.reporter import Reporter
from shardwright.train.run.exits import DONE, Outcome
from shardwright.train.step.account.profile import StepProfile
from shardwright.train.step.account.step_reports import (
    report_step,
    report_untrained,
    step_record,
)
from shardwright.train.step.evaluation import validate
from shardwright.train.step.numerics.acting import act_on
from shardwright.train.step.numerics.detect import fault_of_state
from shardwright.train.step.saving.saves import Saves
from shardwright.train.step.trainer import Trainer


@dataclass(frozen=True)
class LoopEnd:
    """The end of the steps of a session.

    Attributes:
        signal: the signal that stopped them; 0 for none.
        early: the reason of the hook that stopped them; empty for none.
    """

    signal: int = 0
    early: str = ""

    @property
    def status(self) -> Literal["interrupted", "finished"]:
        return "interrupted" if self.signal else "finished"

    @property
    def outcome(self) -> Outcome:
        return stopped_by(self.signal) if self.signal else Outcome(DONE, "done")


def run_steps(
    trainer: Trainer, reporter: Reporter, saves: Saves, stop: StopRequest, profile: StepProfile
) -> LoopEnd:
    """Run steps, validations and checkpoints until the last step, a signal, or a hook that ends the run.

    When this returns, the state is saved.
    """
    config = trainer.config
    while True:
        profile.before_step(trainer.position.step + 1)
        trainer.clock.begin()
        with trainer.recompiles.step():
            result = trainer.train_step(stop, saves.has_ended())
        agreed = result.agreed
        seconds, parts = trainer.clock.end()
        profile.after_step(trainer.position.step)
        START.end()
        step = trainer.position.step
        is_last = step == config.train.steps
        ends = is_last or agreed.stops_early
        # With the next step under way the run ends after that one, which has the same signal.
        leaving = not trainer.is_ahead and (ends or agreed.signal != 0)
        if leaving and agreed.signal and stop.signal_number is None:
            doing = "the run is at its end" if is_last else f"saving step {step}"
            reporter.say_at_once(f"{signal.Signals(agreed.signal).name} received by another rank; {doing}")
        validates = config.validation.every > 0 and ((leaving and ends) or due(step, config.validation.every))
        saving = leaving or any(
            due(step, n) for n in (config.checkpoint.every, config.validation.tasks_every)
        )
        if result.untrained is not None:
            report_untrained(trainer, result.untrained, reporter, step if result.fault else step - 1)
        if result.repeat is not None:
            reporter.incident(result.repeat)
        if fault := result.fault or (fault_of_state(trainer.state) if saving or validates else None):
            if fault.unit_norms:
                reporter.unit_norms(step + 1, fault.unit_norms, left_out=True)
            act_on(fault, trainer, saves, reporter)
            if agreed.save_ended:
                saves.finish(raises=not leaving)
            if agreed.signal and trainer.position.step:
                trainer.save(saves, last=True)
                return LoopEnd(agreed.signal)
            continue
        validation = validate(trainer) if validates else None
        record = step_record(trainer, result, seconds, parts, validation)
        report_step(record, agreed, validation, reporter)
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
