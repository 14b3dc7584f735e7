"""Loads what ``named_state.py`` saves, and folders by torch and by Lightning's own strategies, into models in training.

All of a checkpoint is verified and compared with the state before any value of the state changes. Nothing is written
here, and no code of a checkpoint runs.
"""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwright.checkpoint import (
    INDEX,
    METADATA,
    Damaged,
    StoredCheckpoint,
    StoredForm,
    is_checkpoint,
    nested,
    not_plain,
    open_checkpoint,
    open_regular,
)
from shardwright.engine import RankGroup
from shardwright.integrations.named_state import KINDS, VALUE, NamedValue, agreed_values

OTHER_VALUES = (
    "meta.pt"  #: in a folder of Lightning's own strategies, the file with other values than tensors
)


def load(path: Path, state: dict[str, Any], strict: bool, weights_only: bool | None) -> dict[str, Any]:
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


def read_file(path: Path, weights_only: bool | None) -> Any:
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
    stored = read_file(path, weights_only)
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
