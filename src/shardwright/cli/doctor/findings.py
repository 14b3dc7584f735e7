"""A finding, which is what a measurement found and what to do about it, and the words that reports are made of.

Nothing here measures or looks at the machine.
"""

from __future__ import annotations

import os
import platform
import re
from dataclasses import asdict, dataclass, field
from typing import Any

GIB = 2**30


@dataclass(frozen=True)
class Finding:
    """One line of the report, and a second one where something is wrong or slow.

    Attributes:
        subject: what was looked at, such as "gloo"; the first word of the line.
        found: the facts, as one line.
        advice: what to do, as one line. Empty if nothing is wrong.
        figures: the facts as numbers, in bytes and seconds.
    """

    subject: str
    found: str
    advice: str = ""
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def lines(self) -> list[tuple[str, str]]:
        """The subject with the facts, and below them the advice, if there is any."""
        return [(self.subject, self.found)] + ([("", f"-> {self.advice}")] if self.advice else [])

    def as_json(self) -> dict[str, Any]:
        """Return the finding as what JSON can hold."""
        return asdict(self)


def unmeasured(subject: str, reason: str, advice: str = "") -> Finding:
    """Return the finding for a subject that could not be measured."""
    return Finding(subject, f"not measured: {reason}", advice)


def aligned(rows: list[tuple[str, str]]) -> str:
    """Return rows of a name and a text as lines whose texts begin in one column."""
    width = max(len(name) for name, _ in rows) + 2
    return "\n".join(f"{name:{width}}{text}" for name, text in rows)


def error_text(error: Exception) -> str:
    """Return the type and the message of an error as one line without names."""
    return without_names(" ".join(f"{type(error).__name__}: {error}".split()))


def without_names(text: str) -> str:
    """Return the text without the host's name and the user's folder, because users post reports in public."""
    home, host = os.path.expanduser("~"), platform.node()
    if len(home) > 1:
        text = re.sub(rf"{re.escape(home)}(?![\w.-])", "~", text)
    return re.sub(rf"\b{re.escape(host)}\b", "(host)", text) if host else text


def size(nbytes: int | None) -> str:
    """Return a number of bytes as KiB, MiB or GiB."""
    if nbytes is None:
        return "unknown"
    if 0 < nbytes < 2**20:
        return f"{nbytes / 2**10:.0f} KiB"
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= GIB else f"{nbytes / 2**20:.0f} MiB"


def duration(seconds: float) -> str:
    """Return a short time such as 0.12 ms, 350 ms or 2.5 s."""
    if seconds < 0.01:
        return f"{1e3 * seconds:.2g} ms"
    return f"{1e3 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def rate(bytes_per_second: float) -> str:
    """Return a speed as GB/s or MB/s."""
    if bytes_per_second >= 1e9:
        return f"{bytes_per_second / 1e9:.1f} GB/s"
    return f"{bytes_per_second / 1e6:.{0 if bytes_per_second >= 1e7 else 1}f} MB/s"
