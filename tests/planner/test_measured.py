"""Measured times: tables by operation, their interpolation, and the file that has them."""

from __future__ import annotations

import math
import random
import tomllib
from pathlib import Path
from typing import Any

import pytest

from shardwright.planner import (
    STEP,
    DeviceError,
    Figures,
    Kernel,
    Measured,
    Phase,
    Program,
    Rates,
    Step,
    as_toml,
    errors_between,
    measurement_values,
    merged,
    parse_devices,
    replay,
    speed_of,
    table_of,
    work_of,
)
from shardwright.planner.measured import MeasuredError, interpolated, key_of
from shardwright.planner.program import Event
from shardwright.planner.rates import ranges_of

HOST = {"host": 1e-5, "host_compiled": 5e-6, "host_collective": 1e-4}
SPREAD = {"products": 0.1, "attention": 0.05, "memory": 0.2, "links": 0.3, "host": 0.04}
KERNELS: dict[str, list[tuple[float, ...]]] = {
    "add float32 2:=,=": [(1000.0, 1e-6), (1e6, 1e-3)],
    "mul float32 2:1-,=": [(1000.0, 4e-6)],
    "mm float32": [(1, 64, 64, 64, 1e-5), (1, 512, 512, 512, 2e-3)],
}
LINKS: dict[str, list[tuple[float, ...]]] = {
    name: [(4096.0, 1e-4), (1e7, 1e-2)] for name in ("gather", "scatter", "reduce")
}
MEASURED = Measured(KERNELS, LINKS, HOST, SPREAD, 2, True)
FIGURES = Figures("measured", {"float32": 1e11}, 1e10, 1, 1.0, 2, 1e9, 1e9, "", MEASURED)
ADD = Kernel("add", "compute", 1000, ((50, 5),) * 3, "float32")
PRODUCT = Kernel("mm", "compute", 3 * 4 * 64 * 64, ((64, 64),) * 3, "float32")
GATHER = Kernel("c10d.allgather", "compute", 6144, ((1024,),), "float32", (2, 1))


def device_file(folder: Path, **others: Any) -> Path:
    values: dict[str, Any] = {
        "name": 'A "machine"', "kind": "cpu", "gib": 16, "source": "test",
        "speed": {
            "generation": "measured", "bandwidth": 10, "units": 1, "node": 2, "within": 1, "across": 1,
            "tflops": {"float32": 0.1},
        },
        "measured": measurement_values(MEASURED),
    }  # fmt: skip
    file = folder / "mine.toml"
    file.write_text(as_toml({**values, **others}))
    return file


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = device_file(tmp_path)
    count, device = parse_devices(f"2x{file}", lambda: pytest.fail("asks for the local device"))
    assert (count, device.name, device.kind, device.nbytes) == (2, 'A "machine"', "cpu", 16 << 30)
    assert device.figures is not None and device.figures.measured == MEASURED
    assert as_toml(measurement_values(MEASURED)) == as_toml(measurement_values(device.figures.measured))


@pytest.mark.parametrize("seed", range(20))
def test_any_table_is_toml(seed: int) -> None:
    draw = random.Random(seed)
    points = {
        "".join(draw.choice('ab_ :=,"\\\n') for _ in range(8)): [
            (float(f"{draw.uniform(1, 1e9):.4g}"), float(f"{draw.uniform(1e-7, 10):.4g}")) for _ in range(3)
        ]
        for _ in range(5)
    }
    read = tomllib.loads(as_toml({"a": {"x": True, "y": "z", "points": points}}))
    assert read == {
        "a": {"x": True, "y": "z", "points": {
            key.replace("\n", " "): [list(each) for each in rows] for key, rows in points.items()
        }}
    }  # fmt: skip
    with pytest.raises(ValueError, match="finite"):
        as_toml({"a": math.nan})


def test_times_between_points() -> None:
    points = [(1e3, 1e-6), (1e5, 1e-4), (1e6, 4e-3)]
    for nbytes, seconds in points:
        assert interpolated(points, nbytes) == pytest.approx(seconds)
    assert interpolated(points, 1e4) == pytest.approx(1e-5)  # on a line of logarithms
    assert interpolated(points, 10) == 1e-6  # not faster than the smallest one
    assert interpolated(points, 1e8) == pytest.approx(0.4)  # at the rate of the largest one
    assert merged([(1000.0, 1e-6), (1001.0, 3e-6), (1002.0, 2e-6), (5e3, 1e-5)]) == [
        (pytest.approx(1001), pytest.approx(2e-6, rel=1e-2)), (5e3, pytest.approx(1e-5)),
    ]  # fmt: skip


def test_errors_between_the_points_of_a_table() -> None:
    line = [(4.0**i, 1e-6 * 2.0**i) for i in range(2, 9)]  # on a line of logarithms
    first, *between, last = errors_between(line)
    assert between == pytest.approx([0.0] * 5, abs=1e-9)
    assert first == last == pytest.approx(1.0)  # below and above all others a table follows no line
    bent = [*line[:3], (line[3][0], 1.5 * line[3][1]), *line[4:]]
    assert errors_between(bent)[3] == pytest.approx(0.5)
    # Points with nearly as many bytes do not predict one another, as a plan takes them as one.
    assert errors_between([*line, (4.0**5 * 1.001, 1e-6 * 2.0**5)]) == pytest.approx(
        [first, 0, 0, 0, 0, 0, last], abs=1e-2
    )
    assert errors_between([(1000.0, 1e-6)]) == [] == errors_between([(1, 64, 64, 64, 1e-5)])


