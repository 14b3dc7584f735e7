"""A device file from the tables of an installed package, aiconfigurator-core, which measured them on its own machines.

Here are the package's folders, columns and units, and the choice of rows. Nothing here measures or writes a file, and
no figure of the package is in this repository.
"""

from __future__ import annotations

import difflib
import importlib.util
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from shardwright.planner import GIB, Device, Point, Work, error, known_devices, rate_of, typical
from shardwright.train.errors import UserError

DISTRIBUTION, PACKAGE = "aiconfigurator-core", "aiconfigurator_core"
INSTALL = f"pip install {DISTRIBUTION}"
FRAMEWORK = "vllm"  #: it measures products with torch's own linear function
MULTIPLE = (
    32  #: of which the sizes of imported products are; others use the device badly, and training has few
)
SHORTEST = 128  #: the shortest sequence of imported attention
MOST = 400  #: points of a table
CHECKED = 300  #: points that are left out, of which the error is found
#: Generations by their least compute capability. 12.0 computes as the rtx5090 of the known devices.
GENERATIONS = ((120, "ada"), (100, "blackwell"), (90, "hopper"), (89, "ada"), (80, "ampere"))
#: Columns that older tables do not have, which then have no such rows.
LATER = frozenset({"window_size"})
#: Tables of a device file, by operation of NCCL.
COLLECTIVES = {"all_gather": "gather", "reduce_scatter": "scatter", "all_reduce": "reduce"}
PRODUCTS = "mm bfloat16"
ATTENTION = "_scaled_dot_product_flash_attention bfloat16"


@dataclass(frozen=True)
class Imported:
    """A device file, and lines that say where it is from.

    Attributes:
        values: tables of the file.
        node: GPUs of a node.
        lines: heads and texts.
    """

    values: dict[str, Any]
    node: int
    lines: list[tuple[str, str]]


@dataclass(frozen=True)
class _Table:
    """Rows of one file of the package: their words and numbers by column, and the place of the file in words."""

    rows: list[dict[str, Any]]
    source: str


def imported_device(system: str) -> Imported:
    """Return the tables of a system of the package, such as ``h100_sxm``.

    Raises:
        UserError: the package is not installed; it does not have the system, or a table of it; a file is not as
            expected.
    """
    folder, version = _installed()
    facts = _facts(folder, system)
    data = folder / "data" / system
    gemm = _read(
        data, "gemm", FRAMEWORK, "gemm_perf", ("device", "m", "n", "k", "latency"), {"gemm_dtype": "bfloat16"}
    )
    context = _read(
        data, "attention", FRAMEWORK, "context_attention_perf",
        ("batch_size", "num_heads", "isl", "head_dim", "latency"),
        {"attn_dtype": "bfloat16", "kv_cache_dtype": "bfloat16", "window_size": 0},
    )  # fmt: skip
    nccl = _read(
        data, "comm", "nccl", "nccl_perf", ("op_name", "num_gpus", "message_size", "latency"),
        {"nccl_dtype": "int8"},  # so that the size of a message is its bytes
    )  # fmt: skip

    products = _points(
        ((1, each["m"], each["n"], each["k"]), each["latency"])
        for each in gemm.rows
        if not any(each[size] % MULTIPLE for size in "mnk")
    )
    attention = _points(
        (
            (each["batch_size"] * each["num_heads"], each["isl"], each["isl"], each["head_dim"]),
            each["latency"],
        )
        for each in context.rows
        if each["isl"] >= SHORTEST
    )
    node = _fact(facts, system, "node", "num_gpus_per_node")
    ranks, collectives = _collectives(nccl, int(node))
    kernels = {PRODUCTS: thinned(products, MOST), ATTENTION: thinned(attention, MOST)}

    package = f"{DISTRIBUTION} {version}"
    name = next((str(each["device"]) for each in gemm.rows), system)
    speed, gib, figures = _speed(facts, system, name, package)
    sources = {
        "products": f"{package}, {gemm.source}",
        "attention": f"{package}, {context.source}; forward",
        "links": f"{package}, {nccl.source}, {ranks} GPUs",
    }
    values = {
        "name": name,
        "gib": gib,
        "source": f"{package}, systems/{system}.yaml; {figures}",
        "speed": speed,
        "measured": {
            "ranks": ranks,
            "source": sources,
            "collectives": collectives,
            "kernels": {key: [list(each) for each in rows] for key, rows in kernels.items()},
        },
    }
    count = sum(map(len, collectives.values()))
    lines = [
        ("products", f"{gemm.source}: {_words(kernels[PRODUCTS], products)}"),
        ("attention", f"{context.source}: {_words(kernels[ATTENTION], attention)}; forward alone"),
        ("links", f"{nccl.source}: {count} times of {ranks} GPUs"),
        ("figures", f"systems/{system}.yaml; {figures}"),
    ]
    return Imported(values, int(node), lines)


