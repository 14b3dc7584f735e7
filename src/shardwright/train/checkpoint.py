"""Checkpoints of a run: saved with torch's distributed checkpoint, whole or not at all, readable at any number of
ranks and by any engine.

A checkpoint is a folder checkpoints/step-N that appears by a rename once everything in it is on disk, and that is
loaded once its files are compared with the digests that were taken when they were written. What the optimizer is set
to (rates, decay) comes from the configuration and is never stored.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from shardwright.checkpoint import folders
from shardwright.checkpoint.digests import Damaged, Digest, digest_of
from shardwright.checkpoint.folders import METADATA, files_of
from shardwright.train.errors import UserError
from shardwright.train.patience import patience
from shardwright.train.stored import (
    POSITION_FILE,
    Position,
    Stored,
    check_files,
    examine,
    position_text,
    saved_steps,
    step_folder,
    what_is_missing,
)
from shardwright.train.writing import unwritable

__all__ = [
    "Position",
    "load",
    "load_newest",
    "load_newest_weights",
    "load_weights",
    "save",
    "saved_steps",
    "shapes_of",
    "step_folder",
    "what_is_missing",
    "with_weights",
]

#: Name parts of wrapper modules, which the plain model does not have.
_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")
Say = Callable[[str], None]
T = TypeVar("T")


def _silent(text: str) -> None:
    pass


# ---------------------------------------------------------------------------------------------------------------
# Agreeing


def _of_every_rank(value: Any, alone: bool = False) -> list[Any]:
    """The value of each rank; of this one where it is `alone`."""
    if alone:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _agreed(action: Callable[[], T], alone: bool = False) -> list[T]:
    """What `action`, which does not communicate, returns on each rank. Where it raises on one rank, all ranks raise.

    Damaged and UserError are the same on every rank; of any other error the ranks without it raise a RuntimeError.
    """
    result: T | None = None
    error: Exception | None = None
    try:
        result = action()
    except Exception as failure:
        error = failure
    if error is not None and alone:
        raise error
    failure_here = None if error is None else (_kind(error), str(error))
    outcomes = _of_every_rank((result, failure_here), alone)
    failures = [(rank, *failure) for rank, (_, failure) in enumerate(outcomes) if failure is not None]
    if error is not None and _kind(error) is RuntimeError:
        raise error
    for kind in (RuntimeError, Damaged, UserError):
        rank, text = next(((rank, text) for rank, of_kind, text in failures if of_kind is kind), (0, None))
        if text is not None:
            same = kind is UserError or [text] * len(outcomes) == [each[2] for each in failures]
            raise kind(text if same else f"rank {rank}: {text}") from error
    return [outcome[0] for outcome in outcomes]


def _kind(error: Exception) -> type[Exception]:
    return next((kind for kind in (Damaged, UserError) if isinstance(error, kind)), RuntimeError)


def _on_first_rank(action: Callable[[], None], final: Path) -> None:
    """Do `action`, which writes, on rank 0; every rank raises what it raised, so that none waits for the others."""
    _writing(action if dist.get_rank() == 0 else lambda: None, final)


def _writing(action: Callable[[], T], final: Path) -> list[T]:
    def guarded() -> T:
        try:
            return action()
        except OSError as error:
            raise UserError(unwritable(final, error)) from error

    return _agreed(guarded)


# ---------------------------------------------------------------------------------------------------------------
# Saving


def save(
    checkpoints: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    position: Position,
    keep: int,
    say: Say = _silent,
) -> Path:
    """Write a checkpoint and delete all but the newest `keep` whole ones. Called by every rank; returns its folder.

    Raises UserError on every rank where the folder cannot be written; earlier checkpoints stay as they are.
    """
    final = step_folder(checkpoints, position.step)
    partial = checkpoints / f".{final.name}.partial"
    model_state, optimizer_state = _states(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state["state"]}
    started = time.perf_counter()
    with patience(say, lambda: f"saving {final}: {time.perf_counter() - started:.0f} s"):
        _on_first_rank(lambda: _make_room(partial, model), final)
        try:
            _write(state, partial, final)
            digests = _writing(lambda: _own_digests(partial), final)
        except Exception:  # on all ranks alike, or contact is lost: so no rank waits for another here
            if dist.get_rank() == 0:
                shutil.rmtree(partial, ignore_errors=True)
            raise
        everyones = {name: digest for part in digests for name, digest in part.items()}
        _on_first_rank(lambda: _finish(partial, final, position, everyones, keep), final)
    return final


def _make_room(partial: Path, model: nn.Module) -> None:
    """An empty folder to write into, on a disk with space for it.

    Checked in advance because a disk that fills up half-way costs the time of a save, and other programs their disk.
    """
    for leftover in (*partial.parent.glob(".step-*.partial"), *partial.parent.glob(".step-*.old")):
        _remove(leftover)
    partial.mkdir(parents=True)
    # Weights and two moments; frozen parameters are not saved.
    need = 3 * sum(p.numel() * p.element_size() for p in _full_parameters(model) if p.requires_grad)
    free = shutil.disk_usage(partial).free
    if free < need:
        partial.rmdir()
        raise OSError(f"needs {need:,} bytes, {free:,} are free")


def _full_parameters(model: nn.Module) -> list[torch.Tensor]:
    # On a plain model these are the parameters; on a sharded one their DTensors, which count globally. FSDP1's
    # views count locally: there the check is too mild, and the write itself reports.
    return list(model.parameters())


def _write(state: dict[str, Any], partial: Path, final: Path) -> None:
    try:
        dcp.save(state, storage_writer=dcp.FileSystemWriter(partial))
    except CheckpointException as failure:  # a BaseException
        cause = _write_failure(failure)
        if cause is not None:
            raise UserError(unwritable(final, cause)) from failure
        folders.raise_cause(failure, RuntimeError, "save")


def _own_digests(partial: Path) -> dict[str, Digest]:
    """Of the files this rank has written: torch begins their names with the rank."""
    return {file.name: digest_of(file) for file in partial.glob(f"__{dist.get_rank()}_*")}


def _finish(partial: Path, final: Path, position: Position, digests: Mapping[str, Digest], keep: int) -> None:
    metadata = partial / METADATA
    _sync(metadata)  # torch before 2.14 syncs a file whose last bytes it has not written yet
    without = files_of(folders.read_metadata(partial)).keys() - digests.keys()
    if without:
        raise RuntimeError(
            f"{final}: {METADATA} names {', '.join(sorted(without))}, but no rank has written it"
        )
    file = partial / POSITION_FILE
    file.write_text(position_text(position, {**digests, METADATA: digest_of(metadata)}), encoding="utf-8")
    _sync(file)
    _sync(partial)
    # The same step again, after a resume from before it: moved away, so that never none of both is there.
    old = final.with_name(f".{final.name}.old")
    if os.path.lexists(final):
        os.replace(final, old)
    os.replace(partial, final)
    _sync(final.parent)
    if os.path.lexists(old):
        _remove(old)
    _delete_old(final.parent, position.step, keep)


def _remove(folder: Path) -> None:
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder)


def _delete_old(checkpoints: Path, newest: int, keep: int) -> None:
    """Keep the `keep` newest whole checkpoints up to step `newest`, which was just written.

    A broken one beyond is what a resume has fallen back from: were it counted, it would cost a whole one its place.
    """
    whole_checkpoints = 0
    for step in saved_steps(checkpoints):
        folder = step_folder(checkpoints, step)
        whole = step == newest or what_is_missing(folder) is None
        if whole_checkpoints == keep or (step > newest and not whole):
            _remove(folder)
        elif step <= newest and whole:
            whole_checkpoints += 1


def _sync(path: Path) -> None:
    # A folder, too: without that a crash of the machine can lose names although the files are on disk.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_failure(failure: CheckpointException) -> BaseException | None:
    """The failure to write for which a save failed, or None where it failed for another reason."""
    chain: list[BaseException] = []
    for error, _ in failure.failures.values():
        step: BaseException | None = error
        while step is not None:
            chain.append(step)
            step = step.__cause__ or step.__context__
    for item in chain:
        if isinstance(item, OSError):
            return item
    # torch's zip writer reports a failed write as a RuntimeError of its own.
    return next((item for item in chain if "write" in str(item) or "unexpected pos" in str(item)), None)


# ---------------------------------------------------------------------------------------------------------------
# Loading


Shapes = Mapping[str, tuple[int, ...]]


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Names and shapes a checkpoint of this plain, unsharded model holds."""
    return {name: tuple(tensor.shape) for name, tensor in _stored_state(model).items()}


