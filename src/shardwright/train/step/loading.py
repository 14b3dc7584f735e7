"""Checkpoints of a run, read: into a model and its optimizer, for a run that goes on, or weights alone for a command.

Read by ``sw.load_checkpoint``. A run takes rates and decay of the optimizer from its configuration. Frozen parameters
are not loaded. Nothing here writes: `saving` does.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright.checkpoint import (
    Damaged,
    StoredCheckpoint,
    seed_generators,
    set_generator_states,
)
from shardwright.common.errors import OtherOptimizer
from shardwright.engine import RankGroup
from shardwright.train.errors import UserError, as_user_errors, counted
from shardwright.train.report.progress import patience_about_bytes
from shardwright.train.run.folder import to_begin_again
from shardwright.train.run.position import FolderOrUrl, Position, asking_store, saved_steps, step_folder
from shardwright.train.run.stored_checkpoint import HOOK, RunCheckpoint, examine

Say = Callable[[str], None]
T = TypeVar("T")


def _silent(text: str) -> None:
    pass


Shapes = Mapping[str, tuple[int, ...]]


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes a checkpoint of this plain, unsharded model holds."""
    frozen = {name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}
    return {name: tuple(each.shape) for name, each in model.state_dict().items() if name not in frozen}


@dataclass(frozen=True)
class LoadedRun:
    """The position from which a checkpoint lets a run go on.

    Attributes:
        position: of the run.
        ranks: that have stored their random generators.
        generators: the stored states: this rank's, or the first rank's if another number of ranks saved.
        checkpoint: it, for the states of hooks.
    """

    position: Position
    ranks: int
    generators: Mapping[str, Tensor]
    checkpoint: StoredCheckpoint


