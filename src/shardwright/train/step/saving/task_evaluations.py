"""Evaluations of tasks on checkpoints of the run, beside its steps, for `[validation] tasks`.

A process of its own evaluates (`launch/evaluation_process.py`), one step after another. Only the first rank has the
object, and no step waits for it; at the end of the run all ranks wait, in rounds. Nothing here imports lm_eval or
computes a metric.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Collection
from contextlib import suppress

import torch
import torch.distributed as dist

from shardwright.engine import heartbeat
from shardwright.engine.comm import noted
from shardwright.train.config import ValidationConfig
from shardwright.train.config.catalog.hooks import Job, TrainerHook
from shardwright.train.config.catalog.records import RunEnd, StepRecord
from shardwright.train.config.sections.validation import YAML
from shardwright.train.errors import UserError
from shardwright.train.launch.evaluation_process import EvaluationProcess, check_names
from shardwright.train.launch.signals import StopRequest
from shardwright.train.parallel.rank_facts import collective_timeout
from shardwright.train.report.reporter import Reporter
from shardwright.train.run.evaluations import (
    evaluated_steps,
    evaluation_at,
    failures_of,
    note_failures,
    unfinished_steps,
)
from shardwright.train.run.folder import RunFolder
from shardwright.train.run.position import FolderOrUrl, asking_store, remove_step, saved_steps

POLL_SECONDS = 0.2
"""Between looks at the process, at the end of the run."""
ATTEMPTS = 2
"""Evaluations of a step that may fail: a resume repeats the first one alone."""
ROUND_SECONDS = 5.0
"""After which all ranks meet at the end of the run: the longest that one waits for the first."""


class TaskEvaluations(TrainerHook):
    """Starts evaluations and reports their results.

    At most one runs and one waits. A newer step replaces the one that waits, which is then not evaluated. A checkpoint
    stays until its evaluation has ended.

    Args:
        settings: `[validation]`.
        steps: of the run.
        folder: of the run.
        checkpoints: their place.
        reporter: gets results, and warnings about evaluations that fail.
        is_stopped: whether a signal asks the run to end.
    """

    def __init__(
        self,
        settings: ValidationConfig,
        steps: int,
        folder: RunFolder,
        checkpoints: FolderOrUrl,
        reporter: Reporter,
        is_stopped: Callable[[], bool],
    ) -> None:
        self._settings, self._steps = settings, steps
        self._folder, self._checkpoints = folder, checkpoints
        self._reporter, self._is_stopped = reporter, is_stopped
        self._running: EvaluationProcess | None = None
        self._waiting: int | None = None
        self._begun: set[int] = set()  #: steps, in this session
        self._postponed: set[int] = set()  #: steps whose checkpoints go after their evaluation

    # -- the hook ---------------------------------------------------------------------------------------------------

    def setup(self, job: Job) -> None:
        """Check names of tasks, and evaluate again what the last session has not finished.

        Raises:
            UserError: lm-eval does not know a task.
        """
        names = [task for task in self._settings.tasks if not task.endswith(YAML)]
        if names and (warning := check_names(self._folder, names)):
            self._reporter.say(warning)
        unfinished = [
            step
            for step in unfinished_steps(self._folder)
            if 0 < step <= job.steps_done and failures_of(self._folder, step) < ATTEMPTS
        ]
        if not unfinished:
            return
        with asking_store():
            saved = saved_steps(self._checkpoints)
        for step in unfinished:
            if step in saved:
                self._reporter.say(f"tasks of step {step} are evaluated again: they have no results")
                self._evaluate(step)
            else:
                self._reporter.say(
                    f"warning: tasks of step {step} have no results, and its checkpoint is gone"
                )
                self._forget(step)

    def saved(self, step: int) -> None:
        every = self._settings.tasks_every
        if (every and step % every == 0) or step == self._steps:
            with suppress(OSError):  # of a step that the run has done again
                self._folder.evaluation_file(step).unlink(missing_ok=True)
            self._note_failures(step, 0)
            self._evaluate(step)

    def after_step(self, record: StepRecord) -> None:
        self._look()

    def finish(self, step: int) -> None:
        """Start the evaluation of the last step of a run that is finished, and say what the run waits for."""
        self._look()
        failures = failures_of(self._folder, step)
        if step not in self._begun and step not in evaluated_steps(self._folder) and failures < ATTEMPTS:
            self._evaluate(step)
        if self._running is not None:
            self._reporter.say(f"waiting for the tasks of {self._in_words()}; their log: {self._running.log}")

    def wait(self, seconds: float) -> bool:
        """Wait for so long, or until all is evaluated or a signal came. Returns whether to wait on."""
        deadline = time.monotonic() + seconds
        while self._running is not None and not self._is_stopped():
            if time.monotonic() > deadline:
                return True
            time.sleep(POLL_SECONDS)
            self._look()
        return False

    def end(self, end: RunEnd) -> None:
        """End the process, if a signal or a failure leaves one."""
        self._look()
        if self._running is None:
            return
        how = f"a resume evaluates them; or call {self._command()}"
        self._reporter.say(
            f"tasks of {self._in_words()} are not evaluated, since the run ends; {how}"
            if end.status != "finished"
            else f"tasks of {self._in_words()} are not evaluated, since a signal ends the run; {self._command()} does"
        )
        if end.status == "failed":  # the launcher leaves no time; the process ends by itself
            self._running.ask_to_end()
        else:
            self._running.stop()
        self._running, self._waiting = None, None

    # -- checkpoints that are in use --------------------------------------------------------------------------------

    def unused(self, steps: Collection[int]) -> list[int]:
        """Return the steps of these whose checkpoints may be deleted now. The others are deleted after their
        evaluation."""
        self._look()
        used = self._used()
        self._postponed |= {step for step in steps if step in used}
        return [step for step in steps if step not in used]

    def forget_after(self, step: int) -> None:
        """End evaluations of later steps, from which the run has gone back."""
        if self._waiting is not None and self._waiting > step:
            self._forget(self._waiting)
            self._waiting = None
        if self._running is not None and self._running.step > step:
            self._running.stop()
            self._forget(self._running.step)
            self._running = None
        self._begun = {each for each in self._begun if each <= step}
        self._postponed = set()  # the run may need each of them now; its next save decides again
        self._start_next()

    # -- the process ------------------------------------------------------------------------------------------------

    def _evaluate(self, step: int) -> None:
        """Start the evaluation of a step, or let it wait for the one that runs."""
        self._begun.add(step)
        self._look()
        if self._waiting is not None:
            assert self._running is not None
            self._reporter.say(
                f"tasks of step {self._waiting} are left out: those of step {self._running.step} are still evaluated, "
                f"and step {step} is due; a larger validation.tasks_every or a validation.tasks_limit leaves none out"
            )
            self._forget(self._waiting)
            self._delete_postponed(self._waiting)
        self._waiting = step
        with suppress(OSError):  # the start of the process finds it again
            # A resume finds by its log that the evaluation is not done.
            self._folder.evaluations.mkdir(parents=True, exist_ok=True)
            self._folder.evaluation_log(step).touch()
        self._start_next()

    def _start_next(self) -> None:
        if self._running is None and self._waiting is not None:
            step, self._waiting = self._waiting, None
            try:
                self._running = EvaluationProcess(self._folder, step, self._settings)
            except (OSError, UserError) as error:
                self._warn(step, str(error))
                self._delete_postponed(step)

    def _look(self) -> None:
        """If the process has ended, report its results, and start the evaluation that waits."""
        if self._running is None or (status := self._running.poll()) is None:
            return
        ended, self._running = self._running, None
        reason = ended.error() if status else ""
        if not reason:
            try:
                self._reporter.tasks(*evaluation_at(self._folder, ended.step))
            except UserError as error:
                reason = str(error)
        if reason:
            self._warn(ended.step, reason)
        self._delete_postponed(ended.step)
        self._start_next()

    def _warn(self, step: int, reason: str) -> None:
        log = self._folder.evaluation_log(step)
        failures = failures_of(self._folder, step) + 1
        self._note_failures(step, failures)
        again = "" if failures == 1 else ", again; no resume tries it once more"
        # After the last step nothing resumes the run.
        by_hand = f"{self._command(step)} repeats it; " if failures > 1 or step == self._steps else ""
        self._reporter.say(
            f"warning: tasks of step {step} are not evaluated: {reason}{again}. The run goes on; {by_hand}log: {log}"
        )

    def _note_failures(self, step: int, failures: int) -> None:
        with suppress(OSError):  # then a resume tries once more
            note_failures(self._folder, step, failures)

    def _forget(self, step: int) -> None:
        """Let no resume evaluate a step."""
        with suppress(OSError):
            self._folder.evaluation_log(step).unlink(missing_ok=True)
        self._note_failures(step, 0)

    def _delete_postponed(self, step: int) -> None:
        if step not in self._postponed:
            return
        self._postponed.discard(step)
        try:
            remove_step(self._checkpoints, step)
        except OSError as error:  # the next save tries again
            self._reporter.say(f"warning: checkpoint of step {step}: cannot delete it: {error}")

    def _used(self) -> list[int]:
        """Return the steps of the evaluations that run and wait."""
        running = None if self._running is None else self._running.step
        return [step for step in (running, self._waiting) if step is not None]

    def _in_words(self) -> str:
        return " and ".join(f"step {step}" for step in self._used())

    def _command(self, step: int | None = None) -> str:
        at = "" if step is None else f" --step {step}"
        tasks = shlex.quote(",".join(self._settings.tasks))
        tasks += " --apply-chat-template" if self._settings.tasks_apply_chat_template else ""
        return f"shardwright evaluate {shlex.quote(str(self._folder.path))}{at} --tasks {tasks}"


def await_tasks(
    evaluations: TaskEvaluations | None,
    stop: StopRequest,
    step: int,
    device: torch.device,
    stall_seconds: float,
) -> None:
    """Let all ranks wait for the evaluations of a run that has done `step`, its last one.

    They wait in rounds shorter than each limit of a wait, such as `fault.stall_seconds`. `evaluations`: on the first
    rank. A signal for any rank ends the wait. Called by all ranks together.
    """
    if evaluations is not None:
        evaluations.finish(step)
    limits = [ROUND_SECONDS, collective_timeout().total_seconds() / 4]
    if stall_seconds:
        limits.append(stall_seconds / 4)
    goes_on, stops = 1.0, 0.0
    while goes_on and not stops:
        heartbeat.at(heartbeat.END)
        goes_on = float(evaluations is not None and evaluations.wait(min(limits)))
        stops = float(stop.signal_number is not None)
        states = torch.tensor([goes_on, stops], device=device)
        with noted("all-reduce of waits for tasks", None):
            dist.all_reduce(states, op=dist.ReduceOp.MAX)
        goes_on, stops = states.tolist()
