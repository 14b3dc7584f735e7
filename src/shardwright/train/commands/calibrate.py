"""`shardwright calibrate`: measures this machine, or imports tables, and writes a file of a device whose plans have its
times.

Here are the checks of the file's place, the texts and the file. `train/planning` measures and imports.
"""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from shardwright.common.durable import replace_file
from shardwright.planner import GIB, Kind, as_toml, measurement_values
from shardwright.train.errors import UserError
from shardwright.train.planning.imported_device import imported_device
from shardwright.train.planning.measured_device import Summary, summary
from shardwright.train.planning.measuring import measured_by_ranks
from shardwright.train.planning.small_jobs import ON_CPU, ON_GPU, Task

CPU: Kind = "cpu"
CUDA: Kind = "cuda"
MOST = 0.15  #: by which repeated measurements may differ


def calibrate(out: Path, ranks: int, kind: Kind, most: float = MOST, task: Task | None = None) -> int:
    """Measure and write the file ``out``, also over one that is there; returns 0.

    Raises:
        UserError: a rank fails; repeated measurements differ by more than ``most``; the file cannot be written.
    """
    began = time.monotonic()
    task = task or (ON_CPU if kind == "cpu" else ON_GPU)
    print(f"measuring {_name(kind)} with {ranks} rank{'s' * (ranks > 1)}; stop other programs", flush=True)
    measurements = measured_by_ranks(task, ranks, kind)
    device = summary(measurements, task, ranks, kind)
    unsteady = max(device.differences, key=lambda name: device.differences[name])
    difference = device.differences[unsteady]
    if difference > most:
        raise UserError(
            f"calibrate: repeated measurements ({unsteady}) differ by {difference:.0%}, and at most {most:.0%} may: "
            "other programs run on this machine. Stop them and repeat, or set --most to accept this"
        )
    _write(out, _values(device, kind))
    print(*_words(device), sep="\n")
    if without := sorted({name for rank in measurements for name in rank["without"]}):
        print(f"{'without':10} {', '.join(without)}: they do not run alone")
    print(f"{out} is written, after {time.monotonic() - began:.0f} s; for plans with these times:")
    print(f"  shardwright plan JOB.toml --on {ranks}x{_named(out)}")
    return 0


def import_system(system: str, out: Path) -> int:
    """Write the file ``out`` with the tables of a system that the package aiconfigurator-core has measured; returns 0.

    Raises:
        UserError: the package or a table of the system is missing; the file cannot be written.
    """
    device = imported_device(system)
    _write(out, device.values)
    for head, text in device.lines:
        print(f"{head:10} {text}")
    print(f"{out} is written; for plans with these times:")
    print(f"  shardwright plan JOB.toml --on {device.node}x{_named(out)}")
    return 0


def _write(out: Path, values: dict[str, Any]) -> None:
    try:
        replace_file(out, as_toml(values).encode())
    except OSError as error:
        raise UserError(f"calibrate: cannot write {out}: {error.strerror or error}") from error


def _named(out: Path) -> str:
    text = str(out)
    return text if "/" in text else f"./{text}"


def default_place(kind: Kind, system: str | None = None) -> Path:
    """Return a file with the name of the device, or of the imported system, in the working folder, where the user sees
    it and names it as ``./NAME.toml``."""
    return Path(re.sub(r"[^a-z0-9]+", "-", (system or _name(kind)).lower()).strip("-") + ".toml")


def check_place(out: Path, force: bool) -> None:
    """Raises UserError if ``out`` cannot be written, or is there and not to be written over by ``force``."""
    if out.suffix != ".toml":
        raise UserError(f"--out: expected the path of a .toml file, found {str(out)!r}")
    if out.is_dir() or not out.parent.is_dir() or not os.access(out.parent, os.W_OK):
        raise UserError(
            f"--out: expected a file in a folder that is there and can be written, found {str(out)!r}"
        )
    if out.exists() and not force:
        raise UserError(f"{out} exists already; choose another --out, or add --force to measure again")


def _name(kind: Kind) -> str:
    if kind == "cuda":
        return torch.cuda.get_device_name(0)
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return f"{line.partition(':')[2].strip()} CPU"
    except OSError:
        pass
    return f"{platform.machine()} CPU"


def _values(device: Summary, kind: Kind) -> dict[str, Any]:
    """Return the tables of a device file."""
    figures = device.figures
    nbytes = (
        torch.cuda.get_device_properties(0).total_memory
        if kind == "cuda"
        else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    )
    source = f"shardwright calibrate, {datetime.now(UTC).date()}, torch {torch.__version__}"
    return {
        "name": _name(kind),
        "kind": kind,
        "gib": nbytes / GIB,
        "source": source,
        "speed": {
            "generation": figures.generation,
            "bandwidth": figures.bandwidth / 1e9,
            "units": figures.units,
            "node": figures.node,
            "within": figures.within / 1e9,
            "across": figures.across / 1e9,
            **(
                {"host_memory": figures.host_memory / 1e9, "pcie": figures.pcie / 1e9}
                if figures.knows_host
                else {}
            ),
            "source": source,
            "tflops": {dtype: flops / 1e12 for dtype, flops in sorted(figures.flops.items())},
        },
        "measured": measurement_values(device.measured),
    }


def _words(device: Summary) -> Iterable[str]:
    measured, figures = device.measured, device.figures
    rates = ", ".join(f"{dtype} {flops / 1e12:,.3g}" for dtype, flops in sorted(figures.flops.items()))
    yield f"{'products':10} {rates} TFLOP/s at most"
    yield f"{'memory':10} {figures.bandwidth / 1e9:,.3g} GB/s"
    yield f"{'host':10} {measured.host['host'] * 1e6:.3g} us for an operation"
    if measured.ranks:
        yield f"{'links':10} {figures.within / 1e9:,.3g} GB/s between {measured.ranks} ranks"
    points = sum(map(len, measured.kernels.values()))
    differ, may_differ = (
        ", ".join(f"{name} {part:.0%}" for name, part in parts.items())
        for parts in (device.differences, measured.spread)
    )
    yield f"{'tables':10} {len(measured.kernels)} with {points} times; repeated measurements differ by {differ}"
    yield f"{'ranges':10} of plans, also for sizes between measured ones: {may_differ}"
