"""The checkpoints that a run writes: what happens if one cannot be written, and which ones stay.

The rule of which ones stay is here, and not in a `TrainerHook`: a deletion that fails is a failure of the save, which
`checkpoint.on_save_failure` may let pass, and all ranks compare the files of earlier checkpoints together.

An older checkpoint is deleted when a newer one is on disk and was read back. Only checkpoints whose files were compared
with their digests count among those to keep. The form of a checkpoint is in `checkpoint`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from shardwright.checkpoint import AsyncCheckpoint, Damaged, remove_unfinished, replaces_checkpoints
from shardwright.engine import RankGroup, heartbeat
from shardwright.train.config.sections.checkpoint import CheckpointConfig
from shardwright.train.errors import UserError
from shardwright.train.report.reporter import Reporter
from shardwright.train.run.position import FolderOrUrl, Position, remove_step, saved_steps, step_folder
from shardwright.train.run.stored_checkpoint import examine
from shardwright.train.run.writing import may_pass
from shardwright.train.step import loading
from shardwright.train.step.saving import checkpoint
from shardwright.train.step.saving.best import BestCheckpoint
from shardwright.train.step.saving.checkpoint import SaveFailedError
from shardwright.train.step.saving.task_evaluations import TaskEvaluations


def background() -> AsyncCheckpoint:
    """Return the processes that write checkpoints while steps go on. Raises UserError where there can be none."""
    try:
        return AsyncCheckpoint(verified=True)
    except NotImplementedError as error:
        raise UserError(
            f"checkpoint.asynchronous: expected false on this system, found true: {error}"
        ) from error


class Condition(NamedTuple):
    """The condition of a checkpoint after its files were compared with their digests."""

    kind: Literal["sound", "damaged", "unknown"]  #: unknown: a later version of shardwright has saved it
    damage: str = ""


SOUND = Condition("sound")


def steps_to_delete(
    steps: Sequence[int],
    newest: int,
    best: int | None,
    settings: CheckpointConfig,
    condition: Callable[[int], Condition],
    rewind_steps: int = 0,
) -> list[int]:
    """Return the steps whose checkpoints go.

    The newest `checkpoint.keep` whole ones stay, the `best`, and each one that `keep_every` names. So do the newest
    whole one that is at least `rewind_steps` older than `newest`, and all after it: each of them becomes the one to
    which a rewind goes back, before the next save or after later ones. A damaged one after step `newest`, which was
    just written, goes: a resume has fallen back from it.

    Args:
        steps: those that have a folder, newest first.
        condition: of a step's checkpoint; expensive, and called by all ranks for the same steps.
    """

    def is_permanent(step: int) -> bool:
        return settings.keep_every > 0 and step % settings.keep_every == 0

    later = [step for step in steps if step > newest]
    doomed = [step for step in later if condition(step).kind == "damaged"]
    rest = steps[len(later) :]
    near = sum(step > newest - rewind_steps for step in rest)  # so many are too new for a rewind
    whole, has_old_one = 0, False  # of those before, which stay
    for number, step in enumerate(rest):
        if whole >= settings.keep and has_old_one:
            doomed += [old for old in rest[number:] if not is_permanent(old)]
            break
        # Damage is expensive to look for: not if nothing would go even if all the next ones were whole.
        needed = max(settings.keep - whole, 0 if has_old_one else max(near - number, 0) + 1)
        if all(is_permanent(old) for old in rest[number + needed :]):
            break
        if condition(step).kind == "sound":
            whole, has_old_one = whole + 1, has_old_one or number >= near
    return [step for step in doomed if step != best]


class Saves:
    """The checkpoints of a run, on one rank. Every method but `has_ended` is called by all ranks together."""

    def __init__(
        self,
        settings: CheckpointConfig,
        checkpoints: FolderOrUrl,
        reporter: Reporter,
        loaded: int | None = None,
        saved: Callable[[int], None] | None = None,
        best: BestCheckpoint | None = None,
        rewind_steps: int = 0,
        evaluations: TaskEvaluations | None = None,
    ) -> None:
        """`loaded`: the step of the checkpoint from which the run goes on, whose files were compared. `saved` is called
        with the step of each checkpoint that was written. `best`: finds one that stays, too. `rewind_steps`: steps that
        a rewind goes back at least, for which checkpoints stay. `evaluations`: of the first rank, if any; they read
        checkpoints while the run goes on."""
        self.settings, self.checkpoints, self.reporter = settings, checkpoints, reporter
        #: By step, of the checkpoints that were written or compared in this session.
        self._conditions: dict[int, Condition] = {} if loaded is None else {loaded: SOUND}
        self._note, self._best, self._rewind_steps = saved, best, rewind_steps
        self._evaluations = evaluations
        self._background = background() if settings.asynchronous else None
        self._under_way: int | None = None  #: the step that the background writes

    def __enter__(self) -> Saves:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._background is not None:
            self._background.__exit__(kind, error, trace)

    def save(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        position: Position,
        last: bool = False,
        hooks: Mapping[str, Any] | None = None,
    ) -> None:
        """Write a checkpoint, with the states of `hooks`, and delete those that are not to keep. In the background
        this may be later.

        On return the model may change. The `last` checkpoint of a run is written on return.

        Raises:
            SaveFailedError: the checkpoint, or the one before, cannot be written, and the settings are to stop; or the
                `last` one cannot.
        """
        self.finish(raises=not last)
        with self._failing(position.step, raises=last or self.settings.on_save_failure == "stop"):
            if self._make_way(position):
                return
            if self._background is None or last:
                checkpoint.save(self.checkpoints, model, optimizer, position, self.reporter.say, hooks)
                self._saved(position.step)
            else:
                checkpoint.save_in_background(
                    self._background, self.checkpoints, model, optimizer, position, hooks
                )
                self._under_way = position.step

    def has_ended(self) -> bool:
        """Return whether `finish` is due: the first rank knows that a checkpoint is written, or a rank that it failed.

        For each rank alone, at each step: the ranks agree in the reduction of the step.
        """
        if self._background is None or self._under_way is None:
            return False
        outcome = self._background.poll()
        return outcome is not None and (RankGroup().is_first or outcome.error is not None)

    def finish(self, raises: bool = True) -> None:
        """Wait for the checkpoint that is written in the background, and delete those that are no longer to keep.

        Raises:
            SaveFailedError: it cannot be written, and the settings are to stop. Else, or unless this `raises`, the
                failure is reported.
        """
        step, self._under_way = self._under_way, None
        if self._background is None or step is None:
            return
        with self._failing(step, raises=raises and self.settings.on_save_failure == "stop"):
            checkpoint.wait(self._background, step_folder(self.checkpoints, step))
            self._saved(step)

    def forget_after(self, step: int) -> None:
        """Delete checkpoints of later steps, from which the run has gone back. Else a resume would take one of them."""

        def delete() -> None:
            if self._evaluations is not None:
                self._evaluations.forget_after(step)
            for later in saved_steps(self.checkpoints):
                if later > step:
                    remove_step(self.checkpoints, later)

        try:
            RankGroup().run_on_first(delete)
        except OSError as error:
            raise UserError(
                f"{self.checkpoints}: cannot delete checkpoints after step {step}: {error}"
            ) from error
        self._conditions = {known: each for known, each in self._conditions.items() if known <= step}

    @contextmanager
    def _failing(self, step: int, raises: bool) -> Iterator[None]:
        """Report a save that fails, and let the run go on, unless this `raises` the error."""
        try:
            yield
        except SaveFailedError as error:
            if raises:
                raise
            self.reporter.save_failed(step, str(error))

    def _saved(self, step: int) -> None:
        self._conditions[step] = SOUND
        if self._note is not None:
            with heartbeat.during(heartbeat.SAVE):
                self._note(step)
        self._delete_old(step)

    def _make_way(self, position: Position) -> bool:
        """Remove what is in the way of a save, as far as that is possible. Returns whether the save was made before.

        Where a save replaces no checkpoint, one of the same step that is damaged, or of another position, goes.
        """
        ranks, step = RankGroup(), position.step
        if ranks.is_first:
            remove_unfinished(self.checkpoints)
        if replaces_checkpoints(self.checkpoints):
            return False
        place = step_folder(self.checkpoints, step)
        try:
            if step not in ranks.run_on_first(lambda: saved_steps(self.checkpoints)):
                return False
            kind = self._condition(step).kind  # without digests a save cannot see that it is damaged
            if kind == "unknown":
                return False  # the save says what is there
            if kind == "sound" and ranks.run_on_first(lambda: examine(place).position) == position:
                return True
            ranks.run_on_first(lambda: remove_step(self.checkpoints, step))
        except OSError as error:
            raise SaveFailedError(f"{place}: cannot write: {error}", may_pass(error)) from error
        return False

    def _delete_old(self, newest: int) -> None:
        ranks = RankGroup()

        def delete(steps: list[int]) -> None:
            for step in steps if self._evaluations is None else self._evaluations.unused(steps):
                remove_step(self.checkpoints, step)

        try:
            steps = ranks.run_on_first(lambda: saved_steps(self.checkpoints))
            best = self._best_step(steps)
            doomed = steps_to_delete(steps, newest, best, self.settings, self._condition, self._rewind_steps)
            ranks.run_on_first(lambda: delete(doomed))
        except OSError as error:
            message = f"{self.checkpoints}: cannot delete old checkpoints: {error}"
            raise SaveFailedError(message, may_pass(error)) from error

    def _best_step(self, steps: list[int]) -> int | None:
        """Return the step of the best checkpoint of these steps; None without one. A damaged one is reported, and does
        not count as best any more. Raises UserError if metrics.jsonl is damaged."""
        best, ranks = self._best, RankGroup()
        if best is None:
            return None
        candidate = ranks.run_on_first(lambda: best.among(steps))
        while candidate is not None and (condition := self._condition(candidate.step)).kind == "damaged":
            step, value = candidate
            best.forget(step)
            candidate = ranks.run_on_first(lambda: best.among(steps))
            now = "none is left"
            if candidate is not None:
                now = f"the best is now step-{candidate.step} ({candidate.value:.4f})"
            what = f"{step_folder(self.checkpoints, step)}, the best ({best.figure} {value:.4f}), is damaged"
            self.reporter.say(f"{what} ({condition.damage}); {now}")
        return None if candidate is None else candidate.step

    def _condition(self, step: int) -> Condition:
        """Return the condition of a checkpoint. Every rank compares a share of its files, once."""
        if step not in self._conditions:
            condition = SOUND
            try:
                loading.verified_checkpoint(step_folder(self.checkpoints, step), self.reporter.say)
            except Damaged as problem:
                condition = Condition("damaged", str(problem))
            except UserError:
                condition = Condition("unknown")
            self._conditions[step] = condition
        return self._conditions[step]
