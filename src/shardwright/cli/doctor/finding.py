"""A finding: what a measurement found and what to do about it, for people and for programs. Nothing here measures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Finding:
    """One line of the report, and a second one where something is wrong or slow.

    Attributes:
        subject: the subject of the line, such as "gloo".
        found: the facts, as one line.
        advice: what to do, as one line. Empty: nothing.
        figures: the facts as numbers: bytes and seconds.
    """

    subject: str
    found: str
    advice: str = ""
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def lines(self) -> list[tuple[str, str]]:
        """The subject and the facts, and under them the advice."""
        return [(self.subject, self.found)] + ([("", f"-> {self.advice}")] if self.advice else [])

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def unmeasured(subject: str, reason: str, advice: str = "") -> Finding:
    """A finding for what could not be measured."""
    return Finding(subject, f"not measured: {reason}", advice)


def joined(advice: Sequence[str]) -> str:
    """Several pieces of advice as one line."""
    return "; ".join(advice)
