"""Checkpoints of a run: saved with torch's distributed checkpoint, whole or not at all, readable at any number of
ranks and by any engine.

A checkpoint is a folder checkpoints/step-N that appears by a rename once everything in it is on disk. What the
optimizer is set to (rates, decay) comes from the configuration and is never stored.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from shardwright.train.errors import UserError
from shardwright.train.runs import unwritable

POSITION_FILE = "position.json"


@dataclass(frozen=True)
class Position:
    """Where a run stands: optimizer steps done, and samples seen, which is all the data order needs."""

    step: int
    samples: int


def step_folder(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step-{step}"


def saved_steps(checkpoints: Path) -> list[int]:
    """Steps that have a folder, newest first; whole or not."""
    names = [path.name for path in checkpoints.iterdir() if path.is_dir()] if checkpoints.is_dir() else []
    return sorted(
        (int(match[1]) for name in names if (match := re.fullmatch(r"step-(\d+)", name))), reverse=True
    )


# ---------------------------------------------------------------------------------------------------------------
# Saving


def save(
    checkpoints: Path, model: nn.Module, optimizer: torch.optim.Optimizer, position: Position, keep: int
) -> Path:
    """Write a checkpoint and delete all but the newest `keep` whole ones. Called by every rank; returns its folder.

    Raises UserError on every rank where the folder cannot be written; earlier checkpoints stay as they are.
    """
    final = step_folder(checkpoints, position.step)
    partial = checkpoints / f".{final.name}.partial"
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state["state"]}
    _on_first_rank(lambda: _make_room(partial, model), final)
    try:
        dcp.save(state, storage_writer=dcp.FileSystemWriter(partial))
    except (CheckpointException, OSError, RuntimeError) as error:
        _on_first_rank(lambda: shutil.rmtree(partial, ignore_errors=True), final)
        cause = _write_failure(error)
        if cause is None:
            raise
        raise UserError(unwritable(final, cause)) from error
    _on_first_rank(lambda: _finish(partial, final, position, keep), final)
    return final


def _make_room(partial: Path, model: nn.Module) -> None:
    """An empty folder to write into, on a disk with space for it.

    Checked in advance because a disk that fills up half-way costs the time of a save, and other programs their disk.
    """
    for leftover in partial.parent.glob(".step-*.partial"):
        shutil.rmtree(leftover)
    partial.mkdir(parents=True)
    need = 3 * sum(p.numel() * p.element_size() for p in _full_parameters(model))  # weights and two moments
    free = shutil.disk_usage(partial).free
    if free < need:
        partial.rmdir()
        raise OSError(f"needs {need:,} bytes, {free:,} are free")


def _full_parameters(model: nn.Module) -> list[torch.Tensor]:
    # On a plain model these are the parameters; on a sharded one their DTensors, which count globally. FSDP1's
    # views count locally: there the check is too mild, and the write itself reports.
    return list(model.parameters())


def _finish(partial: Path, final: Path, position: Position, keep: int) -> None:
    file = partial / POSITION_FILE
    with open(file, "w", encoding="utf-8") as stream:
        json.dump(asdict(position), stream)
        stream.flush()
        os.fsync(stream.fileno())
    if final.exists():  # the same step again, after a resume from before it
        shutil.rmtree(final)
    os.replace(partial, final)
    _sync_folder(final.parent)
    _delete_old(final.parent, position.step, keep)


def _delete_old(checkpoints: Path, newest: int, keep: int) -> None:
    """Keep the `keep` newest whole checkpoints up to step `newest`, which was just written.

    A broken one beyond is what a resume has fallen back from: were it counted, it would cost a whole one its place.
    """
    kept = 0
    for step in saved_steps(checkpoints):
        folder = step_folder(checkpoints, step)
        whole = step == newest or what_is_missing(folder) is None
        if kept == keep or (step > newest and not whole):
            shutil.rmtree(folder)
        elif step <= newest and whole:
            kept += 1


def _sync_folder(path: Path) -> None:
    # Without this a crash of the machine can lose the rename although the files are on disk.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _on_first_rank(action: Callable[[], None], final: Path) -> None:
    """Do `action` on rank 0 and let every rank raise what it raised, so that none waits for the others."""
    outcome: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            action()
        except OSError as error:
            outcome = [unwritable(final, error)]
    dist.broadcast_object_list(outcome, src=0)
    if outcome[0] is not None:
        raise UserError(outcome[0])


def _write_failure(error: BaseException) -> BaseException | None:
    """The failure to write behind an error of a save, or None where it is something else."""
    causes = (
        [pair[0] for pair in error.failures.values()] if isinstance(error, CheckpointException) else [error]
    )
    chain: list[BaseException] = []
    for cause in causes:
        step: BaseException | None = cause
        while step is not None:
            chain.append(step)
            step = step.__cause__ or step.__context__
    for item in chain:
        if isinstance(item, OSError):
            return item
    # torch's zip writer reports a failed write as a RuntimeError of its own.
    return next((item for item in chain if "write" in str(item) or "unexpected pos" in str(item)), None)


# ---------------------------------------------------------------------------------------------------------------
# Finding


def newest_whole(checkpoints: Path, say: Callable[[str], None]) -> Path:
    """The newest checkpoint that is whole; `say` is told of each one passed over. UserError where there is none."""
    broken = []
    for step in saved_steps(checkpoints):
        folder = step_folder(checkpoints, step)
        problem = what_is_missing(folder)
        if problem is None:
            return folder
        broken.append(f"{folder.name}: {problem}")
        say(f"{folder} is incomplete ({problem}); falling back to the one before")
    found = f"found only incomplete ones ({'; '.join(broken)})" if broken else "found none"
    raise UserError(f"{checkpoints}: expected a whole checkpoint, {found}")


def what_is_missing(folder: Path) -> str | None:
    """Why the checkpoint cannot be read, or None if every file is there in its full length."""
    try:
        metadata = read_metadata(folder)
        read_position(folder)
    except UserError as error:
        return str(error).removeprefix(f"{folder}: ")
    for item in (metadata.storage_data or {}).values():
        file = folder / item.relative_path
        size = file.stat().st_size if file.is_file() else 0
        if size < item.offset + item.length:
            return (
                f"{item.relative_path} holds {size:,} bytes, at least {item.offset + item.length:,} expected"
            )
    return None


def read_metadata(folder: Path) -> Metadata:
    """What a checkpoint says it holds. Raises UserError where that cannot be read."""
    try:
        return dcp.FileSystemReader(folder).read_metadata()
    except FileNotFoundError:
        raise UserError(f"{folder}: no .metadata file") from None
    except Exception as error:
        # Unpickling damaged bytes can raise nearly anything.
        raise UserError(f"{folder}: unreadable .metadata file ({type(error).__name__})") from error


def read_position(folder: Path) -> Position:
    try:
        content = json.loads((folder / POSITION_FILE).read_text(encoding="utf-8"))
        return Position(step=int(content["step"]), samples=int(content["samples"]))
    except (OSError, ValueError, LookupError, TypeError):
        raise UserError(f"{folder}: no readable {POSITION_FILE}") from None


# ---------------------------------------------------------------------------------------------------------------
# Loading


Shapes = Mapping[str, tuple[int, ...]]


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Names and shapes a checkpoint of this plain, unsharded model holds."""
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def check_fits(folder: Path, shapes: Shapes) -> None:
    """Refuse a checkpoint of another model, before anything is changed. Names the first parameter that differs."""
    stored = {
        name.removeprefix("model."): tuple(entry.size)
        for name, entry in read_metadata(folder).state_dict_metadata.items()
        if name.startswith("model.") and isinstance(entry, TensorStorageMetadata)
    }
    for name, shape in shapes.items():
        if name not in stored:
            raise UserError(f"{folder}: expected {name} of shape {list(shape)}, found no such parameter; this is a "
                            "checkpoint of another model")  # fmt: skip
        if stored[name] != shape:
            raise UserError(f"{folder}: expected {name} of shape {list(shape)}, found {list(stored[name])}; this is a "
                            "checkpoint of another model")  # fmt: skip
    for name, shape in stored.items():
        if name not in shapes:
            raise UserError(f"{folder}: expected no parameter {name}, found one of shape {list(shape)}; this is a "
                            "checkpoint of another model")  # fmt: skip


