"""The times and figures of a device, from the measurements of all ranks. Nothing here measures or writes a file."""

from __future__ import annotations

import math
import os
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from shardwright.planner import (
    HOST,
    MEASURED,
    SPREADS,
    Figures,
    Kind,
    Measured,
    Point,
    Rates,
    Step,
    difference,
    errors_between,
    errors_of_least_squares,
    kind_of_table,
    known_devices,
    least_squares,
    merged,
    replay,
    steady,
    width,
)
from shardwright.train.planning.programs import traced_program
from shardwright.train.planning.small_jobs import Task, configured


@dataclass(frozen=True)
class Summary:
    """A device.

    Attributes:
        figures: of the device.
        measured: its times, which the figures have, too.
        differences: by kind of time the relative difference of repeated measurements.
    """

    figures: Figures
    measured: Measured
    differences: dict[str, float]


def summary(measurements: Sequence[Mapping[str, Any]], task: Task, ranks: int, kind: Kind) -> Summary:
    """Times, their ranges and figures from the measurements of all ranks."""
    samples: dict[tuple[str, Point], list[float]] = defaultdict(list)
    of_links: dict[tuple[str, int], list[float]] = defaultdict(list)
    for rank in measurements:
        for table, point, seconds in rank["kernels"]:
            samples[table, tuple(point)] += seconds
        for name, nbytes, seconds in rank["collectives"]:
            of_links[name, nbytes] += seconds
    steps = [
        [seconds for rank in measurements for seconds in rank["steps"][i]] for i in range(len(task.steps))
    ]
    differences: dict[str, list[float]] = {name: [] for name in SPREADS}
    kernels: dict[str, list[Point]] = defaultdict(list)
    for (table, point), seconds in sorted(samples.items()):
        kernels[table].append((*point, steady(seconds)))
        differences[kind_of_table(table, point)].append(difference(seconds))
    collectives: dict[str, list[Point]] = defaultdict(list)
    for (name, nbytes), seconds in sorted(of_links.items()):
        collectives[name].append((nbytes, steady(seconds)))
        differences["links"].append(difference(seconds))
    differences["host"] = [difference(each) for each in steps]

    errors: dict[str, list[float]] = {name: [] for name in SPREADS}
    for table, points in kernels.items():
        errors[kind_of_table(table, points[0][:-1])] += errors_between(points)
    for points in collectives.values():
        errors["links"] += errors_between(points)
    no_host, no_range = dict.fromkeys(HOST, 0.0), dict.fromkeys(SPREADS, 0.0)
    times = Measured(kernels, collectives, no_host, no_range, ranks if ranks > 1 else 0, kind == "cpu")
    figures = replace(_figures(times, ranks, kind), measured=times)
    rows = _beside_kernels(task, [steady(each) for each in steps], figures, ranks, kind)
    errors["host"] = errors_of_least_squares(rows)
    one, other = least_squares(rows)
    measured = replace(
        times,
        host={"host": one, "host_compiled": one, "host_collective": other or one},
        spread={name: round(width(differences[name], errors[name]), 3) for name in SPREADS},
    )
    repeated = {name: statistics.median(each) for name, each in differences.items() if each}
    return Summary(replace(figures, measured=measured), measured, repeated)


def _beside_kernels(
    task: Task, steps: Sequence[float], figures: Figures, ranks: int, kind: Kind
) -> list[tuple[float, float, float]]:
    """For each small job the operations and the collectives of a step, and its seconds beside those of kernels."""
    rows: list[tuple[float, float, float]] = []
    for values, seconds in zip(task.steps, steps, strict=True):
        step = Step.of(traced_program(configured(values, ranks), ranks, kind))
        counts = Counter(step.kernels[each.number][1].kind == "communication" for each in step.queued)
        of_kernels = replay(step, Rates.of(figures)).seconds if kind == "cpu" else 0.0
        rows.append((counts[False], counts[True] if ranks > 1 else 0, max(seconds - of_kernels, 0.0)))
    return rows


def _figures(measured: Measured, ranks: int, kind: Kind) -> Figures:
    """Return the figures beside the times: peaks of products and of bandwidth, and links."""
    flops: dict[str, float] = {}
    bandwidth = 1e9
    for table, points in measured.kernels.items():
        name, dtype, *_ = table.split(" ")
        for *sizes, seconds in points:
            if len(sizes) == 4 and "attention" not in name:
                flops[dtype] = max(flops.get(dtype, 0.0), 2 * math.prod(sizes) / seconds)
            elif (
                len(sizes) == 1 and name in ("add", "mul", "copy_", "_foreach_copy_") and sizes[0] >= 1 << 22
            ):
                bandwidth = max(bandwidth, sizes[0] / seconds)
    flops.setdefault("float32", max(flops.values(), default=1e9))
    node, within, across, host_memory, pcie = max(ranks, 1), 25e9, 12.5e9, 0.0, 0.0
    if measured.ranks:
        gathers = merged(measured.collectives["gather"])
        within = max(nbytes / 2 / seconds for nbytes, seconds in gathers)
        across = within / 2
    if kind == "cuda":
        node = max(torch.cuda.device_count(), 1)
        name = torch.cuda.get_device_name(0)
        like = next((each.figures for each in known_devices().values() if each.name == name), None)
        if like is not None:
            node, across = like.node, like.across
            within = within if measured.ranks else like.within
            host_memory, pcie = like.host_memory, like.pcie
    else:
        node = max(os.cpu_count() or 1, ranks)
    return Figures(
        MEASURED, flops, bandwidth, 1, 1.0, node, within, across, "", host_memory=host_memory, pcie=pcie
    )
