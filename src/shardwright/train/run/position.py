"""The position of a run, and the places of its checkpoints. Nothing here reads a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

from shardwright.train.errors import UserError
from shardwright.train.run.past import NOTHING, Past
from shardwright.train.run.writing import may_pass

FolderOrUrl = Path | str  #: a folder here, or a URL


@dataclass(frozen=True)
class Position:
    """The position of a run: optimizer steps done, and samples seen, which is all the data order needs.

    Samples that were left out count as seen. `past` says which ones.
    """

    step: int
    samples: int
    past: Past = NOTHING

    def after_step(self, samples: int, loss: float, window: int) -> Position:
        """Return the position after an optimizer step on `samples` samples. `window`: losses that the past keeps."""
        return Position(self.step + 1, self.samples + samples, self.past.after_step(loss, window))

    def after_skip(self, samples: int) -> Position:
        """Return the position after `samples` samples without an optimizer step."""
        stop = self.samples + samples
        return Position(self.step, stop, self.past.after_skip((self.samples, stop)))

    def after_untrained(self, stop: int, batches: int) -> Position:
        """Return the position after `batches` global batches without a trained token, up to sample `stop`."""
        return Position(self.step, stop, self.past.after_untrained((self.samples, stop), batches))

    def after_rewind(self, before: Position, stop: int) -> Position:
        """Return the position after a rewind, with which the run goes on at sample `stop`.

        `self` is the position of the checkpoint that was loaded, `before` the one before that.
        """
        return Position(self.step, stop, self.past.after_rewind(before.past, (self.samples, stop)))

    def stored(self) -> dict[str, Any]:
        """Return the plain values of a checkpoint."""
        past = self.past.stored()
        return {"step": self.step, "samples": self.samples, **({"past": past} if past else {})}


@overload
def step_folder(checkpoints: Path, step: int) -> Path: ...
@overload
def step_folder(checkpoints: FolderOrUrl, step: int) -> FolderOrUrl: ...
def step_folder(checkpoints: FolderOrUrl, step: int) -> FolderOrUrl:
    name = f"step-{step}"
    return checkpoints / name if isinstance(checkpoints, Path) else f"{checkpoints}/{name}"


def saved_steps(checkpoints: FolderOrUrl, *, recover: bool = False) -> list[int]:
    """Steps that have a folder, newest first; whole or not. Raises OSError if a store does not answer.

    `recover`: a folder that was being replaced when the process ended gets its name back.
    """
    from shardwright.checkpoint import list_checkpoints

    names = list_checkpoints(checkpoints, recover=recover)
    return sorted(
        (int(match[1]) for name in names if (match := re.fullmatch(r"step-(\d+)", name))), reverse=True
    )


@contextmanager
def asking_store() -> Iterator[None]:
    """Raise the error of a store that does not answer as a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(str(error), passes=may_pass(error)) from error


def remove_step(checkpoints: FolderOrUrl, step: int) -> None:
    """Remove a checkpoint, whole or not. Raises OSError."""
    from shardwright.checkpoint import remove_checkpoint

    remove_checkpoint(step_folder(checkpoints, step))
