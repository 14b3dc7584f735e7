"""The history of a fault campaign: a file of JSON lines that ranks and the campaign append to.

Each line is one ``write`` to a file that is open for appending, so a killed process leaves whole lines.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_write = os.write  #: a campaign counts the calls of os.write, and these are its own


@dataclass(frozen=True)
class Place:
    """The attempt and the run that write a line."""

    run: str
    attempt: int


class History:
    """The end of a history file, for one process."""

    def __init__(self, path: Path, place: Place, rank: int | None = None) -> None:
        self.path, self.place, self.rank = path, place, rank
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def add(self, event: str, **facts: Any) -> None:
        who = {} if self.rank is None else {"rank": self.rank}
        line = {"event": event, "run": self.place.run, "attempt": self.place.attempt, **who, **facts}
        _write(self._file, json.dumps(line).encode() + b"\n")


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a history file."""
    with open(path, encoding="utf-8") as stream:
        for line in stream:
            yield json.loads(line)
