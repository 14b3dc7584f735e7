"""Actions on a fault: a run leaves samples out, goes back to a checkpoint, or saves and ends."""

from __future__ import annotations

from typing import NoReturn

from shardwright.engine import RankGroup
from shardwright.train.config.catalog.hooks import Fault
from shardwright.train.config.catalog.records import Incident
from shardwright.train.errors import counted
from shardwright.train.report.reporter import Reporter
from shardwright.train.run.position import asking_store, saved_steps
from shardwright.train.step.numerics.detect import FaultError
from shardwright.train.step.saving.checkpoint import SaveFailedError
from shardwright.train.step.saving.saves import Saves
from shardwright.train.step.trainer import Trainer


def act_on(fault: Fault, trainer: Trainer, saves: Saves, reporter: Reporter) -> None:
    """Do what the settings ask for. Called by all ranks together.

    Raises:
        FaultError: the run cannot go on. The state before the fault is saved if it is good.
    """
    settings, past = trainer.config.fault, trainer.position.past
    if fault.action == "skip":
        if past.skips_in_a_row == settings.max_skips:
            why = f"{counted(past.skips_in_a_row, 'step')} before it were skipped, too (fault.max_skips)"
            _stop(fault, why, "more steps in a row are skipped with a larger fault.max_skips", trainer, saves)
        trainer.skip()
        reporter.incident(Incident("skip", trainer.position.step + 1, fault.reason, fault.samples))
    elif fault.action == "rewind":
        if past.rewinds == settings.max_rewinds:
            why = f"the run has gone back {counted(past.rewinds, 'time')} already (fault.max_rewinds)"
            more = "a larger fault.rewind_steps goes back further, and fault.max_rewinds more often"
            _stop(fault, why, more, trainer, saves)
        _rewind(fault, trainer, saves, reporter)
    else:
        _stop(fault, "", "", trainer, saves)


def _rewind(fault: Fault, trainer: Trainer, saves: Saves, reporter: Reporter) -> None:
    """Go back to the newest checkpoint that is old enough, and go on with the samples after the fault."""
    saves.finish(raises=False)
    before, stop = trainer.position, fault.samples[1]
    latest = before.step - trainer.config.fault.rewind_steps
    with asking_store():
        steps = RankGroup().run_on_first(lambda: saved_steps(saves.checkpoints))
    if not any(step <= latest for step in steps):
        why = f"there is no checkpoint of step {max(latest, 0)} or before to go back to"
        # An earlier rewind has deleted the checkpoints after its step, however many there were.
        keys = ["checkpoint.every"] if latest > 0 and not before.past.rewinds else []
        keys += ["fault.rewind_steps"] if steps and trainer.config.fault.rewind_steps else []
        more = f"there would be one with a smaller {' or '.join(keys)}" if keys else ""
        _stop(fault, why, more, trainer, saves)
    trainer.rewind(saves.checkpoints, reporter, latest, stop)
    saves.forget_after(trainer.position.step)
    first = trainer.position.past.left_out[-1][0]
    incident = Incident("rewind", trainer.position.step + 1, fault.reason, (first, stop), before.step)
    reporter.rewind(trainer.position.step)
    reporter.incident(incident)


def _stop(fault: Fault, why: str, more: str, trainer: Trainer, saves: Saves) -> NoReturn:
    """Save and end. `why` says about a limit that was reached, `more` is the rest of the advice."""
    reason, advice = ("; ".join(filter(None, words)) for words in ((fault.reason, why), (fault.advice, more)))
    saved = _saved(fault, trainer, saves)
    raise FaultError(". ".join(filter(None, [reason, saved, advice[:1].upper() + advice[1:]])))


def _saved(fault: Fault, trainer: Trainer, saves: Saves) -> str:
    """Save the state before the fault, unless it is wrong itself. Returns what was done, in words."""
    step = trainer.position.step
    if not fault.state_is_good:
        try:
            steps = RankGroup().run_on_first(lambda: saved_steps(saves.checkpoints))
            newest = f"the newest checkpoint is of step {steps[0]}" if steps else "there is no checkpoint"
        except OSError as error:
            newest = str(error)
        return f"The state is not saved, since it is no longer the one before the fault; {newest}"
    if not step:
        return "Nothing was updated, and no step is done, so nothing is saved"
    try:
        trainer.save(saves, last=True)
    except SaveFailedError as error:
        return f"Nothing was updated; the state after step {step} could not be saved: {error}"
    return f"Nothing was updated; the state after step {step} is saved"
