"""Checkpoints of a run: a model, its optimizer, random generators and the position, by all ranks together.

Written by ``sw.save_checkpoint``, so torch's distributed checkpoint reads them, too. Rates and decay of the optimizer
are stored for other readers. Frozen parameters are not saved. Which checkpoints stay is decided in `saves`; `loading`
reads them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

import shardwright as sw
from shardwright.train.errors import UserError
from shardwright.train.report.progress import patience
from shardwright.train.run.position import FolderOrUrl, Position, step_folder
from shardwright.train.run.stored_checkpoint import HOOK
from shardwright.train.run.writing import may_pass, unwritable


class SaveFailedError(UserError):
    """A checkpoint cannot be written, and all earlier ones are as they were; or earlier ones cannot be deleted, and the
    new one is written."""


def save(
    checkpoints: FolderOrUrl,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    position: Position,
    say: Callable[[str], None] = lambda text: None,
    hooks: Mapping[str, Any] | None = None,
) -> FolderOrUrl:
    """Write a checkpoint, with the states of hooks, and read it back before it gets its name. Called by every rank;
    returns its folder.

    Raises, on every rank:
        SaveFailedError: the folder cannot be written. It names rank, file and reason.
        UserError: the optimizer's state has a value that no checkpoint can hold.
    """
    final = step_folder(checkpoints, position.step)
    started = time.perf_counter()
    with _failures(final), patience(say, lambda: f"saving {final}: {time.perf_counter() - started:.0f} s"):
        sw.save_checkpoint(
            final,
            model,
            optimizer,
            extra=_extra(position, hooks),
            frozen=False,
            overwrite=True,
            verified=True,
        )
    return final


def save_in_background(
    background: sw.AsyncCheckpoint,
    checkpoints: FolderOrUrl,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    position: Position,
    hooks: Mapping[str, Any] | None = None,
) -> None:
    """Copy what `save` writes, and let processes of their own write it. Called by every rank. Raises as `save`."""
    final = step_folder(checkpoints, position.step)
    with _failures(final):
        background.save(final, model, optimizer, extra=_extra(position, hooks), frozen=False, overwrite=True)


def _extra(position: Position, hooks: Mapping[str, Any] | None) -> dict[str, Any]:
    states = {f"{HOOK}{name}": state for name, state in (hooks or {}).items()}
    return {"position": position.stored(), **states}


def wait(background: sw.AsyncCheckpoint, folder: FolderOrUrl) -> None:
    """Wait until the checkpoint in this folder is written. Called by every rank.

    Raises, on every rank:
        SaveFailedError: it cannot be written, or a process that writes has died.
    """
    with _failures(folder):
        try:
            background.wait()
        except RuntimeError as error:
            outcome = background.poll()
            if outcome is None or outcome.error is None:
                raise  # the ranks have lost contact
            message = f"{folder}: cannot write: {error}; earlier files are unchanged"
            raise SaveFailedError(message, passes=True) from error


@contextmanager
def _failures(final: FolderOrUrl) -> Iterator[None]:
    """Raise errors of a save as those of `save`."""
    try:
        yield
    except OSError as error:
        reason = error if error.filename is None else OSError(f"{error.filename}: {error.strerror}")
        raise SaveFailedError(unwritable(final, reason, of_run=True), may_pass(error)) from error
    except ValueError as error:
        raise UserError(f"{final}: cannot save: {error}") from error
