"""``save_checkpoint`` and ``load_checkpoint``: the state of a training run in one folder, or behind one URL.

    sw.save_checkpoint("step-100", model, optimizer, extra={"scheduler": scheduler, "step": 100})
    extra = sw.load_checkpoint("step-100", model, optimizer, extra={"scheduler": scheduler})

The model may be sharded by Shardwright or FSDP2, wrapped by FSDP1 or DDP, or plain. docs/checkpoints.md.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from shardwright.checkpoint.digests import Damaged
from shardwright.checkpoint.generators import (
    derived_seed,
    generator_states,
    seed_generators,
    set_generator_states,
)
from shardwright.checkpoint.loading import Checkpoint, load_state, open_checkpoint
from shardwright.checkpoint.places import store_of
from shardwright.checkpoint.ranks import Ranks
from shardwright.checkpoint.saving import save_state
from shardwright.checkpoint.state import merged, name_of, nested
from shardwright.checkpoint.stores import Store

MODEL, OPTIMIZER, EXTRA, GENERATORS = "model", "optimizer", "extra", "generators"


def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    generators: bool = True,
    overwrite: bool = False,
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
        optimizer: of the model's parameters. State that does not exist before the first step is not stored.
        extra: tensors, plain values (numbers, strings, lists, tuples, dicts) and objects with ``state_dict``, such as a
            schedule of learning rates. The first rank's values are stored.
        generators: store the random generators of every rank.
        overwrite: replace a checkpoint at ``path``. It stays until the new one is on disk. Behind a URL only what an
            interrupted save has left and a damaged checkpoint are replaced: there is no rename.
        process_group: of the ranks that have the model. Default: all ranks; without a process group this process.

    Raises:
        ValueError: something cannot be stored. The message names it. Nothing was written.
        FileExistsError: something is at ``path``.
        OSError: on every rank. The message names rank, file and reason. What was at ``path`` is unchanged.
    """
    ranks = Ranks(process_group)
    place = store_of(path)
    save_state(place, state_to_save(model, optimizer, extra, generators, ranks), ranks, overwrite=overwrite)


def state_to_save(
    model: nn.Module,
    optimizer: Optimizer | None,
    extra: Mapping[str, Any] | None,
    generators: bool,
    ranks: Ranks,
) -> dict[str, Any]:
    """What :func:`save_checkpoint` stores, as one nested state."""
    state: dict[str, Any] = {MODEL: get_model_state_dict(model)}
    if optimizer is not None:
        state[OPTIMIZER] = _optimizer_state(model, optimizer)
    state[EXTRA] = {
        key: value.state_dict() if _is_stateful(value) else value for key, value in (extra or {}).items()
    }
    if generators:
        state[GENERATORS] = {f"rank{ranks.rank}": generator_states()}
    return state


def _optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's state by names of parameters. torch takes a step to make a state; that step is undone."""
    if optimizer.state:
        return dict(get_optimizer_state_dict(model, optimizer))
    state = dict(get_optimizer_state_dict(model, optimizer))
    optimizer.state.clear()
    return {**state, "state": {}}


