"""Comparisons of a run with a job that goes on with it: configuration, data and tokenizer. A difference is an error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from shardwright.train.config import Config, DataConfig
from shardwright.train.config.catalog.kinds import kind_named
from shardwright.train.config.schema import toml_value
from shardwright.train.errors import UserError
from shardwright.train.run.folder import RunFolder


def check_same_job(folder: RunFolder, config: Config, what: str) -> None:
    """Raise if the configuration makes the run another job. The error names the first key.

    Steps, learning rate, engine, ranks and precisions may change. The model and the sequence of samples may not.
    """
    there, here = folder.config().checkpoint.folder, config.checkpoint.folder
    if there != here:
        raise UserError(
            f"{what}: expected checkpoint.folder = {value_in_words(there)} as in {folder.path}, where its checkpoints "
            f"are, found {value_in_words(here)}"
        )
    for key, before, after in differences(_where_content_decides(folder.config(), config), config):
        old, new = value_in_words(before), value_in_words(after)
        raise UserError(
            f"{what}: expected {key} = {old} as in {folder.path}, found {new}; start a new run for that"
        )


def value_in_words(value: object) -> str:
    """Return a value of a configuration in a message; "none" for an empty one."""
    if isinstance(value, tuple) and value and all(isinstance(each, BaseModel) for each in value):
        return toml_value([each.model_dump(exclude_defaults=True, exclude_none=True) for each in value])
    return "none" if value in ("", None, (), {}) else str(value)


def _where_content_decides(stored: Config, config: Config) -> Config:
    """Return the stored configuration with the current paths and keys of data whose content is compared, or may
    change."""
    before, after = stored.data, config.data
    changes: dict[str, Any] = {}
    if after.appended:  # a list may have new files
        changes["source"] = after.source
        if len(before.sources) == len(after.sources):
            pairs = zip(before.sources, after.sources, strict=True)
            changes["sources"] = tuple(old.model_copy(update={"path": new.path}) for old, new in pairs)
    if before.split_fraction == after.split_fraction:  # other text for validation alone changes no step
        changes.update({key: getattr(after, key) for key in ("validation_source", "validation_sources")})
    return stored.model_copy(update={"data": before.model_copy(update=changes)})


def differences(first: Config, second: Config) -> Iterator[tuple[str, object, object]]:
    """Yield the keys of the model, the data and the order of samples that differ between two configurations, with both
    values.

    The resolved values are compared, so two spellings of one value are equal.
    """
    first, second = first.resolved(), second.resolved()
    pairs: list[tuple[str, object, object]] = [("model.kind", first.model.kind, second.model.kind)]
    if kind_named(first.model.kind) is kind_named(second.model.kind):  # by a short name or an import path
        shapes = vars(first.model.shape()), vars(second.model.shape())
        pairs = [(f"model.{key}", value, shapes[1][key]) for key, value in shapes[0].items()]
    free = {"workers", "cache", "appended", "validation_fraction"}  # which no sample depends on
    if first.data.separates == second.data.separates:
        free.add("document_mask")
    data = [(key, value, getattr(second.data, key)) for key, value in first.data if key not in free]
    pairs += [(f"data.{key}", before, after) for key, before, after in data]
    pairs.append(("data.validation_fraction", first.data.split_fraction, second.data.split_fraction))
    pairs += [
        *(
            (f"finetune.{key}", value, getattr(second.finetune, key))
            for key, value in first.finetune
            if key not in ("dropout", "adapters")
        ),
        ("run.seed", first.run.seed, second.run.seed),
        ("train.seq_len", first.train.seq_len, second.train.seq_len),
        ("train.global_batch", first.train.global_batch, second.train.global_batch),
    ]
    for key, before, after in pairs:
        if before != after:
            yield key, before, after


def check_same_data(folder: RunFolder, sha256: str, train_tokens: int) -> None:
    """Raise if the text of the run has changed but its `data.source` has not."""
    data = folder.record()["corpus"]
    stored, stored_tokens = data["sha256"], data["train_tokens"]
    if stored != sha256:
        raise UserError(
            f"--resume: expected the data of {folder.path} (sha256 {stored[:12]}), found other tokens "
            f"(sha256 {sha256[:12]}): the text behind data.source, the tokenizer or the template has changed; "
            "restore it or start a new run"
        )
    if stored_tokens != train_tokens:
        raise UserError(
            f"--resume: expected the {stored_tokens:,} training tokens of {folder.path}, found {train_tokens:,} in the "
            "same data: its documents begin elsewhere; start a new run"
        )


def recorded_tokenizer(record: Mapping[str, Any], data: DataConfig) -> str:
    """Return the setting `data.tokenizer` of a run. A hub name gets the commit that the run has used."""
    name = data.tokenizer
    used = str(record["tokenizer"]["name"])
    return used if used.partition("@")[0] == name.partition("@")[0] else name


def check_same_tokenizer(folder: RunFolder, name: str, fingerprint: str) -> None:
    """Raise if a tokenizer is not the one of the run.

    Args:
        folder: of the run.
        name: the setting with which the tokenizer was opened.
        fingerprint: of the tokenizer.

    Raises:
        UserError: the fingerprints differ.
    """
    recorded = folder.record()["tokenizer"]
    if fingerprint != recorded["fingerprint"]:
        raise UserError(
            f"data.tokenizer: expected the tokenizer of {folder.path}, {recorded['name']} with the fingerprint "
            f"{recorded['fingerprint'][:12]}, found the fingerprint {fingerprint[:12]} at {name}; restore the files "
            f"that the run was trained with, or set data.tokenizer in {folder.config_file} to a copy of them"
        )
