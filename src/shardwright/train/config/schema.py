"""CONFIG.toml as a whole: sections whose values go together.

`load` reads files, and `mistakes` words the errors. Other rooms act on the values. Nothing here imports torch.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationInfo, model_validator

from shardwright.train.config.conflicts.configurations import BETWEEN_SECTIONS, WITHIN_SECTIONS
from shardwright.train.config.conflicts.table import ConflictError, conflict_in
from shardwright.train.config.sections.all import Sections


class Config(Sections):
    """A whole training job: what CONFIG.toml holds."""

    @model_validator(mode="after")
    def _sections_fit(self, info: ValidationInfo) -> Config:
        if error := conflict_in(WITHIN_SECTIONS, self):
            raise error
        start = info.context or {}
        dims = self.parallel.dims_near(start.get("ranks", 1))
        problem = self.train.batch_problem(
            dims.data, tensor=dims.sharing_data, resumes=start.get("resumes", False)
        )
        if problem:
            raise ConflictError(problem, {"train", "parallel"})
        if error := conflict_in(BETWEEN_SECTIONS, self):
            raise error
        return self

    def resolved(self) -> Config:
        """Return the same job, independent of presets and of the current folder: what a run keeps of its
        configuration."""
        return self.model_copy(
            update={
                "model": self.model.resolved(),
                "data": self.data.resolved(),
                "validation": self.validation.resolved(),
            }
        )

    def to_toml(self) -> str:
        """Return the configuration as a TOML file that loads back equal. Keys left to the preset are left out."""
        tables = []
        for name, section in self:
            lines = [
                f"{key} = {toml_value(value)}"
                for key, value in section.model_dump(exclude_none=True).items()
                if not (name == "train" and key == "steps" and self.train.epochs)  # they follow from the data
            ]
            tables.append("\n".join([f"[{name}]", *lines]))
        return "\n\n".join(tables) + "\n"


def toml_value(value: object) -> str:
    """Return a value as TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        # JSON's strings are TOML's basic strings, but for DEL, which TOML wants escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        items = ", ".join(f"{key} = {toml_value(item)}" for key, item in value.items())
        return f"{{ {items} }}" if items else "{}"
    if isinstance(value, Sequence):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    raise TypeError(f"expected a value TOML can hold, found {value!r}")


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested tables, each with its dotted key."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def value_of(text: str, takes_text: bool) -> Any:
    """Return the value of a text in TOML. A text that is no TOML value is a string."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    value = parsed["value"]
    if len(parsed) > 1 or (takes_text and not isinstance(value, str | list)):
        return text  # A text key takes what was typed even where it reads as a number or a date.
    return value