def _installed() -> tuple[Path, str]:
    """Return the folder of the package's systems, and its version."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise UserError(f"--import: expected the package {DISTRIBUTION}, found none; {INSTALL}")
    for name in ("pyarrow", "yaml"):
        if importlib.util.find_spec(name) is None:
            raise UserError(
                f"--import: expected the packages that {DISTRIBUTION} needs, found no {name}; {INSTALL}"
            )
    try:
        version = metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        version = "of unknown version"
    return Path(found.submodule_search_locations[0]) / "systems", version


def _facts(folder: Path, system: str) -> Mapping[str, Any]:
    """Return the figures of a system."""
    import yaml

    names = sorted(each.stem for each in folder.glob("*.yaml") if (folder / "data" / each.stem).is_dir())
    if system not in names:
        near = difflib.get_close_matches(system, names, 3, 0.4) or names
        raise UserError(
            f"--import: expected a system of {DISTRIBUTION}, such as {', '.join(near)}, found {system!r}"
        )
    try:
        facts = yaml.safe_load((folder / f"{system}.yaml").read_text())
    except (OSError, ValueError, yaml.YAMLError) as problem:
        raise UserError(
            f"--import: cannot read systems/{system}.yaml: {' '.join(str(problem).split())}"
        ) from problem
    return facts if isinstance(facts, dict) else {}


def _fact(facts: Mapping[str, Any], system: str, section: str, name: str) -> float:
    table = facts.get(section)
    number = table.get(name) if isinstance(table, dict) else None
    if not isinstance(number, int | float) or not 0 < number < math.inf:
        raise UserError(
            f"--import: systems/{system}.yaml of {DISTRIBUTION} needs {section}.{name}, a number, found {number!r}"
        )
    return number


def _read(
    data: Path, family: str, framework: str, name: str, columns: Sequence[str], only: Mapping[str, Any]
) -> _Table:
    """Return the columns of the newest table of a framework, of rows that have the values ``only``."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    place = f"systems/data/{data.name}/{family}/{framework}"
    files = sorted((data / family / framework).glob(f"*/{name}.parquet"), key=_version)
    if not files:
        raise UserError(f"--import: {DISTRIBUTION} has no table {place}/*/{name}.parquet")
    file, version = files[-1], files[-1].parent.name
    of = f"{place}/{version}/{name}.parquet of {DISTRIBUTION}"
    try:
        there = set(pq.read_schema(file).names)
        if missing := {*columns, *only} - there - LATER:
            raise UserError(f"--import: {of} has no columns {', '.join(sorted(missing))}")
        table = pq.read_table(
            file,
            columns=list(columns),
            filters=[(column, "=", value) for column, value in only.items() if column in there],
        )
    except (OSError, pa.ArrowException) as problem:
        raise UserError(f"--import: cannot read {of}: {str(problem).splitlines()[0]}") from problem
    if not table.num_rows:
        values = ", ".join(f"{column} {value}" for column, value in only.items())
        raise UserError(f"--import: {of} has no rows with {values}")
    return _Table(table.to_pylist(), f"{family} of {framework} {version}")


def _version(file: Path) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", file.parent.name)))


def _points(rows: Iterable[tuple[tuple[int, ...], float]]) -> list[Point]:
    """Return the sizes and seconds, from rows of sizes and milliseconds; the median of rows with the same sizes."""
    seconds: dict[tuple[int, ...], list[float]] = defaultdict(list)
    for sizes, milliseconds in rows:
        if milliseconds > 0:
            seconds[sizes].append(milliseconds / 1e3)
    return [(*sizes, statistics.median(each)) for sizes, each in sorted(seconds.items())]


