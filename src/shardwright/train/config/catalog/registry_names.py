"""Keys of the configuration whose values are names of a registry, or import paths. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from shardwright.engine.extend import Registry

#: Types of errors, whose contexts have the ``reason`` and, of a key below the section, the ``key``.
WRONG_NAME, UNKNOWN_KEY = "wrong_name", "unknown_key"


def summaries(registry: Registry[Any]) -> str:
    """Summaries of the values that this process knows, for the description of a key. Imports nothing."""
    return " ".join(f"{value.name}: {value.summary}" for value in registry.known())


@dataclass(frozen=True)
class OneOf:
    """As metadata of ``str``: a name of this registry, or an import path."""

    registry: Registry[Any]

    def __get_pydantic_core_schema__(self, source: type[Any], handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def _check(self, name: str) -> str:
        try:
            self.registry.get(name)
        except ValueError as error:
            reason = str(error).removeprefix(f"{self.registry.what}: ")
            raise PydanticCustomError(WRONG_NAME, "{reason}", {"reason": reason}) from None
        return name


def registry_of(annotation: Any, metadata: Sequence[Any] = ()) -> Registry[Any] | None:
    """Return the registry whose names an annotation takes, also in a list or beside other types."""
    for each in (*metadata, *getattr(annotation, "__metadata__", ())):
        if isinstance(each, OneOf):
            return each.registry
    return next((inner for arg in get_args(annotation) if (inner := registry_of(arg)) is not None), None)
