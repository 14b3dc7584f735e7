"""The shapes of models whose code is elsewhere: models of transformers, and a user's own.

Nothing here imports torch or transformers, so that configurations can be checked and `--help` printed at once.
"""

from __future__ import annotations

import difflib
import functools
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shardwright.train.config.shapes.hub import fetch_file, is_hub_name, pinned
from shardwright.train.config.shapes.rope_tables import rope_tables
from shardwright.train.errors import UserError

CONFIG = "config.json"
FILES_OF_PATH = "the model of model.path"
"""The files of a `HuggingFaceShape` in messages, and the key of their fingerprint."""
#: Keys of config.json, by model type, that limit the length of a sequence.
_LENGTHS = ("max_position_embeddings", "n_positions", "max_sequence_length")
_CAUSAL = ("ForCausalLM", "LMHeadModel")


@dataclass(frozen=True)
class HuggingFaceShape:
    """A causal language model of transformers: what its config.json says.

    Attributes:
        path: a folder with config.json, or a name on the hub: ``owner/model`` or ``owner/model@revision``.
        weights: "pretrained": read from the safetensors of the path. "random": drawn, for training from scratch.
        blocks: the name of the list of the model's layers; empty: it is found.
    """

    path: str = ""
    weights: str = "pretrained"
    blocks: str = ""

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError(
                "path: expected the folder of a model with a config.json, or its name on the Hugging Face hub, found "
                "none"
            )
        check_config(self.path, self.config)

    @property
    def config(self) -> Mapping[str, Any]:
        """The content of config.json."""
        return _read(os.path.abspath(self.path) if is_folder(self.path) else self.path)[1]

    @property
    def folder(self) -> Path:
        """The folder here with config.json, and with other files of the model that are here: of a name on the hub in
        its cache."""
        return _read(os.path.abspath(self.path) if is_folder(self.path) else self.path)[0].parent

    @property
    def vocab_size(self) -> int:
        return int(_text_config(self.config)["vocab_size"])

    @property
    def max_seq_len(self) -> int | None:
        """The longest sequence in tokens. None: positions have no limit, as in Mamba."""
        values = _text_config(self.config)
        return next((values[key] for key in _LENGTHS if isinstance(values.get(key), int)), None)

    def resolved(self) -> HuggingFaceShape:
        """Return the same model with an absolute path, or with the commit of its files on the hub."""
        if is_folder(self.path):
            return replace(self, path=os.path.abspath(self.path))
        return replace(self, path=pinned(self.path, _read(self.path)[0]))


def is_folder(path: str) -> bool:
    """Return whether a path is a folder here. Otherwise it can be a name on the hub."""
    return os.path.isdir(path)


@functools.lru_cache(16)
def _read(path: str) -> tuple[Path, Mapping[str, Any]]:
    """Return the config.json of a folder or a hub name, and its content. Read once in a process."""
    if is_folder(path):
        file = Path(path, CONFIG)
        if not file.is_file():
            raise ValueError(
                f"path: expected a folder with a {CONFIG}, found none in {path}; set the folder of a model, or its "
                "name on the hub"
            )
    elif os.path.isfile(path):
        parent = os.path.dirname(path) or "."
        of_model = parent if os.path.isfile(os.path.join(parent, CONFIG)) else "of a model"
        raise ValueError(
            f"path: expected a folder with a {CONFIG}, found a file at {path}; set the folder {of_model}"
        )
    elif is_hub_name(path):
        near = _near(path)
        if (
            near and "/" not in path
        ):  # nearly all names on the hub have an owner, so this is a mistake in a path
            raise ValueError(f"path: found no folder {path}; did you mean {near}?")
        try:
            file = fetch_file(path, CONFIG, "path")
        except UserError as error:
            raise ValueError(f"{error}; did you mean {near}?" if near else str(error)) from None
    else:
        near = _near(path)
        hint = f"; did you mean {near}?" if near else ""
        raise ValueError(
            f"path: expected a folder with a {CONFIG}, or a name on the hub such as owner/model, found {path!r}, which "
            f"is neither{hint}"
        )
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"path: cannot read {file}: {type(error).__name__}: {reason}; copy or fetch the file again"
        ) from None
    if not isinstance(content, dict):
        raise ValueError(f"path: expected a JSON object in {file}, found {type(content).__name__}")
    return file, content


