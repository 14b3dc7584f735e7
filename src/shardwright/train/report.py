"""Pictures of runs, drawn from their metrics, and the figures that sum a run up.

Reads records and writes PNG files; nothing here trains, compares configurations or prints.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # matplotlib takes half a second to import; only the one process that draws should pay
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from shardwright.memory import Plan

Records = Sequence[Mapping[str, Any]]

WARM_UP = 3
"""Steps at the start that speeds leave out: first allocations, lazily built kernels, caches."""

MARKERS = ("o", "+", "x", "1", "2")
"""Points of runs that differ equally from the first lie on one another; these stay apart."""


def results(records: Records) -> dict[str, Any]:
    """First and last loss, last validation loss, median speed of a run's records."""
    validations = [record["validation_loss"] for record in records if record["validation_loss"] is not None]
    timed = records[WARM_UP:] or records
    return {
        "first_loss": records[0]["loss"],
        "train_loss": records[-1]["loss"],
        "validation_loss": validations[-1] if validations else None,
        "tokens_per_second": statistics.median(record["tokens_per_second"] for record in timed),
        "step_seconds": statistics.median(record["seconds"] for record in timed),
    }


def memory_plan(plan: Plan, path: Path, name: str) -> None:
    """Where each slab of a step lies: time across, address up, one colour for each kind."""
    from matplotlib.patches import Patch, Rectangle

    figure = _figure(10, 5)
    axes = figure.add_subplot()
    kinds = sorted({item.kind for item in plan.items})
    colours = {kind: f"C{i}" for i, kind in enumerate(kinds)}
    scale, unit = (2**20, "MiB") if plan.nbytes >= 2**20 else (2**10, "KiB")
    for item, offset in zip(plan.items, plan.offsets, strict=True):
        for start, stop in item.spans:
            place, size = (start, offset / scale), (stop - start, item.nbytes / scale)
            axes.add_patch(
                Rectangle(place, *size, facecolor=colours[item.kind], edgecolor="white", linewidth=0.3)
            )
    axes.set_xlim(0, max((stop for item in plan.items for _, stop in item.spans), default=1))
    axes.set_ylim(0, 1.15 * max(plan.nbytes, 1) / scale)
    axes.axhline(plan.lower_bound / scale, color="black", lw=0.8, ls="--", label="leased at once, at most")
    _dress(
        axes,
        f"Memory plan of {name}: {plan.nbytes / scale:,.1f} {unit}",
        "leases and releases of a step, in their order",
        f"address in the block ({unit})",
    )
    handles = [Patch(color=colours[kind], label=kind) for kind in kinds]
    axes.legend(handles=[*handles, *axes.get_lines()], loc="upper center", ncols=len(kinds) + 1)
    figure.savefig(path, dpi=120)


def loss_curve(records: Records, path: Path, name: str) -> None:
    """Training and validation loss over the steps of one run."""
    figure = _figure(8, 4.5)
    axes = figure.add_subplot()
    axes.plot([r["step"] for r in records], [r["loss"] for r in records], lw=1, label="training")
    validated = [r for r in records if r["validation_loss"] is not None]
    if validated:
        steps, losses = [r["step"] for r in validated], [r["validation_loss"] for r in validated]
        axes.plot(steps, losses, "o-", ms=4, label="validation")
    _dress(axes, f"Loss of {name}", "optimizer step", "cross-entropy per token (nats)")
    axes.legend()
    figure.savefig(path, dpi=120)


@dataclass(frozen=True)
class Curve:
    """What the picture of a comparison shows of one run."""

    label: str
    records: Records
    difference: Mapping[int, float]
    """Relative difference of its loss to the first run's, by step; empty for the first run."""
    tokens_per_second: float
    peak_memory: int


def comparison(curves: Sequence[Curve], path: Path) -> None:
    """Losses over one another, their differences to the first run, and bars for speed and memory."""
    figure = _figure(12, 8)
    losses, differences, speeds, memories = figure.subplots(2, 2).flat
    colors: list[Any] = [f"C{number}" for number in range(len(curves))]
    if len(curves) > 10:  # after which they begin again
        from matplotlib import colormaps

        colors = [colormaps["turbo"](number / (len(curves) - 1)) for number in range(len(curves))]
    crowded = len(curves) > 4  # legends would hide what they tell
    for number, (curve, color) in enumerate(zip(curves, colors, strict=True)):
        steps = [r["step"] for r in curve.records]
        # Curves that agree hide one another: dashes let the ones below show through.
        dash = "-" if number == 0 else (0, (4, 2 + 2 * number))
        losses.plot(
            steps, [r["loss"] for r in curve.records], ls=dash, lw=1.5, color=color, label=curve.label
        )
        # A logarithm has no place for exact equality; it is said in the legend.
        apart = {step: value for step, value in curve.difference.items() if value > 0}
        if number:
            label = curve.label if apart else f"{curve.label} (equal at every step)"
            marker = MARKERS[number % len(MARKERS)]
            differences.plot(list(apart), list(apart.values()), marker, ms=5, color=color, label=label)
    _dress(losses, "Training loss", "optimizer step", "cross-entropy per token (nats)")
    _dress(differences, f"Loss relative to {curves[0].label}", "optimizer step", "relative difference")
    differences.set_yscale("log")
    # Differences of one size would else fill the axis with noise; runs that are all equal leave it empty.
    apart_at_all = any(value > 0 for curve in curves for value in curve.difference.values())
    low, high = differences.get_ylim() if apart_at_all else (1e-8, 1e-6)
    differences.set_ylim(low / 3, high * 3)
    differences.set_xlim(losses.get_xlim())
    if crowded:
        handles = [losses.get_lines()[0], *differences.get_lines()]
        figure.legend(handles=handles, loc="outside lower center", ncols=3)
    else:
        losses.legend()
        differences.legend()
    labels = [curve.label for curve in curves]
    _bars(speeds, "Speed", "tokens per second, median", labels, [c.tokens_per_second for c in curves], colors)
    _bars(
        memories,
        "Peak memory of the fullest rank",
        "GiB",
        labels,
        [c.peak_memory / 2**30 for c in curves],
        colors,
    )
    figure.savefig(path, dpi=110)


def _bars(
    axes: Axes, title: str, unit: str, labels: Sequence[str], values: Sequence[float], colors: Sequence[Any]
) -> None:
    bars = axes.barh(range(len(values)), values, color=colors)
    axes.bar_label(bars, [f"{value:,.0f}" if value >= 100 else f"{value:.2f}" for value in values], padding=3)
    axes.set_yticks(range(len(values)), labels)
    axes.invert_yaxis()
    axes.set_title(title)
    axes.set_xlabel(unit)
    axes.margins(x=0.2)


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _dress(axes: Axes, title: str, x: str, y: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))  # there is no step 2.5
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