def _collectives(nccl: _Table, node: int) -> tuple[int, dict[str, list[list[float]]]]:
    """Return the most GPUs of a node that have measured all collectives, and points of bytes and seconds."""
    by_ranks: dict[int, dict[str, list[tuple[tuple[int, ...], float]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for each in nccl.rows:
        if each["op_name"] in COLLECTIVES and 2 <= each["num_gpus"] <= node:
            row = (each["message_size"],), each["latency"]
            by_ranks[each["num_gpus"]][COLLECTIVES[each["op_name"]]].append(row)
    complete = [ranks for ranks, tables in by_ranks.items() if len(tables) == len(COLLECTIVES)]
    if not complete:
        raise UserError(
            f"--import: {nccl.source} has no times of {', '.join(COLLECTIVES)} on 2 to {node} GPUs together"
        )
    ranks = max(complete)
    tables = by_ranks[ranks]
    return ranks, {kind: [list(point) for point in _points(tables[kind])] for kind in sorted(tables)}


def thinned(points: Sequence[Point], most: int) -> list[Point]:
    """Return at most `most` of the points, evenly over the logarithms of their sizes.

    Of each cell of a grid the point with the median rate is taken, so that no chosen point is an exception.
    """
    octaves = 0.0
    cells: dict[tuple[int, ...], list[Point]] = {}
    while not octaves or len(cells) > most:
        octaves += 0.25
        cells = defaultdict(list)
        for point in points:
            cells[tuple(round(math.log2(size) / octaves) for size in point[:-1])].append(point)
    middles = (sorted(each, key=_seconds_of_one) for each in cells.values())
    return sorted(each[len(each) // 2] for each in middles)


def _seconds_of_one(point: Point) -> float:
    return point[-1] / math.prod(point[:-1])


def _words(chosen: Sequence[Point], points: Sequence[Point]) -> str:
    """Return the number of chosen points, and how far a plan is off for others."""
    others = sorted(set(points) - set(chosen))
    errors = []
    for *sizes, seconds in others[:: max(len(others) // CHECKED, 1)]:
        work = Work("products", math.prod(sizes), 0, tuple(map(int, sizes)))
        errors.append(error(work.flops / rate_of(chosen, work), seconds))
    off = f"; two of three others are less than {typical(errors):.0%} off" if errors else ""
    return f"{len(chosen)} of {len(points)} times{off}"


def _speed(
    facts: Mapping[str, Any], system: str, name: str, package: str
) -> tuple[dict[str, Any], float, str]:
    """Return the table ``[speed]``, the memory in GiB, and the source of what the package does not have, in words."""

    def number(section: str, key: str) -> float:
        return _fact(facts, system, section, key)

    generation = _generation(number("gpu", "sm_version"))
    peak, gib = number("gpu", "bfloat16_tc_flops") / 1e12, number("gpu", "mem_capacity") / GIB
    key, like = _nearest(generation, name, peak, gib)
    assert like.figures is not None
    flops = {dtype: each / 1e12 for dtype, each in like.figures.flops.items()}
    tflops = {"bfloat16": peak, "float16": peak, "float32": flops["float32"] * peak / flops["bfloat16"]}
    if "fp8_tc_flops" in facts["gpu"]:
        tflops["float8"] = number("gpu", "fp8_tc_flops") / 1e12
    figures = f"multiprocessors and float32 as of {key}"
    if 0.95 < (reported := like.nbytes / GIB) / gib <= 1:  # PyTorch reports less than the data sheet has
        gib, figures = reported, f"memory, multiprocessors and float32 as of {key}"
    speed = {
        "generation": generation,
        "bandwidth": number("gpu", "mem_bw") / 1e9,
        "units": like.figures.units,
        "node": int(number("node", "num_gpus_per_node")),
        "within": number("node", "intra_node_bw") / 1e9,
        "across": number("node", "inter_node_bw") / 1e9,
        "source": f"{package}, systems/{system}.yaml, with {number('gpu', 'power'):.0f} W; {figures}",
        "tflops": tflops,
    }
    return speed, gib, figures


def _generation(version: float) -> str:
    """Return the generation of a GPU, from its compute capability without the point."""
    for least, generation in GENERATIONS:
        if version >= least:
            return generation
    raise UserError(f"--import: expected a GPU of compute capability 8.0 or later, found {version / 10:.1f}")


def _nearest(generation: str, name: str, peak: float, gib: float) -> tuple[str, Device]:
    """Return the known device with the name, else the one of the generation whose peak and memory are nearest."""

    def distance(item: tuple[str, Device]) -> tuple[bool, float, float]:
        device = item[1]
        assert device.figures is not None
        ratio = device.figures.flops["bfloat16"] / 1e12 / peak
        return device.name != name, abs(math.log(ratio)), abs(device.nbytes / GIB - gib)

    known = known_devices().items()
    return min(
        (each for each in known if each[1].figures and each[1].figures.generation == generation), key=distance
    )
