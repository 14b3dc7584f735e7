"""``save_checkpoint`` and ``load_checkpoint``: the state of a training run in one folder, or behind one URL.

    sw.save_checkpoint("step-100", model, optimizer, extra={"scheduler": scheduler, "step": 100})
    extra = sw.load_checkpoint("step-100", model, optimizer, extra={"scheduler": scheduler})

The model may be sharded by Shardwright or FSDP2, wrapped by FSDP1 or DDP, or plain. docs/checkpoints.md.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.optim import Optimizer

from shardwright.checkpoint.format.nested import NestedState, ignore
from shardwright.checkpoint.load.checkpoints import Checkpoint, read_description
from shardwright.checkpoint.load.loading import check_same_description, check_tensors, load_state
from shardwright.checkpoint.load.unreplaced import replaced, unless_replaced
from shardwright.checkpoint.save import saving
from shardwright.checkpoint.storage.stores import Store
from shardwright.checkpoint.training.arguments import (
    check_model_and_extra,
    check_same,
    is_stateful,
    place_of,
    reason_of,
    refuse_sharded_optimizers,
    summary,
    with_states,
)
from shardwright.checkpoint.training.generators import (
    GENERATORS,
    check_generator_states,
    generator_states,
    seed_generators,
    set_generator_states,
    stored_by,
)
from shardwright.checkpoint.training.gradient_hooks import HOOKS, HooksToLoad, hook_states
from shardwright.checkpoint.training.opened import StoredCheckpoint
from shardwright.checkpoint.training.optimizer_settings import check_states
from shardwright.checkpoint.training.optimizers import (
    OPTIMIZER,
    as_optimizers,
    check_groups,
    group_tensors,
    room_for_state,
    set_optimizers,
    state_of_optimizers,
    stored_groups,
)
from shardwright.checkpoint.training.wanted_state import StoredNames
from shardwright.collective import RankGroup
from shardwright.engine.base.names import plain_name
from shardwright.engine.tensors.parameter import has_no_values
from shardwright.engine.unit.owning import units_of
from shardwright.errors import Damaged

MODEL, EXTRA = "model", "extra"
GROUPS = f"{OPTIMIZER}.param_groups"
SHARED = (MODEL, OPTIMIZER)  #: large plain tensors below these keys are equal on all ranks


def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    generators: bool = True,
    frozen: bool = True,
    overwrite: bool = False,
    verified: bool = False,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Write model, optimizer and more into a folder that is whole or absent. Call it between steps, on every rank.

    Every rank writes its part; what several ranks have is written once. The folder gets its name when all of it is on
    disk. It can be read at any number of ranks, in any layout and strategy, by :func:`load_checkpoint`, by FSDP2 and by
    ``torch.distributed.checkpoint`` (keys ``model``, ``optimizer``, ``extra``).

    Args:
        path: the new folder, on a file system that all ranks share; or a URL that fsspec knows, such as
            ``s3://bucket/run-7/step-100``. Behind a URL the checkpoint appears with its last object, ``index.json``.
        model: sharded, wrapped or plain.
        optimizer: of the model's parameters, one or several. State that does not exist yet is not stored. The state of
            gradient hooks, such as the errors that they add to later gradients, is stored with the model.
        extra: tensors, plain values (numbers, strings, lists, tuples, dicts) and objects with ``state_dict``, such as a
            schedule of learning rates or a copy of the model. The first rank's values are stored.
        generators: store the random generators of every rank.
        frozen: store parameters that need no gradient, too. Pass False to save and load what is trained alone.
        overwrite: replace a checkpoint at ``path``. It stays until the new one is on disk. Behind a URL only what an
            interrupted save has left and a damaged checkpoint are replaced: there is no rename.
        verified: read back all that was written, and compare it with its digests, before the checkpoint appears.
        process_group: of the ranks that have the model. Default: all ranks; without a process group this process.

    Raises:
        ValueError: something cannot be stored. The message names it. Nothing was written.
        FileExistsError: something is at ``path``.
        OSError: on every rank. The message names rank, file and reason. Anything at ``path`` is unchanged.
    """
    ranks = RankGroup(process_group)
    place = place_of(path, ranks)
    state = state_to_save(model, optimizer, extra, generators, frozen, ranks)
    saving.write_state(place, state, ranks, overwrite=overwrite, verified=verified, shared=SHARED)


