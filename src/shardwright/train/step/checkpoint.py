"""Checkpoints of a run: a model, its optimizer, random generators and the position, by all ranks together.

Written and read by ``shardwright.checkpoint``, with the names that ``sw.save_checkpoint`` gives, so that
``sw.load_checkpoint`` and torch's distributed checkpoint read them, too. Rates and decay of the optimizer are stored
for these readers; a run takes its own from the configuration. Which checkpoints stay is decided in `saves`.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from shardwright.checkpoint.asynchronous.saves import AsyncCheckpoint
from shardwright.checkpoint.dcp import folders
from shardwright.checkpoint.format.digests import Damaged
from shardwright.checkpoint.format.index import UnknownVersion
from shardwright.checkpoint.format.nested import merged
from shardwright.checkpoint.load.loading import read_state
from shardwright.checkpoint.ranks import Ranks
from shardwright.checkpoint.save.saving import save_state
from shardwright.checkpoint.training.generators import generator_states, seed_generators, set_generator_states
from shardwright.train.errors import UserError, counted
from shardwright.train.launch.progress import patience
from shardwright.train.run.position import (
    Place,
    Position,
    answering,
    recovered_steps,
    saved_steps,
    step_folder,
)
from shardwright.train.run.stored_checkpoint import Form, Stored, check_files, examine, what_is_missing
from shardwright.train.run.writing import may_pass, unwritable

__all__ = [
    "Loaded",
    "Position",
    "SaveFailedError",
    "continue_generators",
    "load",
    "load_newest",
    "load_newest_weights",
    "load_weights",
    "save",
    "save_in_background",
    "saved_steps",
    "shapes_of",
    "state_of",
    "step_folder",
    "verified",
    "wait",
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
# Saving


class SaveFailedError(UserError):
    """A checkpoint cannot be written, so all earlier ones are as they were."""


def save(
    checkpoints: Place,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    position: Position,
    say: Say = _silent,
) -> Place:
    """Write a checkpoint, and read it back before it gets its name. Called by every rank; returns its folder.

    Raises, on every rank:
        SaveFailedError: the folder cannot be written. It names rank, file and reason.
        UserError: the optimizer's state has a value that no checkpoint can hold.
    """
    final = step_folder(checkpoints, position.step)
    ranks = Ranks()
    state = state_of(model, optimizer, position, ranks)
    started = time.perf_counter()
    with _failures(final), patience(say, lambda: f"saving {final}: {time.perf_counter() - started:.0f} s"):
        save_state(final, state, ranks, overwrite=True, verified=True)
    return final


def save_in_background(
    background: AsyncCheckpoint,
    checkpoints: Place,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    position: Position,
) -> None:
    """Copy what `save` writes, and let processes of their own write it. Called by every rank. Raises as `save`."""
    final = step_folder(checkpoints, position.step)
    with _failures(final):
        state = state_of(model, optimizer, position, Ranks())
        background.save_state(final, state, overwrite=True)


def wait(background: AsyncCheckpoint, folder: Place) -> None:
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
def _failures(final: Place) -> Iterator[None]:
    """Raise errors of a save as those of `save`."""
    try:
        yield
    except OSError as error:
        reason = error if error.filename is None else OSError(f"{error.filename}: {error.strerror}")
        raise SaveFailedError(unwritable(final, reason), may_pass(error)) from error
    except ValueError as error:
        raise UserError(f"{final}: cannot save: {error}") from error


def state_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, position: Position, ranks: Ranks
) -> dict[str, Any]:
    """The nested state that a checkpoint of a run stores. Frozen parameters are left out."""
    model_state, optimizer_state = _states(model, optimizer)
    return {
        "model": model_state,
        "optimizer": optimizer_state,
        "extra": {"position": position.stored()},
        "generators": {f"rank{ranks.rank}": generator_states()},
    }


# ---------------------------------------------------------------------------------------------------------------
# Loading


Shapes = Mapping[str, tuple[int, ...]]


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Names and shapes a checkpoint of this plain, unsharded model holds."""
    return {name: tuple(tensor.shape) for name, tensor in _stored_state(model).items()}


def _stored_state(model: nn.Module) -> dict[str, Tensor]:
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
    return model_state, dict(optimizer_state)


@dataclass(frozen=True)
class Loaded:
    """The position from which a checkpoint lets a run go on.

    Attributes:
        position: of the run.
        ranks: that saved it; None if it has no states of random generators.
        generators: the states of this rank's, if as many ranks saved as load.
    """

    position: Position
    ranks: int | None
    generators: Mapping[str, Tensor] | None


