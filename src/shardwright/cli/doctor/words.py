"""Words that several files of this room need: sizes, times, errors, and texts without names.

Nothing here looks at the machine.
"""

from __future__ import annotations

import os
import platform
import re

GIB = 2**30


def error_text(error: Exception) -> str:
    return without_names(" ".join(f"{type(error).__name__}: {error}".split()))


def without_names(text: str) -> str:
    """The text without the host's name and the user's folder: reports are public."""
    home, host = os.path.expanduser("~"), platform.node()
    if len(home) > 1:
        text = re.sub(rf"{re.escape(home)}(?![\w.-])", "~", text)
    return re.sub(rf"\b{re.escape(host)}\b", "(host)", text) if host else text


def rows(name: str, values: list[str]) -> list[tuple[str, str]]:
    return [(name if index == 0 else "", value) for index, value in enumerate(values)]


def size(nbytes: int | None) -> str:
    if nbytes is None:
        return "unknown"
    if 0 < nbytes < 2**20:
        return f"{nbytes / 2**10:.0f} KiB"
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= GIB else f"{nbytes / 2**20:.0f} MiB"


def duration(seconds: float) -> str:
    """A short time: 0.12 ms, 350 ms, 2.5 s."""
    if seconds < 0.01:
        return f"{1e3 * seconds:.2g} ms"
    return f"{1e3 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def rate(bytes_per_second: float) -> str:
    """Bytes per second, as GB/s or MB/s."""
    if bytes_per_second >= 1e9:
        return f"{bytes_per_second / 1e9:.1f} GB/s"
    return (
        f"{bytes_per_second / 1e6:.0f} MB/s"
        if bytes_per_second >= 1e7
        else f"{bytes_per_second / 1e6:.1f} MB/s"
    )
