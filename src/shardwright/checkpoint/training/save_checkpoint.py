"""``save_checkpoint``: the state of a training run in one folder, or behind one URL.

    sw.save_checkpoint("step-100", model, optimizer, extra={"scheduler": scheduler, "step": 100})

The model may be sharded by Shardwright or FSDP2, wrapped by FSDP1 or DDP, or plain. docs/checkpoints.md.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from shardwright.checkpoint.save.collective_save import write_state
from shardwright.checkpoint.training.arguments import (
    check_model_and_extra,
    check_same,
    place_of,
    refuse_sharded_optimizers,
    summary,
)
from shardwright.checkpoint.training.extra_objects import EXTRA, with_states
from shardwright.checkpoint.training.generators import GENERATORS, generator_states
from shardwright.checkpoint.training.gradient_hooks import HOOKS, gradient_hook_states
from shardwright.checkpoint.training.model import MODEL, model_state, without_values
from shardwright.checkpoint.training.optimizers import OPTIMIZER, as_optimizers, state_of_optimizers
from shardwright.engine import RankGroup, units_of

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
    ``torch.distributed.checkpoint``. Its keys: ``model``, ``optimizer``, ``extra``, ``gradient_hooks`` (state of the
    model's hooks, such as errors that they add to later gradients) and ``generators``.

    Args:
        path: the new folder, on a file system that all ranks share; or a URL that fsspec knows, such as
            ``s3://bucket/run-7/step-100``. Behind a URL the checkpoint appears with its last object, ``index.json``.
        model: sharded, wrapped or plain.
        optimizer: of the model's parameters, one or several. State that does not exist yet is not stored.
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
    write_state(place, state, ranks, overwrite=overwrite, verified=verified, shared=SHARED)


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

    For other states than a model and its optimizer, such as several models. Call it on every rank. Read it with
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
    write_state(place, state, ranks, overwrite=overwrite, verified=verified, notes=notes, shared=SHARED)


def state_to_save(
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer] | None,
    extra: Mapping[str, Any] | None,
    generators: bool,
    frozen: bool,
    ranks: RankGroup,
) -> dict[str, Any]:
    """Return the nested state that :func:`save_checkpoint` stores. Every rank must call it.

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
                    raise ValueError(without_values(f"{unit.name}.{p.name}".lstrip("."), "to save"))
        state[MODEL] = model_state(model, frozen)
        if optimizers:
            state[OPTIMIZER] = state_of_optimizers(model, optimizers)
        state[EXTRA] = with_states(more)
        if hooks := gradient_hook_states(model):
            state[HOOKS] = hooks
        if generators:
            state[GENERATORS] = {f"rank{ranks.rank}": generator_states()}
        return summary(optimizers, more, generators)

    check_same(ranks.run_on_all(take), ranks)
    return state