def _near(path: str) -> str | None:
    """Return the folder of a model here with nearly that path, beside where the path would be."""
    parent, name = os.path.split(path)
    try:
        there = os.listdir(parent or ".")
    except OSError:
        return None
    for each in difflib.get_close_matches(name, there, cutoff=0.75):
        if os.path.isfile(os.path.join(parent, each, CONFIG)):
            return os.path.join(parent, each)
    return None


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) and "vocab_size" not in config else config


def check_config(path: str, config: Mapping[str, Any]) -> None:
    """Refuse what is certainly no causal language model for text.

    Raises:
        ValueError: the message begins with the key.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise ValueError(f"path: expected a model_type in the {CONFIG} of {path}, found {kind!r}")
    if config.get("is_encoder_decoder"):
        raise ValueError(
            f"path: expected a causal language model, found {path}, an encoder with a decoder ({kind}); set another "
            "model"
        )
    names = config.get("architectures") or []
    if names and not any(str(name).endswith(_CAUSAL) for name in names):
        raise ValueError(
            f"path: expected a causal language model (an architecture ...ForCausalLM or ...LMHeadModel), found "
            f"{', '.join(map(str, names))} in the {CONFIG} of {path}; set another model"
        )
    other = next((key for key in ("vision_config", "audio_config") if config.get(key)), None)
    if other is not None:
        raise ValueError(
            f"path: expected a model of text alone, found {path} with a {other} ({kind}); set the text model"
        )
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise ValueError(
            f"path: expected weights in floating point, found {path} with quantised weights (method {method}); set a "
            "model that is not quantised, or a copy in bfloat16: docs/models.md, Quantised weights"
        )
    for values in (config, _text_config(config)):
        try:
            rope_tables(values)
        except ValueError as error:
            raise ValueError(f"path: the {CONFIG} of {path}: {error}") from None
    vocabulary = _text_config(config).get("vocab_size")
    if type(vocabulary) is not int or vocabulary < 1:
        raise ValueError(f"path: expected a vocab_size in the {CONFIG} of {path}, found {vocabulary!r}")


Argument = bool | int | float | str


@dataclass(frozen=True)
class PythonShape:
    """A user's own model: the function that builds it, and the arguments of this function.

    Attributes:
        target: import path of the function, ``package.module:function``.
        arguments: keyword arguments of the function.
        vocab_size: tokens of the vocabulary. The function gets it if it has an argument of this name.
        max_seq_len: the longest sequence in tokens, or None. The function gets it as `vocab_size`.
        blocks: the name of the list of the model's layers; empty: the model's `blocks()`, or they are found.
    """

    target: str = ""
    arguments: Mapping[str, Argument] = field(default_factory=dict, hash=False)
    vocab_size: int = 256
    max_seq_len: int | None = None
    blocks: str = ""

    def __post_init__(self) -> None:
        if not self.target:
            raise ValueError(
                "target: expected the import path of a function that builds the model, such as my_model:build, found "
                "none"
            )
        module, _, name = self.target.partition(":")
        if not all(part.isidentifier() for part in [*module.split("."), *name.split(".")]):
            raise ValueError(
                f"target: expected an import path package.module:function, found {self.target!r}"
                + ("; an import path has no .py" if ".py" in self.target or "/" in self.target else "")
                + ("" if ":" in self.target else f"; name the function after a colon, as in {module}:build")
            )
        own = {"vocab_size", "max_seq_len"} & self.arguments.keys()
        if own:
            raise ValueError(
                f"arguments: expected no {' and '.join(sorted(own))} here; set the key model.{min(own)}, which the "
                "function gets as an argument"
            )
