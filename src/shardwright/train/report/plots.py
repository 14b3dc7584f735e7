"""Pictures of runs, drawn from their metrics, and the final figures of a run.

This file reads records and writes PNG files. It never trains, compares configurations or prints.
"""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardwright.train.config.catalog.records import of_sets

if TYPE_CHECKING:  # matplotlib takes half a second to import, so only the process that draws imports it
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Records = Sequence[Mapping[str, Any]]

WARM_UP = 3
"""First steps of a session that do not count for speeds. They allocate, build kernels and fill caches."""

SPEED = (
    "engine", "ranks", "device", "device_name", "threads", "param_dtype", "reduce_dtype", "strategy", "layout",
    "memory",
)  # fmt: skip
"""Facts of a session on which its speed depends."""

DPI = 120
"""Pixels per inch of pictures."""

MARKERS = ("o", "+", "x", "1", "2")
"""Different markers, so that points of several runs stay visible at the same place."""


def timed_steps(records: Records, sessions: Records) -> Records:
    """Return the steps that count for speeds: those after the warm-up of each session that ran as the last session.

    If there are none, the steps of the last session, or else all.
    """
    last = sessions[-1]
    timed: list[Mapping[str, Any]] = []
    for number, session in enumerate(sessions):
        # A resume from an older checkpoint drops the steps after it.
        end = min((later["from_step"] for later in sessions[number + 1 :]), default=math.inf)
        if all(session.get(key) == last.get(key) for key in SPEED):
            begin = session["from_step"] + WARM_UP
            timed += [record for record in records if begin < record["step"] <= end]
    return timed or [record for record in records if record["step"] > last["from_step"]] or records


def results(records: Records, sessions: Records) -> dict[str, Any]:
    """First and last loss, last validation loss, median speed, and the share of time spent waiting for data.

    `sessions` are those of run.json.
    """
    validations = [record["validation_loss"] for record in records if record["validation_loss"] is not None]
    perplexities = [each["perplexity"] for each in records if each.get("perplexity") is not None]
    timed = timed_steps(records, sessions)
    validated = [record["validation_metrics"] for record in records if record.get("validation_metrics")]
    on_sets = [record["validation_losses"] for record in records if record.get("validation_losses")]
    metrics = of_sets(on_sets[-1] if on_sets else {})
    metrics |= {f"validation {name}": value for name, value in (validated[-1] if validated else {}).items()}
    metrics |= records[-1].get("metrics", {})
    return {
        "first_loss": records[0]["loss"],
        "train_loss": records[-1]["loss"],
        "validation_loss": validations[-1] if validations else None,
        **({"perplexity": perplexities[-1]} if perplexities else {}),
        "tokens_per_second": statistics.median(record["tokens_per_second"] for record in timed),
        "step_seconds": statistics.median(record["seconds"] for record in timed),
        "data_share": sum(record["data_seconds"] for record in timed)
        / max(sum(record["seconds"] for record in timed), 1e-9),
        **({"time_shares": shares} if (shares := time_shares(timed)) else {}),
        **({"metrics": metrics} if metrics else {}),
    }


def time_shares(records: Records) -> dict[str, float]:
    """Return the share of each part in the time of these steps. Empty if they have no parts."""
    totals: dict[str, float] = {}
    for record in records:
        for name, seconds in record.get("parts", {}).items():
            totals[name] = totals.get(name, 0.0) + seconds
    whole = sum(totals.values())
    return {name: seconds / whole for name, seconds in totals.items()} if whole else {}


def loss_figure(records: Records, name: str, vocabulary: int, loss: str = "auto") -> Figure:
    """Training and validation loss over the steps of one run, and the loss of `vocabulary` equally likely tokens.

    `loss` is the value of `[train] loss`.
    """
    figure = new_figure(8, 4.5)
    axes = figure.add_subplot()
    steps, losses = [r["step"] for r in records], [r["loss"] for r in records]
    few = "o-" if len(records) < 3 else "-"  # a line through one point is invisible
    axes.plot(steps, losses, few, ms=3, lw=1, label="training: the step's samples, before its update")
    validated = [r for r in records if r["validation_loss"] is not None]
    if validated:
        axes.plot(
            [r["step"] for r in validated], [r["validation_loss"] for r in validated], "s--", ms=5, lw=1,
            label="validation: other text, after the update",
        )  # fmt: skip
    uniform = math.log(vocabulary)
    unit = "cross-entropy per token (nats)" if loss in ("auto", "cross_entropy") else f"loss {loss}"
    is_cross_entropy = loss in ("auto", "cross_entropy")
    if is_cross_entropy and max(losses) > 0.8 * uniform:  # else the line would squeeze the curve
        label = f"ln({vocabulary}) = {uniform:.3f}: all tokens equally likely"
        axes.axhline(uniform, color="black", lw=0.8, ls=":", label=label)
    dress(
        axes,
        f"Loss of {name}",
        "optimizer step",
        unit,
    )
    figure.legend(loc="outside lower center", ncols=2, fontsize=9)
    return figure


