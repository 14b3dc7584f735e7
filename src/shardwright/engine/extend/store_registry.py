"""Classes of users for file systems in which checkpoints are: imported and checked. Nothing here reads files."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import Any

from shardwright.engine.extend.registry import Registry, call

NEEDED = (
    "_strip_protocol", "info", "exists", "ls", "cat_file", "cat_ranges", "pipe_file", "rm_file", "open",
    "invalidate_cache",
)  # fmt: skip
"""The methods of a file system that checkpoints use."""
_ABSTRACT = {"ls": ("ls",), "_open": ("_open", "open"), "_rm": ("_rm", "rm_file", "rm")}
"""Methods that ``fsspec.AbstractFileSystem`` leaves to its subclasses, each with those that may take its place."""


@dataclass(frozen=True)
class NamedStore:
    """A file system by its import path.

    Attributes:
        name: the import path.
        summary: the first line of its docstring.
        kind: its class.
    """

    name: str
    summary: str
    kind: Any

    def make(self) -> Any:
        """The file system. Raises ExtensionError if its class cannot be called without arguments."""
        return call(f"file system {self.name!r}", self.kind)


class StoreRegistry(Registry[NamedStore]):
    """File systems have no names beside their import paths."""

    def _imported(self, name: str, point: EntryPoint) -> NamedStore:
        kind = self._load(name, point)
        is_class = isinstance(kind, type)
        missing = [each for each in NEEDED if not is_class or not callable(getattr(kind, each, None))]
        if missing := missing or _abstract_methods(kind):
            found = f"the class {kind.__name__}" if is_class else f"{kind!r:.50}"
            raise ValueError(
                f"{self.what} {name!r}: expected a file system of fsspec, found {found} without {', '.join(missing)}; "
                "derive it from fsspec.AbstractFileSystem"
            )
        return NamedStore(name, (kind.__doc__ or "").strip().partition("\n")[0], kind)


def _abstract_methods(kind: type) -> list[str]:
    """The methods that a class derived from ``fsspec.AbstractFileSystem`` alone has to define, and does not."""
    from fsspec import AbstractFileSystem

    if any(each.__module__.startswith("fsspec.") for each in kind.__mro__ if each is not AbstractFileSystem):
        return []
    return [
        name
        for name, instead in _ABSTRACT.items()
        if all(getattr(kind, each, None) is getattr(AbstractFileSystem, each) for each in instead)
    ]


stores = StoreRegistry(
    "file system",
    "stores",
    NamedStore,
    [
        NamedStore(
            "URL", "A place that fsspec knows, such as s3://bucket/runs, gs://, sftp:// and memory://.", None
        )
    ],
)