def test_errors_between_products() -> None:
    sizes = [(1, m, n, k) for m in (64, 256) for n in (64, 256) for k in (64, 512)]
    points: list[tuple[float, ...]] = [(*each, math.prod(each) / 1e10) for each in sizes]
    assert errors_between(points) == pytest.approx([0.0] * 8, abs=1e-9)  # of one rate
    points[3] = (*sizes[3], 3 * math.prod(sizes[3]) / 1e10)
    errors = errors_between(points)
    assert errors[3] == pytest.approx(2.0) and 0 < max(errors[:3] + errors[4:]) < 1


def test_an_operation_without_a_table_takes_the_nearest_one() -> None:
    def seconds(kernel: Kernel) -> float:
        return MEASURED.seconds(kernel, work_of(kernel))

    assert seconds(ADD) == pytest.approx(1e-6)
    assert seconds(ADD._replace(dtype="bfloat16")) == pytest.approx(1e-6)  # of another dtype
    assert seconds(ADD._replace(shapes=((50, 5), (5,), (50, 5)))) == pytest.approx(1e-6)  # of other shapes
    # All operations of 1,000 bytes: the median of two.
    assert seconds(ADD._replace(name="silu")) == pytest.approx(2.5e-6)
    assert seconds(PRODUCT) == pytest.approx(1e-5, rel=0.01)
    bmm = Kernel("bmm", "compute", 1 << 16, ((4, 64, 64),) * 3, "bfloat16")
    assert 2e-5 < seconds(bmm) < 6e-5  # the rate of products, four times as much


def test_products_between_points_are_between_their_rates() -> None:
    draw = random.Random(0)
    rates = [2 * 64**3 / 1e-5, 2 * 512**3 / 2e-3]
    for _ in range(50):
        m, n, k = (draw.randint(1, 2048) for _ in range(3))
        product = Kernel("mm", "compute", 4 * (m * k + k * n + m * n), ((m, k), (k, n), (m, n)), "float32")
        rate = 2 * m * n * k / MEASURED.seconds(product, work_of(product))
        assert min(rates) * 0.999 <= rate <= max(rates) * 1.001


def test_tables_differ_by_how_shapes_differ() -> None:
    of = [
        ((8, 4), (8, 4), (8, 4)), ((8, 4), (8, 1), (8, 4)), ((8, 4), (1, 4), (8, 4)), ((8, 4), (4,), (8, 4)),
        ((8, 4), (8, 2), (8, 4)), ((8, 4),), (),
    ]  # fmt: skip
    keys = [key_of(ADD._replace(shapes=shapes)) for shapes in of]
    assert keys[0] == key_of(ADD) == "add float32 2:=,=" and len(set(keys)) == len(keys)
    larger = tuple(tuple(3 * size if size > 1 else 1 for size in shape) for shape in of[1])
    assert key_of(ADD._replace(shapes=larger)) == keys[1]
    assert table_of(PRODUCT, work_of(PRODUCT)) == ("mm float32", (1, 64, 64, 64))
    assert table_of(ADD, work_of(ADD)) == ("add float32 2:=,=", (1000,))


def test_on_a_cpu_the_host_and_its_kernels_take_turns() -> None:
    rates = Rates.of(FIGURES)
    events: list[Event] = [ADD, PRODUCT, GATHER, ADD]
    found = replay(Step.of(Program([Phase(STEP), Phase(STEP), Phase("forward"), *events])), rates)
    each = [rates.seconds(kernel, work_of(kernel)) for kernel in (ADD, PRODUCT, GATHER, ADD)]
    assert found.seconds == pytest.approx(sum(each) + 3 * HOST["host"] + HOST["host_collective"])
    assert found.host == pytest.approx(3 * HOST["host"] + HOST["host_collective"])
    assert found.waits == pytest.approx(each[2])
    # A GPU computes beside its host.
    beside = Figures(**{**vars(FIGURES), "measured": Measured(KERNELS, LINKS, HOST, SPREAD, 2)})
    later: list[Event] = [PRODUCT._replace(shapes=((512, 512),) * 3), *[ADD] * 20]
    step = Step.of(Program([Phase(STEP), Phase(STEP), Phase("forward"), *later]))
    assert replay(step, Rates.of(beside)).seconds < replay(step, rates).seconds - 15 * HOST["host"]


def test_collectives_follow_the_whole_bytes_and_the_ranks() -> None:
    rates = Rates.of(FIGURES)
    assert rates.collective(GATHER) == pytest.approx(1e-4)  # 6,144 bytes are a whole of 4,096 and a half
    more = GATHER._replace(name="c10d.allreduce_", nbytes=4096)
    assert rates.collective(more) == pytest.approx(1e-4)
    wide = Figures(**{**vars(FIGURES), "node": 8})
    assert Rates.of(wide).collective(more._replace(group=(4, 1))) == pytest.approx(2e-4)
    assert rates.collective(GATHER._replace(group=(1, 1))) == 0


