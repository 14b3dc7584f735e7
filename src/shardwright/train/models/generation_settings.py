"""Generation settings of an exported model, and the tokenizer and the settings that a base has beside its weights.

Settings of the base's author stay, except ids that the run's tokenizer changes. Nothing here generates.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shardwright.train.config import ModelConfig
from shardwright.train.config.catalog.kinds import base_of
from shardwright.train.config.shapes.foreign import HuggingFaceShape, is_folder
from shardwright.train.config.shapes.hub import MissingFile, Unreachable, fetch_file
from shardwright.train.data.tokens.tokenizers import FILE, GENERATION, FromFile, Tokenizer
from shardwright.train.errors import UserError

#: Settings of `shardwright generate`, which an export has unless its base has others.
TEMPERATURE, TOP_K, NEW_TOKENS = 0.8, 50, 200


def generation_settings(
    model: ModelConfig, tokenizer: Tokenizer, say: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Return the content of generation_config.json: the base's, if it has one, else the defaults of `shardwright
    generate`.

    Args:
        model: `[model]` of the run.
        tokenizer: of the run.
        say: gets a notice if it is not known whether the base has this file.

    Raises:
        UserError: the file of the base is damaged.
    """
    base = base_of(model.shape())
    stored = None if base is None else _settings_of(base, say)
    if stored is not None:
        # With this key transformers may take the values of config.json in place of those of the file.
        stored.pop("_from_model_config", None)
        return with_ids(stored, model, tokenizer)
    settings: dict[str, Any] = {"do_sample": True, "temperature": TEMPERATURE, "top_k": TOP_K}
    # A number of new tokens, since `generate` raises an error for a prompt that is longer than a `max_length`.
    settings |= {"max_new_tokens": NEW_TOKENS, **special_ids(tokenizer)}
    # As `generate` itself chooses it, with a warning.
    return {**settings, "pad_token_id": tokenizer.ends[0] if tokenizer.ends else None}


def special_ids(tokenizer: Tokenizer) -> dict[str, Any]:
    """Ids for config.json: each an int or None, and several ends as a list.

    Without these keys transformers takes ids 1 and 2, which are ordinary tokens here.
    """
    ends = tokenizer.ends
    end = list(ends) if len(ends) > 1 else ends[0] if ends else None
    return {"bos_token_id": tokenizer.begin, "eos_token_id": end, "pad_token_id": None}


def with_ids(values: Mapping[str, Any], model: ModelConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return values of a base's config.json or generation_config.json with the ids that the run's tokenizer changes:
    all, or with the base's own tokenizer only further ends."""
    base = base_of(model.shape())
    if base is None or not _is_of(base, tokenizer):
        return {**values, **special_ids(tokenizer)}
    ends = _listed(values.get("eos_token_id"))
    further = [each for each in tokenizer.ends if each not in ends]
    return {**values, "eos_token_id": [*ends, *further]} if further else dict(values)


def ends_of_export(model: ModelConfig, tokenizer: Tokenizer) -> list[int]:
    """Ids at which a text of the exported model ends, as far as the files here say."""
    base = base_of(model.shape())
    if base is None or not _is_of(base, tokenizer):
        return list(tokenizer.ends)
    try:
        stored = _read(base.folder / GENERATION)
    except UserError:
        stored = None  # `export` raises the error
    return _listed(with_ids(stored or {}, model, tokenizer).get("eos_token_id"))


def tokenizer_beside(shape: HuggingFaceShape) -> FromFile | None:
    """Return the tokenizer beside a model's config.json, also in the hub's cache. None: there is none that can be
    read."""
    file = shape.folder / FILE
    try:
        return FromFile(file) if file.is_file() else None
    except UserError:
        return None


def _is_of(shape: HuggingFaceShape, tokenizer: Tokenizer) -> bool:
    """Return whether the tokenizer is the one beside the model."""
    beside = tokenizer_beside(shape)
    return beside is not None and beside.fingerprint == tokenizer.fingerprint


def _settings_of(shape: HuggingFaceShape, say: Callable[[str], None]) -> dict[str, Any] | None:
    """Return the base's generation_config.json. None: it has none."""
    if is_folder(shape.path):
        return _read(Path(shape.path) / GENERATION)
    try:
        return _read(fetch_file(shape.path, GENERATION, "model.path"))
    except MissingFile:
        return None
    except Unreachable as error:
        say(f"{error}. The exported {GENERATION} has the settings of shardwright generate")
        return None


def _read(file: Path) -> dict[str, Any] | None:
    """Return the content of a JSON file; None: there is no such file."""
    if not file.is_file():
        return None
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        content = error
    if not isinstance(content, dict):
        raise UserError(
            f"model.path: expected a JSON object in {file}, found a damaged file; copy it again, or remove it to "
            "export without the settings of the base"
        )
    return content


def _listed(value: object) -> list[int]:
    """Return an id, a list of ids or None, as a list."""
    return [each for each in (value if isinstance(value, list) else [value]) if type(each) is int]