def save_state(
    path: str | os.PathLike[str],
    state: Mapping[str, Any],
    *,
    notes: Mapping[str, str] | None = None,
    overwrite: bool = False,
    verified: bool = False,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Write a nested state as :func:`save_checkpoint` writes a model: dicts and lists of tensors and plain values.

    For other parts than a model and its optimizer, such as several models. Call it on every rank. Read it with
    :func:`open_checkpoint`.

    Args:
        path, overwrite, verified, process_group: as for :func:`save_checkpoint`.
        state: tensors may be sharded. Of values and whole tensors the first rank's are stored.
        notes: short texts beside the state, which :attr:`StoredCheckpoint.about` shows.

    Raises:
        ValueError, FileExistsError, OSError: as :func:`save_checkpoint`.
    """
    ranks = RankGroup(process_group)
    place = place_of(path, ranks)
    saving.write_state(
        place, state, ranks, overwrite=overwrite, verified=verified, notes=notes, shared=SHARED
    )


def state_to_save(
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer] | None,
    extra: Mapping[str, Any] | None,
    generators: bool,
    frozen: bool,
    ranks: RankGroup,
) -> dict[str, Any]:
    """The nested state that :func:`save_checkpoint` stores. Every rank must call it.

    Raises:
        TypeError, ValueError: on every rank, if the arguments of one cannot be stored or differ from the others'.
    """
    state: dict[str, Any] = {}

    def take() -> tuple[Any, ...]:
        check_model_and_extra(model, extra)
        optimizers, more = as_optimizers(optimizer), extra or {}
        refuse_sharded_optimizers(more)
        for unit in units_of(model):
            unit.refuse_unsharded("save_checkpoint of")
            unset = unit.without_values()
            for p in unit.parameters:
                if p.sharded in unset and p.local.numel():
                    raise ValueError(_without_values(f"{unit.name}.{p.name}".lstrip("."), "to save"))
        state[MODEL] = _model_state(model, frozen)
        if optimizers:
            state[OPTIMIZER] = state_of_optimizers(model, optimizers)
        state[EXTRA] = with_states(more)
        if hooks := hook_states(model):
            state[HOOKS] = hooks
        if generators:
            state[GENERATORS] = {f"rank{ranks.rank}": generator_states()}
        return summary(optimizers, more, generators)

    check_same(ranks.run_on_all(take), ranks)
    return state


def _model_state(model: nn.Module, frozen: bool) -> dict[str, Any]:
    state: dict[str, Any] = get_model_state_dict(model)
    if not frozen:
        for name in frozen_names(model):
            state.pop(name, None)
    for name, value in state.items():
        if isinstance(value, Tensor) and has_no_values(value):
            raise ValueError(_without_values(name, "and no memory"))
    return state


def frozen_names(model: nn.Module) -> set[str]:
    """Every name of each parameter that needs no gradient, as in the plain model. Tied parameters have several."""
    named = model.named_parameters(remove_duplicate=False)
    return {plain_name(name, model) for name, p in named if not p.requires_grad}


def _without_values(name: str, what: str) -> str:
    return f"{name} has no values {what}, since the model is deferred or on meta. Call sw.materialize(model) first"


def load_checkpoint(
    path: str | os.PathLike[str] | StoredCheckpoint,
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    generators: bool = True,
    frozen: bool = True,
    settings: bool = True,
    convert: bool = False,
    progress: Callable[[int], None] = ignore,
    process_group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Restore what :func:`save_checkpoint` has written. Call it between steps, on every rank.

    Every file is compared with its digest, and every tensor with the model's, before any value changes. Also reads
    folders of ``torch.distributed.checkpoint`` with the keys ``model`` and ``optimizer``; nothing in them is called.

    Args:
        path: the folder or URL, or what :func:`open_checkpoint` returned: then it must still be that checkpoint.
        model: with the parameters and buffers of the saved one, sharded in any way, on any number of ranks.
        optimizer: the saved kind, with the saved parameters. Leave it out if the checkpoint holds none. Rates and other
            settings of its groups are restored.
            A parameter without state in the checkpoint has none afterwards. Gradients stay as they are.
        extra: objects with ``load_state_dict`` and tensors, by the keys of the save. They are restored in place.
        generators: restore the random generators: exactly at the saved number of ranks. At another number each rank
            gets a new seed, derived from the checkpoint, its rank and the number of ranks, with a warning.
        frozen: as at the save. False leaves parameters that need no gradient as they are.
        settings: restore rates and other settings of the optimizer's groups. False: the optimizer keeps its own, and
            its groups may have other parameters than at the save.
        convert: convert values to the dtypes of the model and the optimizer. False: another dtype is an error.
        progress: gets the number of bytes as they are compared with their digests, and as they are read.
        process_group: as for :func:`save_checkpoint`.

    Returns:
        All of the saved ``extra``: values and tensors on the host, state dicts for objects.

    Raises:
        FileNotFoundError: there is no checkpoint.
        OSError: another program has replaced the checkpoint while it was read, or a store behind a URL does not answer.
            Nothing was changed, except when a store fails or a checkpoint behind a URL is deleted during the reads.
        ValueError: the checkpoint is damaged (then it is a :class:`Damaged`), or of another model or optimizer. The
            message names the file or tensor. Nothing was changed.
    """
    ranks = RankGroup(process_group)
    known, location = (path, path.path) if isinstance(path, StoredCheckpoint) else (None, path)
    place = place_of(location, ranks)
    arguments = _Arguments(model, optimizer, extra or {}, generators, frozen, settings, convert, progress)
    with ExitStack() as undo:
        try:
            result = _load(place, known, arguments, ranks, undo)
        except Damaged as problem:
            raise Damaged(f"{place}: {problem}") from problem
        undo.pop_all()
    return result


class _Arguments(NamedTuple):
    """The arguments of :func:`load_checkpoint` that say what to load."""

    model: nn.Module
    optimizer: Optimizer | Iterable[Optimizer] | None
    extra: Mapping[str, Any]
    generators: bool
    frozen: bool
    settings: bool
    convert: bool
    progress: Callable[[int], None]


def _load(
    folder: Store,
    known: StoredCheckpoint | None,
    arguments: _Arguments,
    ranks: RankGroup,
    undo: ExitStack,
) -> dict[str, Any]:
    """:func:`load_checkpoint`. ``undo`` gets what gives objects of ``extra`` their present state back."""
    model, extra = arguments.model, arguments.extra
    checkpoint, optimizers, values = _examine(folder, known, arguments, ranks)
    state: dict[str, Any] = {MODEL: values}
    stored = StoredNames(folder, checkpoint)
    hooks = HooksToLoad(model, stored)
    saved_ranks, mine = stored_by(stored.tensors if arguments.generators else (), ranks)
    own = _make_room(state, stored, extra, hooks, mine if saved_ranks else None, bool(optimizers), ranks)
    new = {id(each) for name, each in state[EXTRA].items() if f"{EXTRA}.{name}" not in own}
    new |= {id(each) for each in state[GENERATORS].get(mine, {}).values()}
    objects = {key: each for key, each in extra.items() if is_stateful(each)}
    #: Their tensors are read in place, after all that can be refused.
    late = [key for key in objects if any(f"{name}.".startswith(f"{EXTRA}.{key}.") for name in own)]

    with room_for_state(model, optimizers, stored) as room:
        if optimizers:
            own_groups = group_tensors(room["param_groups"]) if arguments.settings else {}
            groups = stored.room(GROUPS, stored.fitting(own_groups))
            state[OPTIMIZER] = {"state": room["state"], "param_groups": groups}

        def fits(again: Checkpoint) -> None:
            if again.fingerprint != checkpoint.fingerprint:
                raise replaced(folder)
            # it explains what follows
            check_tensors(
                folder, again, NestedState.of({MODEL: state[MODEL]}).tensors, arguments.convert, _advice
            )
            stored.check_names({MODEL, OPTIMIZER} if optimizers else {MODEL}, state)
            stored.check_values(MODEL, state[MODEL])
            _check_extra(stored, extra)
            if optimizers and arguments.settings and GROUPS in stored.values:
                check_groups(room["param_groups"], stored.values[GROUPS])

        def accept(content: Mapping[str, Any]) -> None:
            parts = {part: _mapping(content.get(part, {}), part) for part in (MODEL, OPTIMIZER, EXTRA, HOOKS)}
            if optimizers and arguments.settings:
                check_groups(room["param_groups"], stored_groups(parts[OPTIMIZER], room["param_groups"]))
            if optimizers:
                check_states(parts[OPTIMIZER].get("state", {}), room)
            if saved_ranks:
                check_generator_states(_mapping(content[GENERATORS], GENERATORS)[mine])
            first = {key: each for key, each in objects.items() if key not in late}
            _restore_objects(folder, first, parts[EXTRA], undo)

        content = load_state(
            folder,
            state,
            ranks,
            check=fits,
            first=lambda each: id(each.tensor) in new,
            accept=accept,
            convert=arguments.convert,
            advice=_advice,
            progress=arguments.progress,
        )
        read = content.get(MODEL, {})
        values = {name: read.get(name, value) for name, value in state[MODEL].items()}
        set_model_state_dict(model, values, options=StateDictOptions(strict=arguments.frozen))
        if optimizers:
            set_optimizers(model, optimizers, room, content.get(OPTIMIZER, {}), arguments.settings)
    result: dict[str, Any] = content.get(EXTRA, {})
    _restore_objects(folder, {key: objects[key] for key in late}, result, undo)
    hooks.restore(content.get(HOOKS, {}), ranks)
    if saved_ranks:
        _restore_generators(content[GENERATORS][mine], saved_ranks, ranks)
    return result


def _advice(name: str, dtype: torch.dtype) -> str:
    if name.startswith(f"{OPTIMIZER}."):  # which torch makes in the gradients' dtype
        return "Use the precision policy of the save (grad_dtype), or load the model alone"
    return f"Make the model in {dtype}"


def _examine(
    folder: Store, known: StoredCheckpoint | None, arguments: _Arguments, ranks: RankGroup
) -> tuple[Checkpoint, tuple[Optimizer, ...], dict[str, Any]]:
    """Check the arguments and open the checkpoint, the same on every rank.

    Returns:
        The checkpoint, the optimizers, and the state of the model to read into.
    """
    found: list[tuple[Checkpoint, tuple[Optimizer, ...], dict[str, Any]]] = []

    def look() -> tuple[Any, ...]:
        check_model_and_extra(arguments.model, arguments.extra)
        optimizers = as_optimizers(arguments.optimizer)
        refuse_sharded_optimizers(arguments.extra)
        _refuse_in_a_step(arguments.model)
        opened = read_description(folder)
        if known is not None and known.fingerprint != opened.fingerprint:
            raise replaced(opened.place)
        with unless_replaced(opened.origin, opened.fingerprint):
            opened.check_lengths()  # before there is memory for what it says
        found.append((opened, optimizers, _model_state(arguments.model, arguments.frozen)))
        passed = summary(optimizers, arguments.extra, arguments.generators)
        return passed, (opened.fingerprint, str(folder))

    looks = ranks.run_on_all(look)
    check_same([passed for passed, _ in looks], ranks)
    check_same_description([description for _, description in looks], ranks)
    return found[0]


def _make_room(
    state: dict[str, Any],
    stored: StoredNames,
    extra: Mapping[str, Any],
    hooks: HooksToLoad,
    generators: str | None,
    has_optimizers: bool,
    ranks: RankGroup,
) -> dict[str, Tensor]:
    """Add tensors for all parts but model and optimizer to the state to read into. Every rank must call it.

    ``generators``: the key of the random generators to read. Returns the tensors of ``extra`` that are read in place.
    """
    own: dict[str, Tensor] = {}

    def make() -> None:
        if has_optimizers and not stored.has_part(OPTIMIZER):
            raise ValueError(
                f"{stored.folder} holds no optimizer: it has {stored.parts()}. Leave optimizer out to load the rest"
            )
        own.update(_own_tensors(stored, with_states(extra), extra))
        state[EXTRA] = stored.room(EXTRA, own)
        state[HOOKS] = hooks.tensors()
        state[GENERATORS] = (
            {} if generators is None else {generators: stored.room(f"{GENERATORS}.{generators}", {})}
        )

    ranks.run_on_all(make)
    return own


def _restore_objects(
    folder: Store, objects: Mapping[str, Any], stored: Mapping[str, Any], undo: ExitStack
) -> None:
    """Give objects their stored states. ``undo`` gets what gives them their present ones back."""
    for key, value in objects.items():
        if key not in stored:
            raise Damaged(f"extra {key!r} is stored in an unknown form")
        undo.callback(value.load_state_dict, copy.deepcopy(value.state_dict()))
        try:
            value.load_state_dict(stored[key])
        except Exception as error:
            raise ValueError(
                f"{folder}: extra {key!r} cannot be restored by its {type(value).__name__} ({reason_of(error)})"
            ) from error


def _mapping(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Damaged(f"expected {name} as a dict, found {type(value).__name__}")
    return value


def _refuse_in_a_step(model: nn.Module) -> None:
    for unit in units_of(model):
        unit.refuse_unsharded("load_checkpoint of")
        if unit.gradients.held:
            raise RuntimeError(
                f"Unit {unit.name!r} holds gradients of earlier micro-batches, of weights that load_checkpoint would "
                "replace. Load between optimizer steps."
            )


def _own_tensors(
    stored: StoredNames, states: Mapping[str, Any], extra: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Tensors of ``extra`` to read into, by name: given ones, and of objects the sharded ones that fit."""
    own: dict[str, Tensor] = {}
    for key, value in states.items():
        tensors = {name: each.tensor for name, each in NestedState.of({EXTRA: {key: value}}).tensors.items()}
        if is_stateful(extra[key]):
            tensors = {
                name: each for name, each in stored.fitting(tensors).items() if hasattr(each, "full_tensor")
            }
        own |= tensors
    return own


def _check_extra(stored: StoredNames, extra: Mapping[str, Any]) -> None:
    for key, value in extra.items():
        if not stored.has(EXTRA, str(key)) and (
            is_stateful(value) or NestedState.of({EXTRA: {key: value}}).tensors
        ):
            raise ValueError(f"{stored.folder} has no extra {key!r}; it has {_keys(stored)}")


def _keys(stored: StoredNames) -> str:
    within = stored.values.get(EXTRA)
    keys = {name.split(".")[1] for name in stored.names if name.startswith(f"{EXTRA}.")}
    keys |= set(within if isinstance(within, Mapping) else ())
    return ", ".join(map(repr, sorted(keys, key=repr)))[:200] or "none"


def _restore_generators(states: Mapping[str, Tensor], saved_ranks: int, ranks: RankGroup) -> None:
    if saved_ranks == ranks.size:
        set_generator_states(states)
        return
    seed_generators(bytes(states["torch"].tolist()) + f"{ranks.rank} of {ranks.size}".encode())
    if ranks.is_first:
        warnings.warn(
            f"The checkpoint was saved by {saved_ranks} ranks and is loaded by {ranks.size}, so random generators do "
            "not go on where they were: each rank has a seed derived from the checkpoint and its rank.",
            stacklevel=3,
        )
