"""Doors of rooms: packages that list what others may use, and import it when it is first used."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from typing import Any

_IMPORT = re.compile(r"^    from ([\w.]+) import (?:\(([^)]*)\)|(.*))$", re.MULTILINE)


def door(spec: ModuleSpec) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__all__``, ``__getattr__`` and ``__dir__`` for a package whose names are imported at their first use.

    A package that ends with this call is the door of its room: other rooms import from it, and never from a module
    behind it. It lists each name once, as an import under ``if TYPE_CHECKING:``, which type checkers and editors follow
    and which this function reads from the package's source. So a program pays only for the modules that it uses: the
    command line answers without torch, and the launcher starts without the engine.

    A name that is imported as itself, ``plan as plan``, is public: it is in ``__all__``, and users may rely on it. The
    others are for rooms of this package alone.

    Args:
        spec: ``__spec__`` of the package.
    """
    package = spec.name
    source = spec.loader.get_source(package)  # type: ignore[union-attr]
    homes: dict[str, tuple[str, str]] = {}
    public: list[str] = []
    for module, several, one in _IMPORT.findall(source):
        for entry in filter(None, map(str.strip, (several or one).split(","))):
            original, _, name = entry.partition(" as ")
            homes[name or original] = module, original
            if name:
                public.append(name)

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, original = homes[name]
        home = importlib.import_module(module) if module != package else None
        if home is None or not hasattr(home, original):  # a module of the package
            value = importlib.import_module(f"{module}.{original}")
        else:
            value = getattr(home, original)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return sorted(public), get, names