def check_optimizer_fits(folder: Path, state: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse a checkpoint of another optimizer. Names the first value that it does not hold."""
    stored = read_metadata(folder).state_dict_metadata
    for name, values in state.items():
        for key in values:
            if f"optimizer.{name}.{key}" not in stored:
                raise UserError(f"{folder}: expected the optimizer's {key} of {name}, found none; this is a checkpoint "
                                "of another optimizer, so resume with the optimizer.name it was made with")  # fmt: skip


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, shapes: Shapes) -> Position:
    """Read a checkpoint into a model and its optimizer. Called by every rank; returns where the run stands.

    `shapes` are those of the model before it was sharded. Rates and decay of the optimizer stay as they are.
    """
    check_fits(folder, shapes)
    position = read_position(folder)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state["state"]}
    check_optimizer_fits(folder, state["optimizer"])
    dcp.load(state, storage_reader=dcp.FileSystemReader(folder))
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict={**optimizer_state, "state": state["optimizer"]},
    )
    return position


def load_weights(folder: Path, model: nn.Module) -> None:
    """Read the weights alone into a plain model, in one process, without a process group."""
    check_fits(folder, shapes_of(model))
    state = {"model": model.state_dict()}
    with warnings.catch_warnings():
        # One process is what is meant here.
        warnings.filterwarnings(
            "ignore", message="torch.distributed is disabled, unavailable or uninitialized"
        )
        dcp.load(state, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    model.load_state_dict(state["model"])
