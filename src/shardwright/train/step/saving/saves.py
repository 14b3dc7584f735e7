"""The checkpoints that a run writes: what happens if one cannot be written, and which ones stay.

Which ones stay is not left to a `TrainerHook`: an error there counts as an error of the save, which may let the run go
on, and all ranks compare the files of earlier checkpoints together.

An older checkpoint is deleted when a newer one is on disk and was read back. Only checkpoints whose files were compared
with their digests count among those to keep. The form of a checkpoint is in `checkpoint`.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from shardwright import board as boards
from shardwright.checkpoint import AsyncCheckpoint, Damaged
from shardwright.collective import RankGroup
from shardwright.train.config.sections.checkpoint import CheckpointConfig
from shardwright.train.errors import UserError
from shardwright.train.report.reporter import Reporter
from shardwright.train.run.position import FolderOrUrl, Position, remove_step, saved_steps, step_folder
from shardwright.train.run.writing import may_pass
from shardwright.train.step.saving import checkpoint
from shardwright.train.step.saving.best import BestCheckpoint
from shardwright.train.step.saving.checkpoint import SaveFailedError


def background() -> AsyncCheckpoint:
    """The processes that write checkpoints while steps go on. Raises UserError where there can be none."""
    try:
        return AsyncCheckpoint(verified=True)
    except NotImplementedError as error:
        raise UserError(
            f"checkpoint.asynchronous: expected false on this system, found true: {error}"
        ) from error


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
    ) -> None:
        """`loaded`: the step of the checkpoint from which the run goes on, whose files were compared. `saved` is called
        with the step of each checkpoint that was written. `best`: finds one that stays, too."""
        self.settings, self.checkpoints, self.reporter = settings, checkpoints, reporter
        #: By step the damage, "" if the files are those that were saved, of checkpoints that were compared in this
        #: session. None: a later version of shardwright has saved it, so this one cannot know.
        self._damages: dict[int, str | None] = {} if loaded is None else {loaded: ""}
        self._note, self._best = saved, best
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
        self.conclude(goes_on=last)
        with self._failing(position.step, raises=last or self.settings.on_save_failure == "stop"):
            self._make_way(position.step)
            if self._background is None or last:
                checkpoint.save(self.checkpoints, model, optimizer, position, self.reporter.say, hooks)
                self._saved(position.step)
            else:
                checkpoint.save_in_background(
                    self._background, self.checkpoints, model, optimizer, position, hooks
                )
                self._under_way = position.step

    def has_ended(self) -> bool:
        """Whether `conclude` is due: the first rank knows that a checkpoint is written, or a rank that it failed.

        For each rank alone, at each step: the ranks agree in the reduction of the step.
        """
        if self._background is None or self._under_way is None:
            return False
        outcome = self._background.poll()
        return outcome is not None and (RankGroup().is_first or outcome.error is not None)

    def conclude(self, goes_on: bool = False) -> None:
        """Wait for the checkpoint that is written in the background, and delete those that are no longer to keep.

        Raises:
            SaveFailedError: it cannot be written, and the settings are to stop, unless the run `goes_on`.
        """
        step, self._under_way = self._under_way, None
        if self._background is None or step is None:
            return
        with self._failing(step, raises=self.settings.on_save_failure == "stop" and not goes_on):
            checkpoint.wait(self._background, step_folder(self.checkpoints, step))
            self._saved(step)

    def forget_after(self, step: int) -> None:
        """Delete checkpoints of later steps, from which the run has gone back. Else a resume would take one of them."""

        def delete() -> None:
            for later in saved_steps(self.checkpoints):
                if later > step:
                    remove_step(self.checkpoints, later)

        try:
            RankGroup().run_on_first(delete)
        except OSError as error:
            raise UserError(
                f"{self.checkpoints}: cannot delete checkpoints after step {step}: {error}"
            ) from error
        self._damages = {known: damage for known, damage in self._damages.items() if known <= step}

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
        self._damages[step] = ""
        if self._note is not None:
            with boards.during(boards.SAVE):
                self._note(step)
        self._delete_old(step)

    def _make_way(self, step: int) -> None:
        """Remove what killed saves have left, as far as that is possible, and behind a URL a damaged checkpoint."""
        ranks = RankGroup()
        if isinstance(self.checkpoints, Path):
            if ranks.is_first:
                for left in self.checkpoints.glob(".step-*.partial"):
                    shutil.rmtree(left, ignore_errors=True)
            return
        try:
            # No rename replaces it there, and without its digests a save cannot see that it is damaged.
            if step in ranks.run_on_first(lambda: saved_steps(self.checkpoints)) and self._damage(step):
                ranks.run_on_first(lambda: remove_step(self.checkpoints, step))
        except OSError as error:
            message = f"{step_folder(self.checkpoints, step)}: cannot write: {error}"
            raise SaveFailedError(message, may_pass(error)) from error

    def _delete_old(self, newest: int) -> None:
        ranks = RankGroup()

        def delete(steps: list[int]) -> None:
            for step in steps:
                remove_step(self.checkpoints, step)

        try:
            steps = ranks.run_on_first(lambda: saved_steps(self.checkpoints))
            best = self._best_step(steps)
            doomed = [step for step in self._doomed(steps, newest) if step != best]
            ranks.run_on_first(lambda: delete(doomed))
        except OSError as error:
            message = f"{self.checkpoints}: cannot delete old checkpoints: {error}"
            raise SaveFailedError(message, may_pass(error)) from error

    def _best_step(self, steps: list[int]) -> int | None:
        """The step of the best checkpoint of these steps; None without one. A damaged one is reported, and does not
        count as best any more."""
        best = self._best
        if best is None:
            return None
        ranks = RankGroup()
        found = ranks.run_on_first(lambda: best.among(steps))
        while found is not None and (damage := self._damage(found.step)):
            step, value = found
            ranks.run_on_first(functools.partial(best.forget, step))
            found = ranks.run_on_first(lambda: best.among(steps))
            now = (
                "none is left" if found is None else f"the best is now step-{found.step} ({found.value:.4f})"
            )
            what = f"{step_folder(self.checkpoints, step)}, the best ({best.figure} {value:.4f}), is damaged"
            self.reporter.say(f"{what} ({damage}); {now}")
        return None if found is None else found.step

    def _doomed(self, steps: list[int], newest: int) -> list[int]:
        """The steps to delete, of those that have a folder, newest first.

        Damaged ones after step `newest`, which was just written, are what a resume has fallen back from.
        """
        whole, doomed = 0, []
        for number, step in enumerate(steps):
            if step > newest:
                if self._damage(step):
                    doomed.append(step)
            elif whole == self.settings.keep:
                doomed += [] if self._is_permanent(step) else [step]
            elif all(map(self._is_permanent, steps[number + self.settings.keep - whole :])):
                break  # nothing to delete, whether the rest is whole or not
            else:
                whole += self._damage(step) == ""
        return doomed

    def _is_permanent(self, step: int) -> bool:
        return self.settings.keep_every > 0 and step % self.settings.keep_every == 0

    def _damage(self, step: int) -> str | None:
        """The damage of a checkpoint, as in `_damages`. Every rank compares a share of its files, once."""
        if step not in self._damages:
            try:
                checkpoint.verified(step_folder(self.checkpoints, step), self.reporter.say)
                self._damages[step] = ""
            except Damaged as problem:
                self._damages[step] = str(problem)
            except UserError:
                self._damages[step] = None
        return self._damages[step]
