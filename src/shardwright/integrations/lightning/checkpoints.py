"""Fabric's checkpoints: one file, as an unsharded run writes it, or a folder of ``shardwright.checkpoint``.

``strategy.py`` calls :func:`save_full` or :func:`save_sharded`, and :func:`load_state`, :func:`read_state` or
:func:`load_weights`. A checkpoint appears under its name once it is whole. Before a load changes any value, the whole
checkpoint is verified and compared with what the user passed. Folders by torch and by Lightning's own strategies are
read, too. No code of a checkpoint runs, and nothing here imports ``lightning``.
"""

from __future__ import annotations

import functools
import json
import os
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwright.checkpoint import (
    INDEX,
    METADATA,
    Damaged,
    StoredCheckpoint,
    StoredForm,
    is_checkpoint,
    load_pretrained,
    nested,
    not_plain,
    open_checkpoint,
    save_state,
    write_file,
)
from shardwright.common.regular_files import open_regular
from shardwright.engine import FSDPModule, RankGroup
from shardwright.integrations.lightning.models import Forward
from shardwright.integrations.lightning.named_values import VALUE, NamedValue, agreed_values
from shardwright.optim import mapped

Filter = Mapping[str, Callable[[str, Any], bool]]  #: for a key of the state, which of its entries are saved

KINDS = "fabric"  #: the note in an index with the kind of each key, as JSON
OTHER_VALUES = "meta.pt"  #: in a folder of Lightning's own strategies, the file of what is no tensor

# -- saving ------------------------------------------------------------------------------------------------------------


def _filtered(key: str, values: Any, filter: Filter) -> Any:
    """Return the entries of a dict that the filter keeps; other values have no names to filter by."""
    keep = filter.get(key)
    if keep is None or not isinstance(values, dict):
        return values
    return {name: value for name, value in values.items() if keep(name, value)}


def save_full(path: Path, state: Mapping[str, Any], filter: Filter) -> None:
    """Write one file from the first rank: whole tensors under the names and numbers of an unsharded run.

    Every rank must call it. Whole tensors come one by one, and stay on the host of the first rank.

    Raises:
        IsADirectoryError: ``path`` is a folder that is no checkpoint.
        OSError: on every rank: the file cannot be written. Anything there is unchanged.
    """
    ranks = RankGroup()
    things = agreed_values(state, ranks)

    def check_target() -> None:
        if not is_checkpoint(path) and path.is_dir():
            raise IsADirectoryError(
                f'{path} is a folder, but state_dict_type="full" writes one file. Choose another path.'
            )

    ranks.run_on_first(check_target)
    whole = {
        key: _filtered(key, _gathered(thing.as_unsharded(), ranks.is_first), filter)
        for key, thing in things.items()
        if thing.kind != VALUE
    }

    def write() -> None:
        others = [thing for thing in things.values() if thing.kind == VALUE]
        whole.update({thing.key: _filtered(thing.key, thing.as_unsharded(), filter) for thing in others})
        write_file(path, functools.partial(torch.save, whole))

    ranks.run_on_first(write)


def save_sharded(path: Path, state: Mapping[str, Any], filter: Filter) -> None:
    """Write a folder to which every rank adds its part. Readable at any number of ranks, and in any layout.

    Every rank must call it. Values that are not sharded are the first rank's.

    Raises:
        ValueError: on every rank: a value is neither a tensor nor plain. Nothing was written.
        FileExistsError: on every rank: something else than a checkpoint is at ``path``.
        OSError: on every rank: the folder cannot be written. Anything there is unchanged.
    """
    ranks = RankGroup()
    things = agreed_values(state, ranks)
    contents: dict[str, Any] = {}

    def collect() -> None:
        if odd := [key for key in state if not isinstance(key, str)]:
            raise ValueError(
                f"The state has the key {odd[0]!r}; the keys of a sharded checkpoint are strings."
            )
        contents.update({key: _filtered(key, thing.to_save(), filter) for key, thing in things.items()})

    ranks.run_on_all(collect)
    if not ranks.is_first:
        contents = mapped(contents, lambda value: value if hasattr(value, "to_local") else None)
    kinds = {key: thing.kind for key, thing in things.items()}
    save_state(path, contents, overwrite=True, notes={KINDS: json.dumps(kinds)})


