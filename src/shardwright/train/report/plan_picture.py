"""The picture of a memory plan: each lease of a step as a block that is named, time across and addresses up.

Draws plans that the engine has made; nothing here measures memory or makes plans.
"""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from shardwright.engine import in_units
from shardwright.train.report.plots import DPI, new_figure

if TYPE_CHECKING:  # matplotlib takes half a second to import; only the one process that draws should pay
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import RendererAgg
    from matplotlib.figure import Figure

    from shardwright.engine.memory import Plan

KINDS = {
    "parameters": ("#9ECAE8", "a unit's full parameters, gathered"),
    "reduction": ("#A6D9A0", "a unit's full gradients, packed to be reduced"),
    "gradients": ("#F7B27A", "this rank's shard of the reduced gradients"),
    "sum": ("#D7B8E8", "this rank's shard, to be added to existing gradients"),
    "outer gather": ("#F2A6B8", "parameters gathered over the outer axis"),
    "cast shard": ("#E8DC7A", "this rank's shard, cast for the gather"),
    "uploaded shard": ("#C9B79C", "this rank's shard, copied from the CPU"),
    "secondary shard": ("#BFBFBF", "parameters that neighbouring ranks keep for backward"),
}
"""Colour and meaning of the kinds of leases. The colours are light, so that black names can be read on them."""

OTHER_KIND = "#E5E5E5"

FONT_SIZES = (8.0, 7.0, 6.0)
"""Font sizes of names on blocks, in points; the largest that fits is taken."""


class LeaseBlock(NamedTuple):
    """One lease: its owner, and its place in ticks and scaled bytes."""

    unit: str
    kind: str
    start: int
    stop: int
    low: float
    height: float


def outside_in_words(deviations: Sequence[tuple[str, str, str, int]]) -> str:
    """Leases outside the plan, by unit, kind, reason and number, for the report and the picture; empty: none."""
    if not deviations:
        return ""
    unit, kind, why, _ = deviations[0]
    number = sum(each[-1] for each in deviations)
    leases = "1 lease" if number == 1 else f"{number:,} leases"
    return f"{leases} outside the plan, from torch's allocator: {kind} of unit {unit!r}, since {why}" + (
        f"; and {len(deviations) - 1} more reasons" if len(deviations) > 1 else ""
    )


def plan_figure(plan: Plan, name: str, memory: str, rank: int, outside: str = "") -> Figure:
    """Return the picture of the plan that `memory` has made on `rank` in the run `name`.

    `outside` is about leases outside the plan, which have no place in the picture.
    """
    from matplotlib.patches import Patch, Rectangle

    figure = new_figure(12, 7.5)
    figure.set_dpi(DPI)
    axes = figure.add_subplot()
    scale, unit = next(
        ((size, unit) for size, unit in ((2**30, "GiB"), (2**20, "MiB")) if plan.nbytes >= size),
        (2**10, "KiB"),
    )
    blocks = [
        LeaseBlock(item.unit, item.kind, start, stop, offset / scale, item.nbytes / scale)
        for item, offset in zip(plan.items, plan.offsets, strict=True)
        for start, stop in item.spans
    ]
    for block in blocks:
        colour = KINDS.get(block.kind, (OTHER_KIND, ""))[0]
        place, size = (block.start, block.low), (block.stop - block.start, block.height)
        axes.add_patch(Rectangle(place, *size, facecolor=colour, edgecolor="0.35", linewidth=0.4))
    axes.set_xlim(0, max((block.stop for block in blocks), default=1))
    axes.set_ylim(0, 1.04 * max(plan.nbytes, 1) / scale)
    axes.axhline(
        plan.lower_bound / scale, color="black", lw=1, ls="--",
        label=f"most bytes leased at once, {in_units(plan.lower_bound)}: no plan can be smaller",
    )  # fmt: skip
    figure.suptitle(textwrap.fill(title_of(plan, name, memory, rank), 110), fontsize=12)
    counted = "\n".join([counted_in_words(plan), *textwrap.wrap(outside, 150)])
    axes.set_title(counted, fontsize=9)
    axes.set_xlabel("time in a step: number of leases and releases so far")
    axes.set_ylabel(f"address in the block ({unit})")
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    if plan.slots:
        _show_slots(axes, plan, scale)
    kinds = sorted({item.kind for item in plan.items}, key=lambda kind: [*KINDS, kind].index(kind))
    handles = [
        Patch(facecolor=colour, edgecolor="0.35", label=f"{kind}: {meaning}" if meaning else kind)
        for kind in kinds
        for colour, meaning in [KINDS.get(kind, (OTHER_KIND, ""))]
    ]
    figure.legend(
        handles=[*handles, *axes.get_lines()[:1]], loc="outside lower center", ncols=2, fontsize=9, alignment="left",
    )  # fmt: skip
    _name_blocks(figure, axes, blocks)
    return figure


def title_of(plan: Plan, name: str, memory: str, rank: int) -> str:
    size = in_units(plan.nbytes)
    block = f"{len(plan.slots)} slots of {size} together" if plan.slots else f"one block of {size}"
    return f"Memory plan of {name}, rank {rank} alone: memory={memory}, {block}"