def test_the_range_is_the_spread() -> None:
    spans = ranges_of(FIGURES)
    for name, span in spans.items():
        worst, best = (span.low, span.high) if span.low < span.high else (span.high, span.low)
        assert worst <= span.likely <= best, name
    assert spans["memory"].high == pytest.approx(1.2) and spans["host"].low == pytest.approx(1.04e-5)
    device = parse_devices("2xh100", lambda: pytest.fail("not local"))[1]
    own = type(device)("mine", "mine", 1 << 34, "", FIGURES, "cpu")
    step: list[Event] = [Phase(STEP), Phase(STEP), Phase("forward"), *[PRODUCT] * 100, *[ADD] * 10]
    speed = speed_of(Program(step, [], 4096, 1e9), own, 2)
    assert speed is not None
    low, likely, high = speed.seconds
    assert low < likely < high < 1.1 * likely
    assert sum(loss.seconds for loss in speed.losses()) == pytest.approx(likely)


def wrong(**others: Any) -> dict[str, Any]:
    return {**measurement_values(MEASURED), **others}


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"kind": "tpu"}, "expected kind, cpu or cuda, found 'tpu'"),
        ({"measured": 3}, r"expected a table \[measured\], found 3"),
        ({"measured": wrong(ranks="two")}, r"needs ranks, an integer, found 'two'"),
        ({"measured": wrong(host={"host": 1.0})}, r"\[measured.host\] needs host_compiled, a number, found None"),
        ({"measured": wrong(spread={**SPREAD, "links": -1})}, r"\[measured.spread\] needs links, .*found -1"),
        ({"measured": wrong(kernels={})}, "needs points of bytes and seconds, found none"),
        ({"measured": wrong(kernels={"add": [[1, 2, 3]]})}, r"'add': expected sizes and seconds, found \[1, 2, 3\]"),
        ({"measured": wrong(kernels={"add": [[0, 1.0]]})}, r"expected sizes and seconds, found \[0, 1"),
        ({"measured": wrong(kernels={"add": "fast"})}, "expected sizes and seconds, found 'fast'"),
        ({"measured": wrong(collectives={})}, "needs points of gather, scatter and reduce"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_one_line(tmp_path: Path, others: dict[str, Any], message: str) -> None:
    with pytest.raises(DeviceError, match=message) as error:
        parse_devices(str(device_file(tmp_path, **others)), lambda: pytest.fail("not local"))
    assert "\n" not in str(error.value)


def test_measured_times_need_figures_and_a_cpu_needs_measured_times(tmp_path: Path) -> None:
    file = device_file(tmp_path)
    text = file.read_text()
    file.write_text(text.partition("[measured")[0])
    with pytest.raises(DeviceError, match="shardwright calibrate"):
        parse_devices(str(file), lambda: pytest.fail("not local"))
    file.write_text(text.partition("[measured")[0].replace('kind = "cpu"\n', ""))
    with pytest.raises(DeviceError, match=r"needs a table \[measured\]"):
        parse_devices(str(file), lambda: pytest.fail("not local"))
    file.write_text("gib = 1\n[measured]\nranks = 2\n")
    with pytest.raises(DeviceError, match=r"expected a table \[speed\] beside \[measured\]"):
        parse_devices(str(file), lambda: pytest.fail("not local"))
    with pytest.raises(MeasuredError, match="found none"):
        Measured({}, {}, HOST, SPREAD).seconds(ADD, work_of(ADD))


def test_tables_of_products_alone_leave_the_rest_to_the_figures(tmp_path: Path) -> None:
    speed = {
        "generation": "hopper", "bandwidth": 3000, "units": 132, "node": 8, "within": 450, "across": 50,
        "tflops": {"bfloat16": 900, "float32": 60},
    }  # fmt: skip
    tables = {"ranks": 0, "collectives": {}, "kernels": {"mm float32": KERNELS["mm float32"]}}
    file = device_file(tmp_path, kind="cuda", speed=speed, measured=tables)
    figures = parse_devices(str(file), lambda: pytest.fail("not local"))[1].figures
    assert figures is not None and figures.measured is not None and not figures.measured.whole
    rates, without = Rates.of(figures), Rates.of(Figures(**{**vars(figures), "measured": None}))
    assert rates.seconds(PRODUCT, work_of(PRODUCT)) == pytest.approx(1e-5)
    for other in (ADD, PRODUCT._replace(dtype="bfloat16")):
        assert rates.seconds(other, work_of(other)) == without.seconds(other, work_of(other))
    assert rates.shares == without.shares and rates.collective(GATHER) == without.collective(GATHER)
    device_file(tmp_path, measured=tables)
    with pytest.raises(DeviceError, match="needs points of bytes and seconds"):
        parse_devices(str(file), lambda: pytest.fail("not local"))