def _gathered(values: dict[str, Any], keep: bool) -> dict[str, Any]:
    """Return whole tensors on the host, where ``keep``, else None in their places. Every rank must come."""

    def gather(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        value = value.detach()
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        return whole.cpu() if keep else None

    return {key: mapped(value, gather) for key, value in values.items()}


# -- loading -----------------------------------------------------------------------------------------------------------


def load_state(path: Path, state: dict[str, Any], strict: bool, weights_only: bool | None) -> dict[str, Any]:
    """Restore ``state`` in place from a file or folder, and return the other values in it.

    Every rank must call it, and reads no more than its part of sharded tensors.

    Raises:
        FileNotFoundError: there is nothing at ``path``.
        ValueError: what is there is no checkpoint, or an optimizer's parameters or state do not fit.
        KeyError: ``strict``, and a key of ``state`` is not stored.
        RuntimeError: lists all names or shapes of a model's tensors that do not fit.
    """
    ranks = RankGroup()
    things = agreed_values(state, ranks)
    if ranks.run_on_first(lambda: is_checkpoint(path)):
        try:
            stored = _read_folder(path, things, ranks, strict, weights_only)
        except Damaged as problem:
            raise ValueError(f"The checkpoint {path} cannot be read: {problem}.") from problem
    else:
        stored = _read_file(path, things, ranks, strict, weights_only)
    for key, thing in things.items():
        if key in stored:
            state[key] = thing.restore(stored.pop(key), strict)
    return stored


def read_state(path: Path, weights_only: bool | None) -> dict[str, Any]:
    """Return the complete content of a file. Raises ValueError for a folder, which is read into a model only."""
    if is_checkpoint(path):
        raise ValueError(
            f"{path} is a sharded checkpoint, which is loaded into a model. Pass "
            "fabric.load(path, state={'model': model, ...})."
        )
    return _content_of(path, weights_only)  # type: ignore[no-any-return]


def load_weights(path: Path, module: nn.Module, strict: bool, weights_only: bool | None) -> None:
    """Load a model's weights from a file of any kind, before or after ``setup``.

    A deferred model keeps them until ``setup``.
    """
    model = module.module if isinstance(module, Forward) else module
    if not isinstance(model, FSDPModule) and any(t.is_meta for t in (*model.parameters(), *model.buffers())):
        raise TypeError(
            f"load_raw got a {type(model).__name__} on the meta device, which has no memory to load into. Set it up "
            "first (model = fabric.setup(model)), or build it under fabric.init_module(empty_init=True)."
        )
    if is_checkpoint(path):
        raise ValueError(
            f"{path} is a sharded checkpoint, not a file of weights. Use fabric.load(path, {{'model': model}})."
        )
    if path.is_dir() or path.name.endswith((".safetensors", ".json")):
        load_pretrained(model, path, allow_missing=not strict, allow_unexpected=not strict)
        return
    weights = RankGroup().run_own(lambda: _content_of(path, weights_only))
    model.load_state_dict(weights, strict=strict)


def _check_keys(
    path: Path, things: Mapping[str, NamedValue], stored: Mapping[str, Any], strict: bool
) -> None:
    missing = [key for key in things if key not in stored]
    if strict and missing:
        raise KeyError(
            f"The checkpoint {path} has no {', '.join(map(repr, missing))}; it has "
            f"{', '.join(map(repr, sorted(stored, key=str))) or 'nothing'}. To load only the stored keys, pass "
            "strict=False."
        )


# -- files -------------------------------------------------------------------------------------------------------------


def _content_of(path: Path, weights_only: bool | None) -> Any:
    """Return the content of a file of ``torch.save``, mapped into memory, on the host.

    No code of the file runs, whatever torch's own default is, unless ``weights_only`` is False.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is a folder, no such file, or holds what is no tensor or plain value.
    """
    if not path.exists():
        raise FileNotFoundError(f"There is no checkpoint at {path}.")
    if path.is_dir():
        raise ValueError(
            f"{path} is a folder without {INDEX} or {METADATA}, so it is no checkpoint. Pass the folder of a sharded "
            "checkpoint, or the file of a full checkpoint."
        )
    try:
        os.close(open_regular(path, links=True))  # torch would wait for a pipe
        return torch.load(path, mmap=True, map_location="cpu", weights_only=weights_only is not False)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} {not_plain(error)}; weights_only=False lets a file run any code."
        ) from error
    except (EOFError, KeyError, RuntimeError, Damaged) as error:
        raise ValueError(f"{path} cannot be read as a file of torch.save: {error}") from error


