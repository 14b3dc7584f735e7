"""The key of a program in the cache of plans: a text of all that the program of a configuration follows from.

Nothing here imports torch, so that a plan from the cache is printed at once.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import shardwright
from shardwright.engine.extend import layouts, memories, strategies
from shardwright.train.config.catalog.kinds import kinds
from shardwright.train.config.catalog.optimizers import optimizers
from shardwright.train.config.schema import Config

PACKAGES = ("torch", "transformers", "torchao")
#: Sections that no step of a plan depends on.
_APART = {"run", "checkpoint", "log", "profile"}


def cache_key(config: Config, ranks: int, kind: str) -> str | None:
    """Return the key of the program on `ranks` ranks. None: it follows from code or files of the user, which may
    change."""
    parallel = config.parallel
    chosen = (
        (strategies, parallel.strategy),
        (memories, parallel.memory),
        (layouts, parallel.layout),
        (optimizers, config.optimizer.name),
        (kinds, config.model.kind),
    )
    if any(isinstance(name, str) and registry.origin(name) != "built in" for registry, name in chosen):
        return None
    if config.model.facts.is_users_code or config.finetune.adapters:
        return None
    if config.run.hooks and config.validation.every:  # their metrics need logits
        return None
    values = {
        "config": config.resolved().model_dump(mode="json", exclude=_APART),
        "model": dict(getattr(config.model.shape(), "config", {})),  # of transformers: a file of the user
        "saves": [config.checkpoint.asynchronous, config.checkpoint.every],
        "ranks": ranks,
        "kind": kind,
        "versions": [sys.version_info[:2], *map(_version, PACKAGES)],
        "code": _code(),
    }
    return json.dumps(values, sort_keys=True)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _code() -> list[object]:
    """Return the version of this package, and of each of its files the size and the time, which a change in place
    changes."""
    root = Path(shardwright.__file__).parent
    files = sorted(Path(folder, name) for folder, _, names in os.walk(root) for name in names)
    stats = [(file, file.stat()) for file in files if file.suffix == ".py"]
    return [
        shardwright.__version__,
        [[str(file.relative_to(root)), s.st_size, s.st_mtime_ns] for file, s in stats],
    ]