def _stored_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state of a plain model without its frozen parameters, which no checkpoint holds."""
    frozen = _frozen_names(model)
    return {name: tensor for name, tensor in model.state_dict().items() if name not in frozen}


def _frozen_names(model: nn.Module) -> set[str]:
    """Every name of each frozen parameter, as in the plain model. Tied parameters have several."""
    names = {name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}
    for wrapper in _WRAPPERS:
        names = {name.replace(wrapper, "") for name in names}
    return {name.removeprefix("module.") for name in names}


def _options(model: nn.Module) -> StateDictOptions:
    """Frozen parameters are neither saved nor loaded. `check_fits` compares the names of all others."""
    frozen = any(not parameter.requires_grad for parameter in model.parameters())
    return StateDictOptions(ignore_frozen_params=frozen, strict=not frozen)


def _states(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
    """The states of the model, without frozen parameters, and of the optimizer."""
    model_state, optimizer_state = get_state_dict(model, optimizer, options=_options(model))
    for name in _frozen_names(model):  # torch leaves out one name of each
        model_state.pop(name, None)
    return model_state, optimizer_state


def load_newest(
    checkpoints: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    shapes: Shapes,
    say: Say = _silent,
) -> Position:
    """Read the newest whole checkpoint into a model and its optimizer. Called by every rank.

    Damage that any rank meets, also while it loads, makes all ranks fall back to the checkpoint before; `say` is
    called for each one passed over. Raises UserError where none is whole.
    """
    steps = _of_every_rank(saved_steps(checkpoints))[0]  # of the first rank: others may see a folder later
    return _newest(checkpoints, steps, lambda folder: load(folder, model, optimizer, shapes, say), say)


def load_newest_weights(checkpoints: Path, model: nn.Module, say: Say = _silent) -> None:
    """Read the weights of the newest whole checkpoint into a plain model, in one process, without a process group."""
    _newest(checkpoints, saved_steps(checkpoints), lambda folder: load_weights(folder, model, say), say)


def _newest(checkpoints: Path, steps: list[int], read: Callable[[Path], T], say: Say) -> T:
    damaged = []
    for step, older in zip(steps, [*steps, None][1:], strict=True):
        folder = step_folder(checkpoints, step)
        try:
            return read(folder)
        except Damaged as problem:
            damaged.append(f"{folder.name}: {problem}")
            next_one = (
                f"; falling back to {step_folder(checkpoints, older).name}" if older is not None else ""
            )
            say(f"{folder} is damaged ({problem}){next_one}")
    problems = (
        f"found only damaged ones ({'; '.join(damaged)}); restore one of them"
        if damaged
        else "found none; the run has saved nothing"
    )
    raise UserError(f"{checkpoints}: expected a whole checkpoint, {problems}")


def load(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    shapes: Shapes,
    say: Say = _silent,
) -> Position:
    """Read a checkpoint into a model and its optimizer. Called by every rank; returns where the run stands.

    `shapes` are those of the model before it was sharded. Rates and decay of the optimizer stay as they are. Raises
    Damaged on every rank where it is not the checkpoint that was saved, UserError where it is another model's.
    """
    model_state, optimizer_state = _states(model, optimizer)
    state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state["state"]}

    def fitting() -> Stored:
        stored = examine(folder)
        check_fits(folder, stored.metadata, shapes)
        check_optimizer_fits(folder, stored.metadata, state["optimizer"])
        return stored

    stored = _verified(fitting, say)
    _read(stored, state, say)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict={**optimizer_state, "state": state["optimizer"]},
        options=_options(model),
    )
    return stored.position


def load_weights(folder: Path, model: nn.Module, say: Say = _silent) -> None:
    """Read the weights alone into a plain model, in one process, without a process group. Raises as `load` does."""

    def fitting() -> Stored:
        stored = examine(folder)
        check_fits(folder, stored.metadata, shapes_of(model))
        return stored

    state = {"model": _stored_state(model)}
    _read(_verified(fitting, say, alone=True), state, say, alone=True)
    model.load_state_dict(state["model"], strict=_options(model).strict)


Read = Callable[[Mapping[str, torch.Tensor]], None]


def with_weights(
    checkpoints: Path,
    step: int | None,
    shapes: Shapes,
    use: Callable[[Position, Read], T],
    say: Say = _silent,
) -> T:
    """Call `use` with a function that reads single weights into plain tensors, by name. In one process.

    The checkpoint is that of `step`, or for None the newest whole one: if it is damaged, also while it is read, `use`
    is called again with the one before. Raises UserError where there is none.
    """
    steps = saved_steps(checkpoints)
    if step is not None and step not in steps:
        there = ", ".join(map(str, steps)) or "none"
        raise UserError(f"--step: expected a step with a checkpoint in {checkpoints} ({there}), found {step}")

    def open_folder(folder: Path) -> T:
        def fitting() -> Stored:
            stored = examine(folder)
            check_fits(folder, stored.metadata, shapes)
            return stored

        stored = _verified(fitting, say, alone=True)

        def read(tensors: Mapping[str, torch.Tensor]) -> None:
            folders.load(folder, {"model": dict(tensors)}, stored.metadata, alone=True)

        return use(stored.position, read)

    if step is not None:  # one error says that it is damaged
        return _newest(checkpoints, [step], open_folder, _silent)
    return _newest(checkpoints, steps, open_folder, say)


def _verified(examined: Callable[[], Stored], say: Say, alone: bool = False) -> Stored:
    """A checkpoint whose files are those that were saved. Each rank compares its share of them."""
    stored: list[Stored] = []

    def look() -> str:
        stored.append(examined())
        return stored[0].fingerprint

    prints = _agreed(look, alone)
    if len(set(prints)) > 1:
        rank = next(number for number, each in enumerate(prints) if each != prints[0])
        raise Damaged(f"rank {rank} reads a {POSITION_FILE} or {METADATA} that differs from rank 0's")
    newest = stored[0]
    if newest.digests is None:
        say(f"{newest.folder} was saved without checksums; only the sizes of its files are compared")
    rank, ranks = (0, 1) if alone else (dist.get_rank(), dist.get_world_size())
    done = 0

    def progress(nbytes: int) -> None:
        nonlocal done
        done += nbytes

    whole = sum(newest.files().values())
    with patience(
        say,
        lambda: (
            f"comparing checksums of {newest.folder}: {done / 1e9:.1f} of {whole / ranks / 1e9:.1f} GB of each rank"
        ),
    ):
        _agreed(lambda: check_files(newest, rank, ranks, progress), alone)
    return newest


def _read(stored: Stored, state: dict[str, Any], say: Say, alone: bool = False) -> None:
    started = time.perf_counter()
    with patience(say, lambda: f"loading {stored.folder}: {time.perf_counter() - started:.0f} s"):
        folders.load(stored.folder, state, stored.metadata, alone=alone)


def check_fits(folder: Path, metadata: Metadata, shapes: Shapes) -> None:
    """Refuse a checkpoint of another model, before anything is changed. Names the first parameter that differs."""
    stored = {
        name.removeprefix("model."): tuple(entry.size)
        for name, entry in metadata.state_dict_metadata.items()
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


def check_optimizer_fits(folder: Path, metadata: Metadata, state: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse a checkpoint of another optimizer. Names the first value that it does not hold."""
    for name, values in state.items():
        for key, value in values.items():
            stored = metadata.state_dict_metadata.get(f"optimizer.{name}.{key}")
            shape = list(value.shape) if isinstance(value, torch.Tensor) else None
            stored_shape = list(stored.size) if isinstance(stored, TensorStorageMetadata) else None
            if stored is not None and shape == stored_shape:
                continue
            stored_form = (
                "none" if stored is None else "no tensor" if stored_shape is None else f"shape {stored_shape}"
            )
            raise UserError(
                f"{folder}: expected the optimizer's {key} of {name}, found {stored_form}; this is a checkpoint of "
                "another optimizer; resume with the optimizer.name of the saved run"
            )
