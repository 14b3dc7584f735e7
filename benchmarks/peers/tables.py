"""Figures that are computed from measured numbers, and their tables. Pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

MIB = 2**20


def rank_maximum(times: Sequence[Sequence[float]]) -> list[float]:
    """The time of the slowest rank in each step. ``times`` is [rank][step]."""
    return [max(step) for step in zip(*times, strict=True)]


def ratios(rounds: Sequence[Sequence[float]], base: Sequence[Sequence[float]]) -> dict[str, float]:
    """Median, least and largest over the rounds of this contender's median over the base's of the same round."""
    each = [statistics.median(a) / statistics.median(b) for a, b in zip(rounds, base, strict=True)]
    return {"median": statistics.median(each), "least": min(each), "largest": max(each)}


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown, padded so that it reads well as it is. The first column is text."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = [
            c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))
        ]
        return "| " + " | ".join(padded) + " |"

    rule = (
        "|" + "|".join("-" * (w + 2) if i == 0 else "-" * (w + 1) + ":" for i, w in enumerate(widths)) + "|"
    )
    return "\n".join([line(header), rule, *map(line, rows)])


def _ratio(found: Mapping[str, float]) -> list[str]:
    return [f"{found['median']:.2f}", f"{found['least']:.2f} .. {found['largest']:.2f}"]


def time_table(contenders: Mapping[str, Any]) -> str:
    rows = []
    for name, found in contenders.items():
        off = f"{found['off']:.0e}" if "off" in found else "-"
        if "ratio" in found:
            rows.append([name, f"{found['ms']:.1f}", *_ratio(found["ratio"]), off])
        else:
            rows.append([name, "-", "-", "-", off])
    return table(["time of a step", "ms", "of FSDP2", "over the rounds", "off"], rows)


def memory_table(contenders: Mapping[str, Any]) -> str:
    rows = []
    for name, found in contenders.items():
        memory = found.get("memory")
        if memory is None:
            rows.append([name, *"------"])
            continue
        cells = [name]
        for what in ("rest", "peak"):
            nbytes, least = memory[what], memory[f"least_{what}"]
            cells += [f"{nbytes / MIB:.1f}", f"{least / MIB:.1f}", f"{nbytes / least:.2f}"]
        rows.append(cells)
    header = [
        "MiB a rank",
        "between steps",
        "arithmetic",
        "ratio",
        "at most in a step",
        "arithmetic",
        "ratio",
    ]
    return table(header, rows)


def host_table(contenders: Mapping[str, Any]) -> str:
    rows = []
    for name, found in contenders.items():
        if "ratio" in found:
            rows.append([name, f"{found['us']:.0f}", f"{found['ratio']:.2f}"])
        else:
            rows.append([name, f"{found['us']:.0f}" if "us" in found else "-", "-"])
    return table(["host time of a unit", "us", "of FSDP2"], rows)


def reasons(contenders: Mapping[str, Any]) -> list[str]:
    return [f"{name}: {found['reason']}" for name, found in contenders.items() if "reason" in found]