def _dict_in(path: Path, weights_only: bool | None) -> dict[str, Any]:
    stored = _content_of(path, weights_only)
    if not isinstance(stored, dict):
        raise ValueError(f"{path} holds a {type(stored).__name__}, but a checkpoint is a dict.")
    return stored


def _read_file(
    path: Path, things: Mapping[str, NamedValue], ranks: RankGroup, strict: bool, weights_only: bool | None
) -> dict[str, Any]:
    """Return the content of a file whose keys and optimizers fit. A model checks its own part when it loads it."""
    stored: dict[str, Any] = {}

    def examine() -> None:
        stored.update(_dict_in(path, weights_only))
        _check_keys(path, things, stored, strict)
        for key in (key for key, thing in things.items() if thing.kind == "optimizer" and key in stored):
            things[key].fitting(path, stored[key], strict)

    ranks.run_on_all(examine)
    return stored


# -- folders -----------------------------------------------------------------------------------------------------------


def _read_folder(
    path: Path, things: Mapping[str, NamedValue], ranks: RankGroup, strict: bool, weights_only: bool | None
) -> dict[str, Any]:
    """Verify a folder, and return what it has for the state, and its values beside. Every rank must call it."""
    opened: list[StoredCheckpoint] = []
    stored: dict[str, Any] = {}
    beside: dict[str, Any] = {}

    def examine() -> None:
        checkpoint = open_checkpoint(path, links=True)  # model hubs keep files behind links
        opened.append(checkpoint)
        checkpoint.check_lengths()
        entries = dict(checkpoint.entries)
        if not checkpoint.has_digests:
            file = path / OTHER_VALUES  # a folder that torch's own writer has left has none
            beside.update(_dict_in(file, weights_only) if file.is_file() else {})
            entries.update(checkpoint.pickled_values({*things}, weights_only=weights_only is not False))
        content = nested(entries) if entries else {}
        stored.update(content if isinstance(content, dict) else {"": content})

    ranks.run_on_all(examine)
    checkpoint = opened[0]
    checkpoint.verify()
    found: dict[str, Any] = {}
    targets: dict[str, Tensor] = {}

    def fit() -> None:
        _check_keys(path, things, {**stored, **beside}, strict)
        others = _other_keys(checkpoint, stored)
        for key in stored.keys() - beside.keys():
            if key in things or key in others:
                thing = things.get(key) or NamedValue(key, None)
                found[key] = _with_targets(thing, thing.fitting(path, stored[key], strict), (), targets)

    ranks.run_on_all(fit)
    checkpoint.read(targets)
    return {**beside, **found}


def _other_keys(checkpoint: StoredCheckpoint, stored: Mapping[str, Any]) -> set[str]:
    """Return the keys of what is no model or optimizer. Other writers than ours leave no list of them."""
    if not checkpoint.has_digests:
        return set()
    if KINDS not in checkpoint.about:
        return set(stored) - {str(k[0]) for k, v in checkpoint.entries.items() if isinstance(v, StoredForm)}
    try:
        kinds = json.loads(checkpoint.about[KINDS])
        return {key for key in stored if kinds[key] == VALUE}
    except (ValueError, LookupError, TypeError):
        raise Damaged("index.json does not say what the keys of the state are") from None


def _with_targets(thing: NamedValue, value: Any, keys: tuple[Any, ...], targets: dict[str, Tensor]) -> Any:
    """Return ``value`` with a tensor to read into for each stored tensor in it. ``targets`` gets them by name."""
    if isinstance(value, StoredForm):
        targets[value.name] = thing.target(value, keys)
        return targets[value.name]
    if type(value) is dict:  # other classes are values themselves
        return {key: _with_targets(thing, each, (*keys, key), targets) for key, each in value.items()}
    if type(value) is list:
        return [_with_targets(thing, each, (*keys, i), targets) for i, each in enumerate(value)]
    return value
