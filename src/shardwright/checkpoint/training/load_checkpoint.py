"""``load_checkpoint``: the state of a training run from one folder, or from behind one URL.

    extra = sw.load_checkpoint("step-100", model, optimizer, extra={"scheduler": scheduler})

The model may be sharded by Shardwright or FSDP2, wrapped by FSDP1 or DDP, or plain. docs/checkpoints.md.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.optim import Optimizer

from shardwright.checkpoint.format.nested import NestedState, StateTensor, ignore
from shardwright.checkpoint.load.checkpoints import Checkpoint, read_description
from shardwright.checkpoint.load.collective_load import check_same_description, check_tensors, load_state
from shardwright.checkpoint.load.unreplaced import replaced, unless_replaced
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
    seed_generators,
    set_generator_states,
    stored_by,
)
from shardwright.checkpoint.training.gradient_hooks import HOOKS, HooksToLoad
from shardwright.checkpoint.training.opened import StoredCheckpoint
from shardwright.checkpoint.training.optimizer_settings import check_states
from shardwright.checkpoint.training.optimizers import (
    OPTIMIZER,
    as_optimizers,
    check_groups,
    group_tensors,
    room_for_state,
    set_optimizers,
    stored_groups,
)
from shardwright.checkpoint.training.save_checkpoint import EXTRA, MODEL, model_state
from shardwright.checkpoint.training.wanted_state import StoredNames
from shardwright.collective import RankGroup
from shardwright.engine.unit.owning import units_of
from shardwright.errors import Damaged

GROUPS = f"{OPTIMIZER}.param_groups"


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
            message names the file or tensor. Nothing was changed, except when an object of ``extra`` whose tensors were
            read in place refuses its state: model and optimizer have their stored values then.
    """
    ranks = RankGroup(process_group)
    known, location = (path, path.path) if isinstance(path, StoredCheckpoint) else (None, path)
    place = place_of(location, ranks)
    arguments = _Arguments(model, optimizer, extra or {}, generators, frozen, settings, convert, progress)
    with ExitStack() as undo:
        try:
            result = _CheckpointLoad(place, known, arguments, ranks).load(undo)
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


