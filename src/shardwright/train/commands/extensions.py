"""`shardwright extensions`: every registered value with its summary, where it comes from, and its options.

Values of installed packages are imported for this. A value that cannot be imported is listed with the reason.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

from shardwright.engine.extend import NEEDED, Registry, layouts, memories, stores, strategies
from shardwright.train.config.catalog.hooks import hooks
from shardwright.train.config.catalog.kinds import Kind, kinds
from shardwright.train.config.catalog.losses import losses
from shardwright.train.config.catalog.optimizers import NamedOptimizer, optimizers
from shardwright.train.config.catalog.sinks import sinks
from shardwright.train.config.schema import toml_value
from shardwright.train.errors import UserError

REGISTRIES: dict[str, tuple[Registry[Any], str]] = {
    "strategies": (strategies, "parallel.strategy"),
    "layouts": (layouts, "parallel.layout"),
    "memories": (memories, "parallel.memory"),
    "optimizers": (optimizers, "optimizer.name"),
    "models": (kinds, "model.kind"),
    "losses": (losses, "train.loss"),
    "sinks": (sinks, "log.sinks"),
    "stores": (stores, "checkpoint.folder"),
    "hooks": (hooks, "run.hooks"),
}
"""By the word of the command line: the registry, and the key of the configuration that takes its names."""


def listing(names: Sequence[str], width: int) -> str:
    """Return the values of these registries or at these import paths; without names all registered values.

    Raises UserError for a name that is neither.
    """
    blocks = []
    for name in names or REGISTRIES:
        if name in REGISTRIES:
            registry, key = REGISTRIES[name]
            blocks.append([f"{name}, for {key}:", *_lines_of(registry, registry.names(), width)])
        elif ":" in name:
            registry, key = _registry_at(name)
            blocks.append([f"{registry.what}, for {key}:", *_lines_of(registry, [name], width)])
        else:
            raise UserError(
                f"extensions: expected {', '.join(REGISTRIES)} or an import path (package.module:NAME), found {name!r}"
            )
    return "\n\n".join("\n".join(block) for block in blocks)


def _registry_at(path: str) -> tuple[Registry[Any], str]:
    """Return the registry whose kind of value is at an import path."""
    problems = {}
    for name, (registry, key) in REGISTRIES.items():
        try:
            registry.get(path)
            return registry, key
        except ValueError as error:
            problems[name] = str(error)
    other = next((problem for problem in problems.values() if ": expected a " not in problem), None)
    if f" without {', '.join(NEEDED)};" not in problems["stores"]:
        other = problems["stores"]  # the value has methods of a file system
    if other is None:
        classes = ", ".join(each.kind.__name__ for each, _ in REGISTRIES.values() if each is not stores)
        found = problems["strategies"].rpartition("found ")[2]
        other = f"expected a value of one of {classes}, or a file system of fsspec, at {path}, found {found}"
    raise UserError(f"extensions: {other}")


def _lines_of(registry: Registry[Any], names: Sequence[str], width: int) -> Iterator[str]:
    for name in names:
        try:
            value = registry.get(name)
            yield f"  {name}" if registry.origin(name) == name else f"  {name} ({registry.origin(name)})"
            texts = [value.summary, *_options_of(value)]
        except ValueError as error:
            yield f"  {name} ({registry.origin(name)})"
            texts = [f"cannot be used: {' '.join(str(error).split())}"]
        for text in filter(None, texts):
            yield from textwrap.wrap(
                text, width, initial_indent=" " * 6, subsequent_indent=" " * 6, break_on_hyphens=False
            )


def _options_of(value: Any) -> Iterator[str]:
    """Yield lines that list a value's options or keys, with the defaults."""
    if isinstance(value, NamedOptimizer) and value.options:
        options = ", ".join(f"{key} = {toml_value(default)}" for key, default in value.options.items())
        yield f"Options, keys of [optimizer.options]: {options}"
    if isinstance(value, Kind):
        presets = f"Presets: {', '.join(value.presets)}. " if value.presets else ""
        yield f"{presets}Keys of [model]: {', '.join(f.name for f in fields(value.shape))}"
