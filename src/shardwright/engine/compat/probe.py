"""Looks up names of torch, for the other files of this room.

If a version of torch lacks a name, the error says which, when the package is imported and not later inside a step. No
name of torch itself is here.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch


def probe(owner: Any, *names: str) -> Any:
    """Return the attribute ``names[0]`` of ``owner``, or of that the next one, and so on.

    Raises:
        ImportError: this torch lacks one of them. The error names it and the supported versions.
    """
    for name in names:
        if not hasattr(owner, name):
            raise ImportError(
                f"shardwright supports torch >=2.11,<2.16; this is torch {torch.__version__}, which has no "
                f"{getattr(owner, '__name__', type(owner).__name__)}.{name}. Install a supported torch."
            )
        owner = getattr(owner, name)
    return owner


class _WhenImported(MetaPathFinder):
    """Finds a module as Python would, and calls a function with it as soon as it is executed."""

    def __init__(self, name: str, function: Callable[[ModuleType], None]) -> None:
        self._name, self._function = name, function
        self._asking_others = False

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self._name or self._asking_others:
            return None
        self._asking_others = True
        try:
            spec = find_spec(name)
        finally:
            self._asking_others = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_call(module: ModuleType) -> None:
                execute(module)
                self._function(module)

            spec.loader.exec_module = execute_and_call  # type: ignore[method-assign]
        return spec


def when_imported(name: str, function: Callable[[ModuleType], None]) -> None:
    """Call a function with a module, now or after its import."""
    if name in sys.modules:
        function(importlib.import_module(name))  # waits while another thread imports it
    else:
        sys.meta_path.insert(0, _WhenImported(name, function))
