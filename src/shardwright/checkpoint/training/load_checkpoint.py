"""``load_checkpoint``: the state of a training run from one folder, or from behind one URL.

    extra = sw.load_checkpoint("step-100", model, optimizer, extra={"scheduler": scheduler})

The model may be sharded by Shardwright or FSDP2, wrapped by FSDP1 or DDP, or plain. docs/checkpoints.md.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from shardwright.checkpoint.format.nested import NestedState
from shardwright.checkpoint.load.checkpoints import Checkpoint, checkpoint_at
from shardwright.checkpoint.load.collective_load import (
    Identity,
    check_same_description,
    identity_of,
    read_state,
    verify_together,
)
from shardwright.checkpoint.load.fit import check_tensors
from shardwright.checkpoint.load.replacement import unless_replaced
from shardwright.checkpoint.storage.stores import Store
from shardwright.checkpoint.storage.threads import ignore
from shardwright.checkpoint.training.arguments import (
    check_model_and_extra,
    check_same,
    place_of,
    refuse_sharded_optimizers,
    summary,
)
from shardwright.checkpoint.training.extra_objects import EXTRA, ExtraToLoad
from shardwright.checkpoint.training.generators import GeneratorsToLoad
from shardwright.checkpoint.training.gradient_hooks import HooksToLoad
from shardwright.checkpoint.training.model import ModelToLoad, dtype_advice, model_state
from shardwright.checkpoint.training.open_checkpoint import StoredCheckpoint
from shardwright.checkpoint.training.optimizers import OPTIMIZER, OptimizersToLoad, as_optimizers
from shardwright.checkpoint.training.section_to_load import SectionToLoad
from shardwright.common.errors import Damaged
from shardwright.engine import RankGroup, heartbeat, units_of


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
    known = path.opened if isinstance(path, StoredCheckpoint) else None
    place = place_of(path.path if isinstance(path, StoredCheckpoint) else path, ranks)
    arguments = _Arguments(
        model,
        optimizer,
        extra or {},
        generators=generators,
        frozen=frozen,
        settings=settings,
        convert=convert,
        progress=progress,
    )
    try:
        return _load(_examine(place, known, arguments, ranks), arguments, ranks)
    except Damaged as problem:
        raise Damaged(f"{place}: {problem}") from problem


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


class _Examined(NamedTuple):
    """The checkpoint, the same on every rank, and the arguments as a load needs them."""

    checkpoint: Checkpoint
    optimizers: tuple[Optimizer, ...]


def _load(examined: _Examined, arguments: _Arguments, ranks: RankGroup) -> dict[str, Any]:
    """Read, check and restore all sections. Returns the stored ``extra``. Every rank must call it.

    If it fails, the sections that are not restored yet are undone.
    """
    sections = ranks.run_own(lambda: _sections(examined, arguments, ranks))

    def prepare() -> None:
        for section in sections:
            section.prepare()

    try:
        ranks.run_own(prepare)  # all or none go on: on a rank where it succeeds, optimizers have changed
        content = _read(sections, examined.checkpoint, arguments, ranks)
        while sections:
            sections[0].restore(content[sections[0].key])
            del sections[0]
    except BaseException:
        for section in sections:
            section.undo()
        raise
    return content[EXTRA]


def _sections(examined: _Examined, arguments: _Arguments, ranks: RankGroup) -> list[SectionToLoad]:
    """Return the sections in the order in which they are restored: generators last, since objects may draw."""
    checkpoint, optimizers, model = examined.checkpoint, examined.optimizers, arguments.model
    state = model_state(model, arguments.frozen)
    if optimizers and not checkpoint.has(OPTIMIZER):
        keys = ", ".join(sorted({name.partition(".")[0] for name in checkpoint.leaves}))
        raise ValueError(
            f"{checkpoint.place} holds no optimizer: it has {keys[:200] or 'nothing'}. Leave optimizer out to load "
            "the rest"
        )
    sections: list[SectionToLoad] = [ModelToLoad(checkpoint, model, state, arguments.frozen)]
    if optimizers:
        sections.append(OptimizersToLoad(checkpoint, model, optimizers, arguments.settings))
    sections += [
        ExtraToLoad.of(checkpoint, ranks, arguments.extra),
        HooksToLoad.of(checkpoint, ranks, model),
    ]
    if arguments.generators and (generators := GeneratorsToLoad.of(checkpoint, ranks)) is not None:
        sections.append(generators)
    return sections


@heartbeat.during(heartbeat.LOAD)
def _read(
    sections: Sequence[SectionToLoad], checkpoint: Checkpoint, arguments: _Arguments, ranks: RankGroup
) -> dict[str, dict[str, Any]]:
    """Read into the tensors of the sections, when all of them fit. Returns the stored content of each, by its key."""
    progress = arguments.progress
    by_key: dict[Any, SectionToLoad] = {section.key: section for section in sections}
    state = {key: section.tensors for key, section in by_key.items()}
    tensors = NestedState.of(state).tensors
    content: dict[str, dict[str, Any]] = {}

    def check() -> None:
        for section in sections:
            section.check()
        check_tensors(checkpoint, tensors, arguments.convert, dtype_advice)

    def accept(stored: Mapping[str, Any]) -> None:
        for section in sections:
            content[section.key] = _mapping(stored.get(section.key, {}), section.key)
        for section in sections:
            section.accept(content[section.key])

    ranks.run_on_all(check)
    verify_together(checkpoint, ranks, progress)
    read_state(
        checkpoint,
        state,
        ranks,
        first=lambda tensor: by_key[tensor.path[0]].is_new(tensor.name),
        accept=accept,
        progress=progress,
    )
    return content


def _examine(place: Store, known: Checkpoint | None, arguments: _Arguments, ranks: RankGroup) -> _Examined:
    """Check the arguments and open the checkpoint, unless it is ``known``, the same on every rank."""

    def look() -> _Examined:
        check_model_and_extra(arguments.model, arguments.extra)
        optimizers = as_optimizers(arguments.optimizer)
        refuse_sharded_optimizers(arguments.extra)
        _refuse_in_a_step(arguments.model)
        opened = known or checkpoint_at(place)
        with unless_replaced(opened.description_file):
            opened.check_lengths()  # before there is memory for what it says
        return _Examined(opened, optimizers)

    def shared(examined: _Examined) -> tuple[Any, Identity]:
        passed = summary(examined.optimizers, arguments.extra, arguments.generators)
        return passed, identity_of(examined.checkpoint)

    examined, everyones = ranks.run_and_share(look, shared)
    check_same([passed for passed, _ in everyones], ranks)
    check_same_description([identity for _, identity in everyones], ranks)
    return examined


def _refuse_in_a_step(model: nn.Module) -> None:
    for unit in units_of(model):
        unit.refuse_unsharded("load_checkpoint of")
        if unit.gradients.held:
            raise RuntimeError(
                f"Unit {unit.name!r} holds gradients of earlier micro-batches, of weights that load_checkpoint would "
                "replace. Load between optimizer steps."
            )


def _mapping(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Damaged(f"expected {name} as a dict, found {type(value).__name__}")
    return value
