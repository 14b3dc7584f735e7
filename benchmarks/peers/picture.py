"""The results as one picture: a row for each model, time beside memory."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.peers.tables import MIB


def draw(results: Mapping[str, Any], path: Path) -> bool:
    """Whether it was drawn: matplotlib is not always there."""
    if importlib.util.find_spec("matplotlib") is None or not results["shapes"]:
        return False
    from matplotlib.figure import Figure

    count = len(results["shapes"])
    figure = Figure(figsize=(13, 4.2 * count), layout="constrained")
    for row, shape in enumerate(results["shapes"].values()):
        time_axes, memory_axes = (figure.add_subplot(count, 2, 2 * row + i) for i in (1, 2))
        if "time" in results["parts"]:
            _times(time_axes, shape["contenders"])
        if "memory" in results["parts"]:
            _memory(memory_axes, shape["contenders"])
        time_axes.set_title(shape["title"])
    figure.savefig(path, dpi=110)
    return True


def _colours(names: list[str]) -> list[str]:
    return ["tab:orange" if name.startswith("Shardwright") else "tab:blue" for name in names]


def _times(axes: Any, contenders: Mapping[str, Any]) -> None:
    measured = {name: each["ratio"] for name, each in contenders.items() if "ratio" in each}
    names = list(measured)[::-1]
    middle = [measured[name]["median"] for name in names]
    spread = [
        [m - measured[name]["least"] for m, name in zip(middle, names, strict=True)],
        [measured[name]["largest"] - m for m, name in zip(middle, names, strict=True)],
    ]
    axes.barh(names, middle, xerr=spread, color=_colours(names))
    axes.axvline(1, color="grey", linewidth=0.8)
    axes.set_xlabel("time of a step, FSDP2 = 1; lines: all rounds")


def _memory(axes: Any, contenders: Mapping[str, Any]) -> None:
    measured = {name: each["memory"] for name, each in contenders.items() if "memory" in each}
    names = list(measured)[::-1]
    bars = axes.barh(names, [measured[name]["peak"] / MIB for name in names], color=_colours(names))
    axes.plot([measured[name]["least_peak"] / MIB for name in names], names, "k|", markersize=12)
    axes.set_xlim(
        0, 1.5 * max(each["least_peak"] for each in measured.values()) / MIB
    )  # some need twenty times as much
    axes.bar_label(bars, fmt="%.0f", label_type="center", color="white")
    axes.set_xlabel("MiB a rank, most in a step; marks: by arithmetic")
