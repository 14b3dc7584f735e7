"""`shardwright calibrate --import`: tables of a made-up package, the file, its plans, and mistakes in one line."""

from __future__ import annotations

import importlib
import itertools
import math
import shutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardwright.cli import main
from shardwright.planner import GIB, Device, Kernel, Point, Rates, known_devices, parse_devices, work_of
from shardwright.planner.rates import ranges_of
from shardwright.train.planning.imported_device import ATTENTION, MOST, PRODUCTS, thinned

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed, which reads the tables")
yaml = pytest.importorskip("yaml", reason="pyyaml is not installed, which reads the figures")
SYSTEM = {
    "gpu": {
        "mem_bw": 3e12, "mem_capacity": 80 * GIB, "bfloat16_tc_flops": 900e12, "fp8_tc_flops": 1800e12,
        "power": 700, "sm_version": 90,
    },
    "node": {"num_gpus_per_node": 4, "inter_node_bw": 40e9, "intra_node_bw": 400e9},
}  # fmt: skip
RATE, OF_ATTENTION, GIGABYTE = (
    600e12,
    500e12,
    4e-3,
)  #: operations a second; seconds of a gigabyte on four GPUs
WIDE = Kernel("mm", "compute", 2 * 3 * 4096 * 4096, ((4096, 4096),) * 3, "bfloat16")
_HEADS = ((2, 32, 4096, 128),) * 3
FORWARD = Kernel("_scaled_dot_product_flash_attention", "compute", 1 << 27, _HEADS, "bfloat16")
BACKWARD = Kernel("_scaled_dot_product_flash_attention_backward", "compute", 1 << 28, _HEADS, "bfloat16")
ADD = Kernel("add", "compute", 1 << 30, ((1 << 14, 1 << 14),) * 2, "float32")


def write_table(file: Path, rows: list[dict[str, Any]]) -> None:
    from pyarrow import parquet

    file.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.Table.from_pylist(rows), file)


def gemm_rows(rate: float) -> list[dict[str, Any]]:
    sizes = [1, *(1 << i for i in range(5, 15))]
    return [
        {
            "device": "NVIDIA H100 80GB HBM3", "gemm_dtype": dtype, "m": m, "n": n, "k": k,
            "latency": 2e3 * m * n * k / rate / (2 if dtype == "fp8" else 1),
        }
        for m, n, k, dtype in itertools.product(sizes, sizes, sizes, ("bfloat16", "fp8"))
    ]  # fmt: skip


def attention_rows() -> list[dict[str, Any]]:
    return [
        {
            "batch_size": batch, "isl": length, "num_heads": 32, "num_key_value_heads": keys, "head_dim": 128,
            "attn_dtype": "bfloat16", "kv_cache_dtype": "bfloat16", "window_size": window,
            "latency": 1e3 * 2 * batch * 32 * 128 * length**2 / OF_ATTENTION / (9 if window else 1),
        }
        for batch, length, keys, window in itertools.product((1, 2, 8), (16, 1024, 8192), (8, 32), (0, 128))
    ]  # fmt: skip


def nccl_rows() -> list[dict[str, Any]]:
    return [
        {
            "nccl_dtype": dtype, "num_gpus": ranks, "op_name": name, "message_size": 1 << size,
            "latency": 1e3 * GIGABYTE * (1 << size) / 1e9 * (2 if name == "all_reduce" else 1) * ranks / 4,
        }
        for dtype, ranks, name, size in itertools.product(
            ("int8", "half"), (2, 4, 8), ("all_gather", "reduce_scatter", "all_reduce", "alltoall"), (10, 20, 30)
        )
    ]  # fmt: skip