def continue_generators(loaded: Loaded, seed: int, ranks: Ranks) -> str | None:
    """Let this rank's random generators go on from a checkpoint. Returns a line to print if they start again.

    They start again at another number of ranks: each rank has a seed that depends on `seed`, the step and the rank.
    """
    step, reason = loaded.position.step, "has no states of random generators"
    if loaded.generators is not None:
        try:
            set_generator_states(loaded.generators)
            return None
        except (
            RuntimeError,
            TypeError,
            ValueError,
            LookupError,
        ) as error:  # of another version of torch or Python
            reason = f"has states of random generators that cannot be restored ({error})"
    elif loaded.ranks is not None:
        reason = (
            f"was saved by {counted(loaded.ranks, 'rank')} and is loaded by {counted(ranks.size, 'rank')}"
        )
    digest = hashlib.sha256(f"{seed} {step} {ranks.rank}".encode()).digest()
    seed_generators(int.from_bytes(digest[:8], "little") >> 1)
    return (
        f"the checkpoint of step {step} {reason}: random generators do not go on where they were; each rank has a "
        "seed derived from run.seed, the step and the rank"
    )


def load_newest(
    checkpoints: Place,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    shapes: Shapes,
    say: Say = _silent,
    latest: float = math.inf,
) -> Loaded:
    """Read the newest whole checkpoint, of step `latest` at most, into a model and its optimizer. Called by every rank.

    Damage that any rank meets, also while it loads, makes all ranks fall back to the checkpoint before; `say` is
    called for each one passed over. Raises UserError where none is whole.
    """
    with answering():
        # The first rank's answer: others may see a folder later.
        steps = Ranks().by_first(lambda: [s for s in recovered_steps(checkpoints) if s <= latest])
    return _newest(checkpoints, steps, lambda folder: load(folder, model, optimizer, shapes, say), say)


def load_newest_weights(checkpoints: Place, model: nn.Module, say: Say = _silent) -> None:
    """Read the weights of the newest whole checkpoint into a plain model, in one process, without a process group."""
    with answering():
        steps = recovered_steps(checkpoints)
    _newest(checkpoints, steps, lambda folder: load_weights(folder, model, say), say)


def _newest(checkpoints: Place, steps: list[int], read: Callable[[Place], T], say: Say) -> T:
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
        f"found only damaged ones ({'; '.join(damaged)}); restore one of them"
        if damaged
        else "found none; the run has saved nothing"
    )
    raise UserError(f"{checkpoints}: expected a whole checkpoint, {problems}")


def load(
    folder: Place,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    shapes: Shapes,
    say: Say = _silent,
) -> Loaded:
    """Read a checkpoint into a model and its optimizer. Called by every rank; returns where the run stands.

    `shapes` are those of the model before it was sharded. Rates and decay of the optimizer stay as they are. Raises
    Damaged on every rank where it is not the checkpoint that was saved, UserError where it is another model's.
    """
    ranks = Ranks()
    model_state, optimizer_state = _states(model, optimizer)

    def fits(stored: Stored) -> None:
        check_fits(stored, shapes)
        check_optimizer_fits(stored, optimizer_state["state"])

    stored = verified(folder, ranks, say, fits)
    saved_ranks, generators = _rooms_for_generators(stored, ranks)
    state: dict[str, Any] = {"model": model_state, "optimizer": {"state": optimizer_state["state"]}}
    if stored.index is None:
        state["optimizer"] = optimizer_state["state"]
    if generators is not None:
        state["generators"] = {f"rank{ranks.rank}": generators}
    values = _read(stored, state, ranks, say)
    if stored.index is not None:
        model_state = merged(model_state, values.get("model", {}))
        stored_values = values.get("optimizer", {}).get("state", {})
        optimizer_state["state"] = merged(optimizer_state["state"], stored_values)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=model_state,
        optim_state_dict=optimizer_state,
        options=_options(model),
    )
    return Loaded(stored.position, saved_ranks, generators)


def _rooms_for_generators(stored: Stored, ranks: Ranks) -> tuple[int | None, dict[str, Tensor] | None]:
    """Number of ranks that have stored random generators, and tensors to read this rank's into.

    None without stored generators; None in place of the tensors if another number of ranks saved them.
    """
    of_ranks = stored.contents().get("generators")
    if not isinstance(of_ranks, Mapping):
        return None, None
    own = of_ranks.get(f"rank{ranks.rank}")
    if len(of_ranks) != ranks.size or not isinstance(own, Mapping):
        return len(of_ranks), None
    rooms = {
        name: torch.empty(form.shape, dtype=form.dtype)
        for name, form in own.items()
        if isinstance(form, Form)
    }
    return len(of_ranks), rooms


def load_weights(folder: Place, model: nn.Module, say: Say = _silent) -> None:
    """Read the weights alone into a plain model, in one process, without a process group. Raises as `load` does."""
    alone = Ranks(alone=True)
    state = _stored_state(model)
    stored = verified(folder, alone, say, lambda stored: check_fits(stored, shapes_of(model)))
    _read(stored, {"model": state}, alone, say)
    model.load_state_dict(state, strict=_options(model).strict)


Read = Callable[[Mapping[str, Tensor]], None]