def _is_stateful(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def load_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    generators: bool = True,
    process_group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Restore what :func:`save_checkpoint` has written. Call it between steps, on every rank.

    Every file is compared with its digest, and every tensor with the model's, before any value changes. Also reads
    folders of ``torch.distributed.checkpoint`` with the keys ``model`` and ``optimizer``; nothing in them is called.

    Args:
        path: the folder or URL.
        model: with the parameters and buffers of the saved one, sharded in any way, on any number of ranks.
        optimizer: the saved kind, with the saved parameters. Rates and other settings of its groups are restored.
        extra: objects with ``load_state_dict`` and tensors, by the keys of the save. They are restored in place.
        generators: restore the random generators: exactly at the saved number of ranks. At another number each rank
            gets a new seed, derived from the checkpoint, its rank and the number of ranks, with a warning.
        process_group: as for :func:`save_checkpoint`.

    Returns:
        All of the saved ``extra``: values and tensors on the host, state dicts for objects.

    Raises:
        FileNotFoundError: there is no checkpoint.
        OSError: the store behind a URL does not answer.
        ValueError: the checkpoint is damaged (then it is a :class:`Damaged`), or of another model or optimizer. The
            message names the file or tensor. Nothing was changed.
    """
    folder, ranks = store_of(path), Ranks(process_group)
    opened: list[Checkpoint] = []
    ranks.together(lambda: opened.append(open_checkpoint(folder)))
    stored = opened[0].shapes()
    state: dict[str, Any] = {MODEL: get_model_state_dict(model)}
    has_state = any(name.startswith(f"{OPTIMIZER}.state.") for name in stored)
    whole: dict[str, Any] | None = None
    if optimizer is not None:
        whole = dict(get_optimizer_state_dict(model, optimizer))
        state[OPTIMIZER] = {**whole} if has_state else {"param_groups": whole["param_groups"]}
    given = {key: value for key, value in (extra or {}).items() if not _is_stateful(value)}
    rooms = _rooms(opened[0], EXTRA, given)
    saved_ranks = _saved_ranks(stored)
    mine = ranks.rank if saved_ranks == ranks.size else 0
    rooms |= _rooms(opened[0], f"{GENERATORS}.rank{mine}", {}) if generators and saved_ranks else {}
    state |= nested(rooms)

    def fits(checkpoint: Checkpoint) -> None:
        _check_names(folder, checkpoint, state)

    values = load_state(folder, state, ranks, check=fits)
    _apply(model, optimizer, state, whole, has_state, values)
    result: dict[str, Any] = merged(state.get(EXTRA, {}), values.get(EXTRA, {}))
    for key, value in (extra or {}).items():
        if _is_stateful(value):
            if key not in result:
                raise ValueError(
                    f"{folder} has no extra {key!r}; it has {', '.join(map(repr, result)) or 'none'}"
                )
            value.load_state_dict(result[key])
    if GENERATORS in state:
        _restore_generators(state[GENERATORS][f"rank{mine}"], saved_ranks, ranks)
    return result


def _apply(
    model: nn.Module,
    optimizer: Optimizer | None,
    state: Mapping[str, Any],
    whole: Mapping[str, Any] | None,
    has_state: bool,
    values: Mapping[str, Any],
) -> None:
    set_model_state_dict(model, state[MODEL], options=StateDictOptions(strict=True))
    if optimizer is None or whole is None:
        return
    stored = values.get(OPTIMIZER, {})
    loaded: Any = {
        "state": merged(state[OPTIMIZER].get("state", whole["state"]), stored.get("state", {})),
        "param_groups": merged(whole["param_groups"], stored.get("param_groups", whole["param_groups"])),
    }
    set_optimizer_state_dict(model, optimizer, loaded)
    if not has_state:
        optimizer.state.clear()


def _rooms(checkpoint: Checkpoint, prefix: str, given: Mapping[str, Any]) -> dict[Any, Tensor]:
    """A tensor for each stored one below ``prefix``, by its path: the given one, or a new one on the host."""
    index = checkpoint.index
    if index is None:
        return {}
    rooms: dict[Any, Tensor] = {}
    for name, each in index.tensors.items():
        if not name.startswith(f"{prefix}."):
            continue
        value: Any = given if prefix == EXTRA else {}
        for step in each.path[1:]:
            key = step[0] if isinstance(step, tuple) else step
            try:
                value = value[key]
            except (LookupError, TypeError):
                value = None
        rooms[each.path] = value if isinstance(value, Tensor) else torch.empty(each.shape, dtype=each.dtype)
        assert name_of(each.path) == name
    return rooms


def _check_names(folder: Store, checkpoint: Checkpoint, state: Mapping[str, Any]) -> None:
    """Raise ValueError if the checkpoint has tensors of a model or optimizer that this one does not have."""
    from shardwright.checkpoint.state import State

    mine = State.of(state).tensors
    for name in checkpoint.shapes():
        kind = name.partition(".")[0]
        if name not in mine and kind in (MODEL, OPTIMIZER) and kind in state:
            raise ValueError(f"{folder} has the tensor {name}, which this {kind} does not have")


def _saved_ranks(stored: Mapping[str, Any]) -> int:
    return sum(name.startswith(f"{GENERATORS}.rank") and name.endswith(".torch") for name in stored)


def _restore_generators(states: Mapping[str, Tensor], saved_ranks: int, ranks: Ranks) -> None:
    if saved_ranks == ranks.size:
        try:
            set_generator_states(states)
        except (RuntimeError, TypeError, ValueError, LookupError) as error:
            raise Damaged(f"the state of a random generator cannot be restored: {error}") from None
        return
    seed_generators(derived_seed(states, ranks.rank, ranks.size))
    if ranks.is_first:
        warnings.warn(
            f"The checkpoint was saved by {saved_ranks} ranks and is loaded by {ranks.size}, so random generators do "
            "not go on where they were: each rank has a seed derived from the checkpoint and its rank.",
            stacklevel=3,
        )