@pytest.fixture
def systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the systems of an installed package with one system."""
    site = tmp_path / "site"
    folder = site / "aiconfigurator_core" / "systems"
    data = folder / "data" / "made_up"
    write_table(data / "gemm/vllm/0.9.0/gemm_perf.parquet", gemm_rows(RATE / 3))
    write_table(data / "gemm/vllm/0.10.0/gemm_perf.parquet", gemm_rows(RATE))
    write_table(data / "attention/vllm/0.10.0/context_attention_perf.parquet", attention_rows())
    write_table(data / "comm/nccl/2.27/nccl_perf.parquet", nccl_rows())
    (folder / "made_up.yaml").write_text(yaml.safe_dump(SYSTEM))
    (folder.parent / "__init__.py").write_text("raise RuntimeError('the package runs')\n")
    (site / "aiconfigurator_core-7.8.dist-info").mkdir()
    (site / "aiconfigurator_core-7.8.dist-info" / "METADATA").write_text(
        "Name: aiconfigurator-core\nVersion: 7.8\n"
    )
    monkeypatch.syspath_prepend(str(site))
    importlib.invalidate_caches()
    yield folder
    assert "aiconfigurator_core" not in sys.modules


def imported(out: Path) -> Device:
    assert main(["calibrate", "--import", "made_up", "-o", str(out)]) == 0
    return parse_devices(str(out), lambda: pytest.fail("not local"))[1]


def test_a_file_has_the_newest_tables_and_names_their_sources(
    systems: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "mine.toml"
    device = imported(out)
    words = capsys.readouterr().out
    assert "gemm of vllm 0.10.0: " in words and f"shardwright plan JOB.toml --on 4x{out}" in words
    values = tomllib.loads(out.read_text())
    assert values["measured"]["source"] == {
        "products": "aiconfigurator-core 7.8, gemm of vllm 0.10.0",
        "attention": "aiconfigurator-core 7.8, attention of vllm 0.10.0; forward",
        "links": "aiconfigurator-core 7.8, comm of nccl 2.27, 4 GPUs",
    }
    assert values["speed"]["source"].startswith("aiconfigurator-core 7.8, systems/made_up.yaml, with 700 W; ")
    tables = values["measured"]["kernels"]
    assert set(tables) == {PRODUCTS, ATTENTION} and 100 < len(tables[PRODUCTS]) <= MOST
    assert not any(size % 32 for row in tables[PRODUCTS] for size in row[1:4])
    figures, shipped = device.figures, known_devices()["h100"]
    assert figures is not None and shipped.figures is not None and device.nbytes == shipped.nbytes
    assert (figures.bandwidth, figures.within, figures.across, figures.node) == (3e12, 4e11, 4e10, 4)
    assert figures.flops["bfloat16"] == 900e12 and figures.flops["float8"] == 1800e12
    assert figures.units == shipped.figures.units


def test_plans_have_the_tables_and_shares_of_figures_for_the_rest(systems: Path, tmp_path: Path) -> None:
    figures = imported(tmp_path / "mine.toml").figures
    assert figures is not None
    without = Rates.of(type(figures)(**{**vars(figures), "measured": None}))
    rates = Rates.of(figures)

    def seconds(kernel: Kernel) -> float:
        return rates.seconds(kernel, work_of(kernel))

    assert seconds(WIDE) == pytest.approx(2 * 4096**3 / RATE, rel=1e-3)  # the file has four digits
    assert seconds(FORWARD) == pytest.approx(work_of(FORWARD).flops / OF_ATTENTION, rel=1e-3)
    for other in (BACKWARD, ADD, WIDE._replace(dtype="float32")):
        assert seconds(other) == without.seconds(other, work_of(other)), other.name
        assert rates.host(other, work_of(other)) == without.host(other, work_of(other))
    gather = Kernel("c10d.allgather", "compute", 5 << 28, ((1 << 28,),), "bfloat16", (4, 1))
    assert rates.collective(gather) == pytest.approx(GIGABYTE * (1 << 30) / 1e9, rel=1e-3)
    across = gather._replace(group=(8, 1))
    assert rates.collective(across) == without.collective(across)
    assert ranges_of(figures) == ranges_of(without.figures)
    low = rates.with_share("products", ranges_of(figures)["products"].low)
    assert low.seconds(WIDE, work_of(WIDE)) > seconds(WIDE)


def test_an_older_table_of_attention_has_no_windows(systems: Path, tmp_path: Path) -> None:
    rows = [each for each in attention_rows() if not each.pop("window_size")]
    write_table(systems / "data/made_up/attention/vllm/0.10.0/context_attention_perf.parquet", rows)
    figures = imported(tmp_path / "mine.toml").figures
    assert figures is not None
    seconds = Rates.of(figures).seconds(FORWARD, work_of(FORWARD))
    assert seconds == pytest.approx(work_of(FORWARD).flops / OF_ATTENTION, rel=1e-3)


def test_points_are_thinned_evenly_over_sizes_without_exceptions() -> None:
    points: list[Point] = [
        (m, n, 9.0 if m == 64 else m * n) for m in range(1, 200) for n in (1, 16, 256, 4096)
    ]
    chosen = thinned(points, 40)
    assert len(chosen) <= 40 and set(chosen) <= set(points) and 64 not in {each[0] for each in chosen}
    for n in (1, 16, 256, 4096):
        logarithms = [math.log2(each[0]) for each in chosen if each[1] == n]
        assert max(b - a for a, b in itertools.pairwise(logarithms)) <= 2.5
    assert thinned(points[:3], 40) == sorted(points[:3])


@pytest.mark.parametrize(
    ("missing", "arguments", "message"),
    [
        ("", ["made_ip"], "expected a system of aiconfigurator-core, such as made_up, found 'made_ip'"),
        ("", ["made_up", "--nproc", "2"], "--import measures nothing; leave out --device, --nproc and --most"),
        ("data/made_up/gemm/vllm", ["made_up"], "has no table systems/data/made_up/gemm/vllm/*/gemm_perf.parquet"),
        ("data/made_up/attention", ["made_up"], "has no table systems/data/made_up/attention/vllm/*/context_att"),
        ("data/made_up/comm", ["made_up"], "has no table systems/data/made_up/comm/nccl/*/nccl_perf.parquet"),
        ("..", ["made_up"], "expected the package aiconfigurator-core, found none; pip install aiconfigurator-core"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(
    systems: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    missing: str,
    arguments: list[str],
    message: str,
) -> None:
    if missing:
        shutil.rmtree((systems / missing).resolve())
        importlib.invalidate_caches()
    assert main(["calibrate", "--out", str(tmp_path / "mine.toml"), "--import", *arguments]) != 0
    error = capsys.readouterr().err.strip()
    assert message in error and "\n" not in error
    assert not (tmp_path / "mine.toml").exists()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            None,
            "cannot read systems/data/made_up/gemm/vllm/0.10.0/gemm_perf.parquet of aiconfigurator-core: ",
        ),
        ([{"m": 64, "n": 64, "latency": 1.0}], "has no columns device, gemm_dtype, k"),
        ([{**gemm_rows(RATE)[0], "gemm_dtype": "fp8"}], "has no rows with gemm_dtype bfloat16"),
    ],
)
def test_a_table_of_another_form_is_one_line(
    systems: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    rows: list[dict[str, Any]] | None,
    message: str,
) -> None:
    file = systems / "data/made_up/gemm/vllm/0.10.0/gemm_perf.parquet"
    if rows is None:
        file.write_bytes(b"no table")
    else:
        write_table(file, rows)
    assert main(["calibrate", "--import", "made_up", "-o", str(tmp_path / "mine.toml")]) != 0
    error = capsys.readouterr().err.strip()
    assert message in error and "\n" not in error


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpu: [", "cannot read systems/made_up.yaml: "),
        ("gpu: {}\n", "needs node.num_gpus_per_node, a number, found None"),
        (yaml.safe_dump({**SYSTEM, "gpu": {"sm_version": 75}}), "compute capability 8.0 or later, found 7.5"),
    ],
)
def test_figures_of_another_form_are_one_line(
    systems: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    (systems / "made_up.yaml").write_text(text)
    assert main(["calibrate", "--import", "made_up", "-o", str(tmp_path / "mine.toml")]) != 0
    error = capsys.readouterr().err.strip()
    assert message in error and "\n" not in error
