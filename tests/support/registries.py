"""Registries of extensions, whose values tests add and forget."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from shardwright.extend import Registry


def forget(registry: Registry[Any], name: str) -> None:
    """Remove a value that was added."""
    del registry._values[name]


@contextmanager
def forgotten_afterwards(registries: Iterable[Registry[Any]]) -> Iterator[None]:
    """Let registries forget at the end of the context what is added inside."""
    known = [(registry, dict(registry._values)) for registry in registries]
    try:
        yield
    finally:
        for registry, values in known:
            registry._values.clear()
            registry._values.update(values)