def with_weights(
    checkpoints: Place,
    step: int | None,
    shapes: Shapes,
    use: Callable[[Position, Read], T],
    say: Say = _silent,
) -> T:
    """Call `use` with a function that reads single weights into plain tensors, by name. In one process.

    The checkpoint is that of `step`, or for None the newest whole one: if it is damaged, also while it is read, `use`
    is called again with the one before. Raises UserError where there is none.
    """
    with answering():
        steps = recovered_steps(checkpoints)
    if step is not None and step not in steps:
        there = ", ".join(map(str, steps)) or "none"
        raise UserError(f"--step: expected a step with a checkpoint in {checkpoints} ({there}), found {step}")
    alone = Ranks(alone=True)

    def open_folder(folder: Place) -> T:
        stored = verified(folder, alone, say, lambda stored: check_fits(stored, shapes))

        def read(tensors: Mapping[str, Tensor]) -> None:
            _read_into({"model": dict(tensors)}, stored, alone)

        return use(stored.position, read)

    if step is not None:  # one error says that it is damaged
        return _newest(checkpoints, [step], open_folder, _silent)
    return _newest(checkpoints, steps, open_folder, say)


def _nothing(stored: Stored) -> None:
    pass


def verified(
    folder: Place, ranks: Ranks, say: Say = _silent, fits: Callable[[Stored], None] = _nothing
) -> Stored:
    """A checkpoint whose files are those that were saved, and that `fits` accepts. Each rank compares its share.

    Raises, on every rank:
        Damaged: it is not whole.
        UserError: a later version of shardwright has saved it, or `fits` raised ValueError.
    """
    opened: list[Stored] = []

    def look() -> str:
        try:
            opened.append(examine(folder))
        except UnknownVersion as error:
            raise ValueError(f"{folder}: {error}") from error
        fits(opened[0])
        return opened[0].checkpoint.fingerprint

    try:
        prints = ranks.together(look)
    except Damaged:
        raise
    except ValueError as error:
        raise UserError(str(error)) from error
    other = next((rank for rank, each in enumerate(prints) if each != prints[0]), None)
    if other is not None:
        raise Damaged(f"rank {other} reads another description of the checkpoint than rank 0")
    stored = opened[0]
    if not stored.has_digests:
        say(f"{folder} was saved without checksums; only the sizes of its files are compared")
    done = 0

    def progress(nbytes: int) -> None:
        nonlocal done
        done += nbytes

    whole = sum(stored.files().values()) / ranks.size
    with patience(
        say,
        lambda: f"comparing checksums of {folder}: {done / 1e9:.1f} of {whole / 1e9:.1f} GB of each rank",
    ):
        ranks.together(lambda: check_files(stored, ranks.rank, ranks.size, progress))
    return stored


def _read(stored: Stored, state: dict[str, Any], ranks: Ranks, say: Say) -> dict[str, Any]:
    started = time.perf_counter()
    with patience(say, lambda: f"loading {stored.folder}: {time.perf_counter() - started:.0f} s"):
        return _read_into(state, stored, ranks)


def _read_into(state: dict[str, Any], stored: Stored, ranks: Ranks) -> dict[str, Any]:
    """Read into the tensors of a state. Returns the checkpoint's values; of earlier versions they go into the state."""
    if stored.index is not None:
        return read_state(stored.checkpoint, state, ranks)
    assert stored.checkpoint.metadata is not None
    folders.load(stored.checkpoint.folder, state, stored.checkpoint.metadata, alone=ranks.alone)
    return {}


def check_fits(stored: Stored, shapes: Shapes) -> None:
    """Raise ValueError for a checkpoint of another model. Names the first parameter that differs."""
    folder, content = stored.folder, stored.contents().get("model")
    parameters = {
        name: form.shape
        for name, form in (content if isinstance(content, Mapping) else {}).items()
        if isinstance(form, Form)
    }
    for name, shape in shapes.items():
        if name not in parameters:
            raise ValueError(f"{folder}: expected {name} of shape {list(shape)}, found no such parameter; this is a "
                             "checkpoint of another model")  # fmt: skip
        if parameters[name] != shape:
            raise ValueError(f"{folder}: expected {name} of shape {list(shape)}, found {list(parameters[name])}; this "
                             "is a checkpoint of another model")  # fmt: skip
    for name, shape in parameters.items():
        if name not in shapes:
            raise ValueError(f"{folder}: expected no parameter {name}, found one of shape {list(shape)}; this is a "
                             "checkpoint of another model")  # fmt: skip


def check_optimizer_fits(stored: Stored, state: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise ValueError for a checkpoint of another optimizer. Names the first value that it does not hold."""
    content = stored.contents().get("optimizer")
    if stored.index is not None and isinstance(content, Mapping):
        content = content.get("state")
    parameters = content if isinstance(content, Mapping) else {}
    for name, values in state.items():
        own = parameters.get(name)
        stored_values = own if isinstance(own, Mapping) else {}
        for key, value in values.items():
            form = stored_values.get(key)
            shape = list(value.shape) if isinstance(value, Tensor) else None
            stored_shape = list(form.shape) if isinstance(form, Form) else None
            if key in stored_values and shape == stored_shape:
                continue
            stored_form = (
                "none"
                if key not in stored_values
                else "no tensor"
                if stored_shape is None
                else f"shape {stored_shape}"
            )
            raise ValueError(
                f"{stored.folder}: expected the optimizer's {key} of {name}, found {stored_form}; this is a checkpoint "
                "of another optimizer; resume with the optimizer.name of the saved run"
            )