@dataclass(frozen=True)
class Curve:
    """The data of one run in the picture of a comparison."""

    name: str
    settings: str
    """The settings in which this run differs from the others, in words; "" if none differ."""
    records: Records
    difference: Mapping[int, float]
    """Relative difference of its loss to the first run's, by step; empty for the first run."""
    tokens_per_second: float
    memory: float
    """Memory in the unit of the picture."""


@dataclass(frozen=True)
class MemoryPanel:
    """The words of the panel with bars for memory."""

    title: str
    unit: str


def comparison_figure(curves: Sequence[Curve], common: str, panel: MemoryPanel) -> Figure:
    """Return the losses of all runs, their differences from the first run, and bars for speed and memory.

    `common` are the settings that all runs share, in words.
    """
    from matplotlib.lines import Line2D

    names, labels = _names_and_labels(curves)
    figure = new_figure(12, 7.7 + 0.2 * sum(1 + label.count("\n") for label in labels))
    losses, differences, speeds, memories = figure.subplots(2, 2).flat
    colors = _colors(len(curves))
    handles = []
    for number, (curve, color, label) in enumerate(zip(curves, colors, labels, strict=True)):
        # Equal curves cover one another. Dashes let the lower curves show.
        dash = "-" if number == 0 else (0, (4, 2 + 2 * number))
        marker = MARKERS[number % len(MARKERS)] if number else ""
        steps = [r["step"] for r in curve.records]
        losses.plot(steps, [r["loss"] for r in curve.records], ls=dash, lw=1.5, color=color)
        apart = {step: value for step, value in curve.difference.items() if value > 0}
        size = 5 if len(apart) < 100 else 3
        differences.plot(list(apart), list(apart.values()), marker, ms=size, color=color)
        handles.append(Line2D([], [], ls=dash, lw=1.5, marker=marker, ms=5, color=color, label=label))
    dress(losses, "Training loss", "optimizer step", "cross-entropy per token (nats)")
    dress(
        differences,
        f"Difference from the loss of {names[0]}",
        "optimizer step",
        "|difference| / loss (log scale)",
    )
    differences.set_xlim(losses.get_xlim())
    _show_equal_runs(differences, names, curves)
    speed = [c.tokens_per_second for c in curves]
    _bars(
        speeds, "Speed of all ranks together", "tokens per second (median of the steps)", names, speed, colors
    )
    _bars(memories, panel.title, panel.unit, names, [c.memory for c in curves], colors)
    figure.legend(handles=handles, loc="outside lower center", fontsize=9, handlelength=5)
    if common:
        figure.suptitle(textwrap.fill(f"Same in all runs: {common}", 130), fontsize=10)
    return figure


def _show_equal_runs(differences: Axes, names: Sequence[str], curves: Sequence[Curve]) -> None:
    """Scale the panel of differences, and write which runs have none: a logarithmic axis cannot show a 0."""
    equal = [name for name, c in zip(names[1:], curves[1:], strict=True) if not any(c.difference.values())]
    text = textwrap.fill("equal at every step: " + ", ".join(equal), 55, break_on_hyphens=False)
    if len(equal) == len(curves) - 1:
        # There is nothing to measure, so there are no ticks, which would look like sizes of differences.
        differences.set_yticks([])
        differences.set_ylabel("")
        differences.text(
            0.5, 0.5, text, transform=differences.transAxes, ha="center", va="center", fontsize=11
        )
        return
    differences.set_yscale("log")
    # Without these limits, differences of one size fill the axis with noise.
    low, high = differences.get_ylim()
    differences.set_ylim(low / 3, high * 30)
    if equal:
        differences.text(
            0.02, 0.97, text, transform=differences.transAxes, va="top", fontsize=9,
            bbox={"facecolor": "white", "edgecolor": "0.8"},
        )  # fmt: skip


LONGEST_NAME = 16
"""Characters of the longest name beside a bar. If a name is longer, runs get numbers, and the legend has both."""


def _names_and_labels(curves: Sequence[Curve]) -> tuple[list[str], list[str]]:
    """Each run's name in the panels, and its line in the legend, with its settings."""
    names = labels = [curve.name for curve in curves]
    if max(map(len, names)) > LONGEST_NAME:
        labels = [f"run {number}, {name}" for number, name in enumerate(names, 1)]
        names = [f"run {number}" for number in range(1, len(curves) + 1)]
    labels = [
        f"{label}: {curve.settings}" if curve.settings else label
        for label, curve in zip(labels, curves, strict=True)
    ]
    return names, [textwrap.fill(label, 150, break_on_hyphens=False) for label in labels]


OKABE_ITO = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Colours that people with any kind of colour vision can distinguish (Okabe and Ito 2008), without the pale yellow."""


def _colors(count: int) -> list[Any]:
    if count <= len(OKABE_ITO):
        return list(OKABE_ITO[:count])
    from matplotlib import colormaps

    return [colormaps["turbo"](number / (count - 1)) for number in range(count)]


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


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of that size in inches. No window opens."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def dress(axes: Axes, title: str, x: str, y: str) -> None:
    """Set title, axis labels and a grid. The x axis has whole numbers."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))  # there is no step 2.5
    axes.set_title(textwrap.fill(title, 80))
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