def hook_states(
    loaded: LoadedRun, present_states: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Return the stored states of hooks by their names, of those that are in `present_states`.

    A tensor is read into the one of the same shape at the same place there, whose sharding it has then, or else whole
    into a new one. Called by all ranks together.
    """
    states = {
        name: loaded.checkpoint.state("extra", f"{HOOK}{name}", own=present)
        for name, present in present_states.items()
    }
    return {name: state for name, state in states.items() if state is not None}


def continue_generators(loaded: LoadedRun, seed: int, ranks: RankGroup) -> str | None:
    """Let this rank's random generators go on from a checkpoint. Returns a line to print if they start again.

    They start again at another number of ranks: each rank has a seed that depends on `seed`, the step and the rank.
    """
    step, reason = loaded.position.step, "has no states of random generators"
    if loaded.ranks == ranks.size:
        try:
            set_generator_states(loaded.generators)
            return None
        except Damaged as problem:  # of another version of torch or Python
            reason = f"has states of random generators that cannot be restored ({problem})"
    elif loaded.ranks:
        reason = (
            f"was saved by {counted(loaded.ranks, 'rank')} and is loaded by {counted(ranks.size, 'rank')}"
        )
    seed_generators(f"{seed} {step} {ranks.rank}".encode())
    return (
        f"the checkpoint of step {step} {reason}: random generators do not go on where they were; each rank has a "
        "seed derived from run.seed, the step and the rank"
    )


def load_newest(
    checkpoints: FolderOrUrl,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    say: Say = _silent,
    latest: float = math.inf,
) -> LoadedRun:
    """Read the newest whole checkpoint, of step `latest` at most, into a model and its optimizer. Called by every rank.

    Damage that any rank meets, also while it loads, makes all ranks fall back to the checkpoint before; `say` is
    called for each one passed over. Raises UserError where none is whole.
    """
    with asking_store():
        # The first rank's answer: others may see a folder later.
        steps = RankGroup().run_on_first(
            lambda: [s for s in saved_steps(checkpoints, recover=True) if s <= latest]
        )
    return _newest(checkpoints, steps, lambda folder: load(folder, model, optimizer, say), say)


def load_newest_weights(
    checkpoints: FolderOrUrl, model: nn.Module, say: Say = _silent, step: int | None = None
) -> None:
    """Read the weights of a step, or for None of the newest whole checkpoint, into a plain model, in one process,
    without a process group."""
    steps = _steps_to_read(checkpoints, step)
    _newest(checkpoints, steps, lambda folder: load_weights(folder, model, say), say)


def _steps_to_read(checkpoints: FolderOrUrl, step: int | None) -> list[int]:
    """Return the steps with a checkpoint; of a step that is named, this one alone.

    Raises:
        UserError: the step has none.
    """
    with asking_store():
        steps = saved_steps(checkpoints, recover=True)
    if step is None:
        return steps
    if step not in steps:
        there = ", ".join(map(str, steps)) or "none"
        raise UserError(f"--step: expected a step with a checkpoint in {checkpoints} ({there}), found {step}")
    return [step]


def _newest(checkpoints: FolderOrUrl, steps: list[int], read: Callable[[FolderOrUrl], T], say: Say) -> T:
    damaged = []
    for step, older in zip(steps, [*steps, None][1:], strict=True):
        folder = step_folder(checkpoints, step)
        try:
            return read(folder)
        except Damaged as problem:
            damaged.append(f"step-{step}: {problem}")
            next_one = f"; falling back to step-{older}" if older is not None else ""
            say(f"{folder} is damaged ({problem}){next_one}")
    problems = (
        f"found only damaged ones ({'; '.join(damaged)}); restore one of them from a copy of it, or begin a new run in "
        "another run.dir"
        if damaged
        else f"found none; the run has saved nothing; {to_begin_again(checkpoints)}"
    )
    raise UserError(f"{checkpoints}: expected a whole checkpoint, {problems}")


def load(
    folder: FolderOrUrl,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    say: Say = _silent,
) -> LoadedRun:
    """Read a checkpoint into a model and its optimizer. Called by every rank; returns where the run stands.

    Rates and decay of the optimizer stay as they are. Raises Damaged on every rank where it is not the checkpoint that
    was saved, UserError where it is of another model or optimizer.
    """
    stored = agreed_checkpoint(folder)
    _load(stored, model, optimizer, say)
    return LoadedRun(stored.position, *stored.checkpoint.generators(), stored.checkpoint)


def _load(stored: RunCheckpoint, model: nn.Module, optimizer: torch.optim.Optimizer | None, say: Say) -> None:
    """Read a checkpoint. Precisions may differ from those of the save, and so may an optimizer's groups."""
    started = time.perf_counter()
    whole = sum(stored.checkpoint.files.values()) / RankGroup().size / 1e9

    def text(done: int) -> str:
        compared = f"{min(done / 1e9, whole):.1f} of {whole:.1f} GB of each rank compared with checksums"
        return f"loading {stored.folder}: {compared}, {time.perf_counter() - started:.0f} s"

    try:
        with patience_about_bytes(say, text) as progress:
            sw.load_checkpoint(
                stored.checkpoint,
                model,
                optimizer,
                generators=False,
                frozen=False,
                settings=False,
                convert=True,
                progress=progress,
            )
    except Damaged as problem:
        raise Damaged(str(problem).removeprefix(f"{stored.folder}: ")) from problem
    except OtherOptimizer as error:
        raise UserError(f"{error}; resume with the optimizer.name of the saved run") from error
    except ValueError as error:
        raise UserError(str(error)) from error


def load_weights(folder: FolderOrUrl, model: nn.Module, say: Say = _silent) -> None:
    """Read the weights alone into a plain model. Every rank, if there are several. Raises as `load` does."""
    _load(agreed_checkpoint(folder), model, None, say)


Read = Callable[[Mapping[str, Tensor]], None]


def with_weights(
    checkpoints: FolderOrUrl,
    step: int | None,
    shapes: Shapes,
    use: Callable[[Position, Read], T],
    say: Say = _silent,
) -> T:
    """Call `use` with a function that reads single weights into plain tensors, by name. In one process.

    The checkpoint is that of `step`, or for None the newest whole one: if it is damaged, also while it is read, `use`
    is called again with the one before. Raises UserError where there is none.
    """
    steps = _steps_to_read(checkpoints, step)

    def open_folder(folder: FolderOrUrl) -> T:
        stored = verified_checkpoint(folder, say)
        with as_user_errors(ValueError):
            stored.checkpoint.check_model(shapes)

        def read(tensors: Mapping[str, Tensor]) -> None:
            stored.checkpoint.read({f"model.{name}": tensor for name, tensor in tensors.items()})

        return use(stored.position, read)

    # Of one step, one error says that it is damaged.
    return _newest(checkpoints, steps, open_folder, say if step is None else _silent)


def agreed_checkpoint(folder: FolderOrUrl) -> RunCheckpoint:
    """Return a checkpoint that every rank has found sound. Its files are not compared yet.

    Raises, on every rank:
        Damaged: its description is damaged, or the ranks read different ones.
        UserError: a later version of shardwright has saved it.
    """
    ranks = RankGroup()
    try:
        stored, prints = ranks.run_and_share(
            lambda: examine(folder), lambda stored: stored.checkpoint.fingerprint
        )
    except Damaged:
        raise
    except ValueError as error:  # UnknownVersion, on other ranks without its kind
        raise UserError(f"{folder}: {error}") from error
    ranks.check_equal(
        prints,
        lambda others, *_: Damaged(
            f"rank {others[0]} reads another description of the checkpoint than rank 0"
        ),
    )
    return stored


def verified_checkpoint(folder: FolderOrUrl, say: Say = _silent) -> RunCheckpoint:
    """As :func:`agreed_checkpoint`, and its files are those that were saved. Each rank compares its share."""
    stored = agreed_checkpoint(folder)
    whole = sum(stored.checkpoint.files.values()) / RankGroup().size / 1e9

    def text(done: int) -> str:
        return f"comparing checksums of {folder}: {done / 1e9:.1f} of {whole:.1f} GB of each rank"

    with patience_about_bytes(say, text) as progress:
        stored.checkpoint.verify(progress)
    return stored