def counted_in_words(plan: Plan) -> str:
    if plan.slots:
        counted = "Counted: full parameters of the units that use the slots in turn."
        apart = "other leases of the step, the rank's own shards, optimizer state, buffers, activations"
    else:
        counted = "Counted: all that the engine leases for a step."
        apart = "the rank's own shards of parameters, optimizer state, buffers, activations"
    return f"{counted} Not counted: {apart}."


def _show_slots(axes: Axes, plan: Plan, scale: int) -> None:
    """Borders of a pool's slots, and on the right their sizes."""
    right = axes.secondary_yaxis("right")
    right.set_yticks([(offset + size / 2) / scale for offset, size, _ in plan.slots])
    labels = [
        f"slot {number}\n{in_units(size)}\nsize of {unit if len(unit) < 20 else f'...{unit[-16:]}'}"
        for number, (_, size, unit) in enumerate(plan.slots, 1)
    ]
    right.set_yticklabels(labels, fontsize=8)
    for offset, _, _ in plan.slots[1:]:
        axes.axhline(offset / scale, color="0.2", lw=1)


# ------------------------------------------------------------------------------
# Names on blocks


def _name_blocks(figure: Figure, axes: Axes, blocks: Sequence[LeaseBlock]) -> None:
    """Write each block's unit on it, in full or its last part alone, and below the picture what had no room."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.font_manager import FontProperties

    renderer = FigureCanvasAgg(figure).get_renderer()
    short = short_names(block.unit for block in blocks)
    for final in (False, True):
        # Sizes in pixels are known after the layout, in which the key below takes its part.
        figure.draw_without_rendering()
        fits = [_fit(renderer, axes, block, short.get(block.unit)) for block in blocks]
        key = _key(blocks, [fit is not None for fit in fits], [fit is not None and fit[3] for fit in fits])
        if key and not final:
            figure.legends[0].set_title(key, prop=FontProperties(size=9))
    figure.draw_without_rendering()
    for block, fit in zip(blocks, fits, strict=True):
        if fit is None:
            continue
        text, size, rotation, _ = fit
        x, y = (block.start + block.stop) / 2, block.low + block.height / 2
        written = axes.text(
            x, y, text, fontsize=size, rotation=rotation, clip_on=True, ha="center",
            va="center" if rotation else "center_baseline",
        )  # fmt: skip
        written.set_in_layout(False)


def _fit(
    renderer: RendererAgg, axes: Axes, block: LeaseBlock, short: str | None
) -> tuple[str, float, int, bool] | None:
    """Text, size, rotation with which a block can be named, and whether the name is shortened; None without room."""
    (left, low), (right, high) = axes.transData.transform(
        [(block.start, block.low), (block.stop, block.low + block.height)]
    )
    for text, is_short in ((block.unit, False), (short, True)):
        for rotation in (0, 90) if text else ():
            along, across = (right - left, high - low)[:: -1 if rotation else 1]
            for size in FONT_SIZES:
                width, height = _extent(renderer, text or "", size)
                if width + 4 <= along and height + 1 <= across:
                    return text or "", size, rotation, is_short
    return None


def _extent(renderer: RendererAgg, text: str, size: float) -> tuple[float, float]:
    """Width of a text and height of its letters, in pixels."""
    from matplotlib.font_manager import FontProperties

    width, height, _ = renderer.get_text_width_height_descent(text, FontProperties(size=size), False)
    return width, height


def short_names(units: Iterable[str]) -> dict[str, str]:
    """Return the last part of each unit's name, where no other unit has the same: 3 for layers.3."""
    names = set(units)
    last = {name: name.rpartition(".")[2] for name in names}
    count = Counter(last.values())
    return {
        name: part for name, part in last.items() if part != name and count[part] == 1 and part not in names
    }


def _key(blocks: Sequence[LeaseBlock], is_named: Sequence[bool], is_short: Sequence[bool]) -> str:
    """Return a key to the blocks: names that are short, and blocks without room for a name."""
    lines = []
    example = next((block.unit for block, short in zip(blocks, is_short, strict=True) if short), None)
    if example is not None:
        lines.append(f"{example.rpartition('.')[2]!r} on a block is short for unit {example}, and so on.")
    without: dict[str, list[str]] = {}
    for block, named in zip(blocks, is_named, strict=True):
        if not named and block.unit not in without.setdefault(block.kind, []):
            without[block.kind].append(block.unit)
    if without:
        parts = [f"{kind} of {', '.join(in_ranges(units))}" for kind, units in without.items()]
        lines += textwrap.wrap(
            f"Without room for a name: {'; '.join(parts)}. All are in memory_plan.json.",
            150,
            max_lines=4,
            placeholder=" ...",
        )
    return "\n".join(lines)


def in_ranges(units: Iterable[str]) -> list[str]:
    """Return names, those that differ by their number alone as one: layers.0 to layers.2 as "layers.0-2"."""
    numbered: dict[str, list[int]] = {}
    others = []
    for unit in units:
        if match := re.fullmatch(r"(.*\D)(\d+)", unit):
            numbered.setdefault(match[1], []).append(int(match[2]))
        else:
            others.append(unit)
    ranges = []
    for prefix, numbers in numbered.items():
        first = last = None
        for number in [*sorted(numbers), None]:
            if last is not None and number == last + 1:
                last = number
                continue
            if first is not None:
                ranges.append(f"{prefix}{first}" if first == last else f"{prefix}{first}-{last}")
            first = last = number
    return ranges + others
