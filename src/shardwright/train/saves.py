"""The checkpoints that a run writes: what happens if one cannot be written, and which ones stay.

An older checkpoint is deleted when a newer one is on disk and was read back. Only checkpoints whose files were compared
with their digests count among those to keep. The form of a checkpoint is in `checkpoint`.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from torch import nn

from shardwright.checkpoint import places
from shardwright.checkpoint.digests import Damaged
from shardwright.checkpoint.ranks import Ranks
from shardwright.train import checkpoint
from shardwright.train.checkpoint import SaveFailedError
from shardwright.train.errors import UserError
from shardwright.train.reporter import Reporter
from shardwright.train.sections.checkpoint import CheckpointConfig
from shardwright.train.steps import Position, saved_steps, step_folder


class Saves:
    """The checkpoints of a run, on one rank. Every method is called by all ranks together."""

    def __init__(
        self, settings: CheckpointConfig, checkpoints: Path, reporter: Reporter, loaded: int | None = None
    ) -> None:
        """`loaded`: the step of the checkpoint from which the run goes on, whose files were compared."""
        self.settings, self.checkpoints, self.reporter = settings, checkpoints, reporter
        #: By step, whether the files are those that were saved, of checkpoints that were compared in this session.
        self._whole = {} if loaded is None else {loaded: True}

    def save(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, position: Position, last: bool = False
    ) -> None:
        """Write a checkpoint and delete those that are no longer to keep.

        Raises:
            SaveFailedError: the checkpoint cannot be written, and it is the `last` one, or the settings are to stop.
        """
        try:
            self._remove_leftovers()
            checkpoint.save(self.checkpoints, model, optimizer, position, self.reporter.say)
            self._whole[position.step] = True
            self._delete_old(position.step)
        except SaveFailedError as error:
            if last or self.settings.on_save_failure == "stop":
                raise
            self.reporter.save_failed(position.step, str(error))

    def _remove_leftovers(self) -> None:
        """Remove what killed saves have left, as far as that is possible."""
        if Ranks().is_first:
            for left in self.checkpoints.glob(".step-*.partial"):
                shutil.rmtree(left, ignore_errors=True)

    def _delete_old(self, newest: int) -> None:
        ranks = Ranks()

        def delete(steps: list[int]) -> None:
            for step in steps:
                places.remove(step_folder(self.checkpoints, step))

        try:
            steps = ranks.by_first(lambda: saved_steps(self.checkpoints))
            doomed = self._doomed(steps, newest)
            ranks.by_first(lambda: delete(doomed))
        except OSError as error:
            raise SaveFailedError(f"{self.checkpoints}: cannot delete old checkpoints: {error}") from error

    def _doomed(self, steps: list[int], newest: int) -> list[int]:
        """The steps to delete, of those that have a folder, newest first.

        Damaged ones after step `newest`, which was just written, are what a resume has fallen back from.
        """
        whole, doomed = 0, []
        for number, step in enumerate(steps):
            if step > newest:
                if not self._is_whole(step):
                    doomed.append(step)
            elif whole == self.settings.keep:
                doomed += [] if self._is_permanent(step) else [step]
            elif all(map(self._is_permanent, steps[number + self.settings.keep - whole :])):
                break  # nothing to delete, whether the rest is whole or not
            else:
                whole += self._is_whole(step)
        return doomed

    def _is_permanent(self, step: int) -> bool:
        return self.settings.keep_every > 0 and step % self.settings.keep_every == 0

    def _is_whole(self, step: int) -> bool:
        """Whether the files of a checkpoint are those that were saved. Every rank compares a share of them, once."""
        if step not in self._whole:
            try:
                checkpoint.verified(step_folder(self.checkpoints, step), Ranks(), self.reporter.say)
                self._whole[step] = True
            except (Damaged, UserError):
                self._whole[step] = False
        return self._whole[step]