class _CheckpointLoad:
    """The parts of a run that a load restores, and the tensors to read into. The methods are in the order of the load.

    Attributes:
        place, arguments, ranks: of the load.
        checkpoint, stored: as every rank has opened it, and its tensors and values by name.
        optimizers: of the run; none if the load leaves them out.
        hooks: of the model's gradients.
        saved_ranks: number of ranks that have stored random generators; 0: none are restored.
        generators: the key of those that this rank takes.
        state: tensors to read into, nested as in the checkpoint.
        own: the tensors of ``extra`` that are read in place, by name.
        room: state and groups of the optimizers, with their tensors to read into.
    """

    own: dict[str, Tensor]
    room: dict[str, Any]

    def __init__(
        self, place: Store, known: StoredCheckpoint | None, arguments: _Arguments, ranks: RankGroup
    ) -> None:
        """Open the checkpoint, check the arguments, and make tensors to read into. Every rank must call it."""
        self.place, self.arguments, self.ranks = place, arguments, ranks
        self.checkpoint, self.optimizers, of_model = _examine(place, known, arguments, ranks)
        self.stored = StoredNames(place, self.checkpoint)
        self.hooks = HooksToLoad(arguments.model, self.stored)
        names = self.stored.tensors if arguments.generators else ()
        self.saved_ranks, self.generators = stored_by(names, ranks)
        self.state: dict[str, Any] = {MODEL: of_model}
        ranks.run_on_all(self._make_room)

    def _make_room(self) -> None:
        """Add tensors for all parts but model and optimizers to the state."""
        stored, extra = self.stored, self.arguments.extra
        if self.optimizers and not stored.has_part(OPTIMIZER):
            raise ValueError(
                f"{self.place} holds no optimizer: it has {stored.parts()}. Leave optimizer out to load the rest"
            )
        self.own = _own_tensors(stored, with_states(extra), extra)
        self.state[EXTRA] = stored.room(EXTRA, self.own)
        self.state[HOOKS] = self.hooks.tensors()
        self.state[GENERATORS] = {}
        if self.saved_ranks:
            self.state[GENERATORS][self.generators] = stored.room(f"{GENERATORS}.{self.generators}", {})

    def load(self, undo: ExitStack) -> dict[str, Any]:
        """Read, check and restore all parts. Returns the stored ``extra``. Every rank must call it.

        ``undo`` gets what gives objects of ``extra`` their present state back.
        """
        arguments = self.arguments
        with room_for_state(arguments.model, self.optimizers, self.stored) as self.room:
            if self.optimizers:
                self._add_optimizer_tensors()
            content = load_state(
                self.place,
                self.state,
                self.ranks,
                check=self._check,
                first=self._is_new,
                accept=lambda content: self._accept(content, undo),
                convert=arguments.convert,
                advice=_advice,
                progress=arguments.progress,
            )
            self._set_model_and_optimizers(content)
        extra: dict[str, Any] = content.get(EXTRA, {})
        self.ranks.run_on_all(lambda: self._restore_objects(extra, undo, late=True))
        self.hooks.restore(content.get(HOOKS, {}), self.ranks)
        if self.saved_ranks:
            _restore_generators(content[GENERATORS][self.generators], self.saved_ranks, self.ranks)
        return extra

    def _add_optimizer_tensors(self) -> None:
        own_groups = group_tensors(self.room["param_groups"]) if self.arguments.settings else {}
        groups = self.stored.room(GROUPS, self.stored.fitting(own_groups))
        self.state[OPTIMIZER] = {"state": self.room["state"], "param_groups": groups}

    def _check(self, again: Checkpoint) -> None:
        """Raise if the checkpoint was replaced, or does not fit the run. Nothing was read yet."""
        if again.fingerprint != self.checkpoint.fingerprint:
            raise replaced(self.place)
        state, stored, arguments = self.state, self.stored, self.arguments
        of_model = NestedState.of({MODEL: state[MODEL]}).tensors
        check_tensors(self.place, again, of_model, arguments.convert, _advice)  # it explains what follows
        stored.check_names({MODEL, OPTIMIZER} if self.optimizers else {MODEL}, state)
        stored.check_values(MODEL, state[MODEL])
        _check_extra(stored, arguments.extra)
        if self.optimizers and arguments.settings and GROUPS in stored.values:
            check_groups(self.room["param_groups"], stored.values[GROUPS])

    def _is_new(self, tensor: StateTensor) -> bool:
        """Whether a tensor was made for this load. Such tensors are read before any value of the run changes."""
        part = tensor.path[0]
        return part == GENERATORS or (part == EXTRA and tensor.name not in self.own)

    def _accept(self, content: Mapping[str, Any], undo: ExitStack) -> None:
        """Raise if the values and the new tensors of the checkpoint do not fit the run."""
        parts = {part: _mapping(content.get(part, {}), part) for part in (MODEL, OPTIMIZER, EXTRA, HOOKS)}
        if self.optimizers:
            groups = self.room["param_groups"]
            if self.arguments.settings:
                check_groups(groups, stored_groups(parts[OPTIMIZER], groups))
            check_states(parts[OPTIMIZER].get("state", {}), self.room)
        if self.saved_ranks:
            check_generator_states(_mapping(content[GENERATORS], GENERATORS)[self.generators])
        self._restore_objects(parts[EXTRA], undo, late=False)

    def _set_model_and_optimizers(self, content: Mapping[str, Any]) -> None:
        model, read = self.arguments.model, content.get(MODEL, {})
        values = {name: read.get(name, value) for name, value in self.state[MODEL].items()}
        set_model_state_dict(model, values, options=StateDictOptions(strict=self.arguments.frozen))
        if self.optimizers:
            of_optimizers = content.get(OPTIMIZER, {})
            set_optimizers(model, self.optimizers, self.room, of_optimizers, self.arguments.settings)

    @cached_property
    def _late(self) -> set[str]:
        """The objects of ``extra`` with tensors that are read in place, after everything that can be refused."""
        own = [f"{name}." for name in self.own]
        return {key for key in self.arguments.extra if any(n.startswith(f"{EXTRA}.{key}.") for n in own)}

    def _restore_objects(self, stored: Mapping[str, Any], undo: ExitStack, *, late: bool) -> None:
        """Give objects of ``extra`` their stored states. ``undo`` gets what gives them their present ones back."""
        for key, value in self.arguments.extra.items():
            if not is_stateful(value) or (key in self._late) != late:
                continue
            if key not in stored:
                raise Damaged(f"extra {key!r} is stored in an unknown form")
            undo.callback(value.load_state_dict, copy.deepcopy(value.state_dict()))
            try:
                value.load_state_dict(stored[key])
            except Exception as error:
                raise ValueError(
                    f"{self.place}: extra {key!r} cannot be restored by its {type(value).__name__} ({reason_of(error)})"
                ) from error


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
        found.append((opened, optimizers, model_state(arguments.model, arguments.frozen)))
        passed = summary(optimizers, arguments.extra, arguments.generators)
        return passed, (opened.fingerprint, str(folder))

    looks = ranks.run_on_all(look)
    check_same([passed for passed, _ in looks], ranks)
    check_same_description([description for _, description in looks], ranks)
    return found[0]


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
            stacklevel=4,
        )
