"""Figures that pages and pictures quote are those of the committed results in benchmarks/results."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.peers.committed import PICTURE, RESULTS, read, svg
from shardwright.planner.speed import INSIDE, PUBLISHED

ROOT = Path(__file__).resolve().parents[1]
#: Columns of the README's table.
README_ENGINES = ("Shardwright zero3", "FSDP2", "Megatron-FSDP", "DeepSpeed ZeRO-3")
#: Columns of the table of ratios in benchmarks/README.md, after the model and the version of torch.
RATIOS = (
    "plain torch", "DDP", "FSDP1", "DeepSpeed ZeRO-1", "DeepSpeed ZeRO-3", "Shardwright ddp", "Shardwright zero1",
    "Shardwright zero2", "Shardwright zero3", "Shardwright zero3, arena", "Shardwright zero3, gloo",
)  # fmt: skip
MIGRATED = {"ddp": "DDP", "fsdp1": "FSDP1", "fsdp2": "FSDP2", "deepspeed": "DeepSpeed ZeRO-3"}
MARKS = " *¹²³⁴"


def tables(name: str) -> list[list[list[str]]]:
    """The tables of a page, each as rows of cells, without bold type and marks of footnotes."""
    text = (ROOT / name).read_text(encoding="utf-8")
    found = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    return [
        [[cell.strip(MARKS) for cell in line.strip().strip("|").split("|")] for line in table.splitlines()]
        for table in found
    ]


def table_with(name: str, cell: str) -> list[list[str]]:
    """The table of a page that has a cell with this text."""
    return next(table for table in tables(name) if any(cell in row for row in table))


def row_of(table: list[list[str]], name: str) -> list[list[float]]:
    """The numbers in each cell of a row after the first cell."""
    cells = next(row for row in table if row[0] == name)[1:]
    return [[float(part) for part in re.findall(r"\d+(?:\.\d+)?", cell)] for cell in cells]


def test_the_readme_has_the_figures_of_the_results() -> None:
    committed = read()
    table = table_with("README.md", "host time per unit of a step")
    assert table[0][1:] == ["Shardwright", "FSDP2", "Megatron-FSDP", "DeepSpeed ZeRO-3"]
    ours, gloo, fsdp2, deepspeed = (
        [[model.times[name] for model in committed.models]]
        for name in ("Shardwright zero3", "Shardwright zero3, gloo", "FSDP2", "DeepSpeed ZeRO-3")
    )
    assert row_of(table, "time of a step, shared memory")[:1] == ours
    with_gloo = row_of(table, "time of a step, gloo, as between hosts")
    assert [with_gloo[0], with_gloo[3]] == [*gloo, *deepspeed]
    assert {*with_gloo[1]} == {*fsdp2[0]} == {1.0}
    host = row_of(table, "host time per unit of a step")
    named = dict(zip(README_ENGINES, host, strict=True))
    assert {name: each[0] for name, each in named.items() if each} == {
        name: committed.host[name] for name in README_ENGINES if name in committed.host
    }
    memory = row_of(table, "largest memory of a step, MiB a rank")
    for name, shown in zip(README_ENGINES, memory, strict=True):
        most = [model.most[name] for model in committed.models if name in model.most]
        assert shown == [float(f"{each:.0f}") for each in most], name


def test_the_readme_s_counts_are_those_of_the_benchmarks_page() -> None:
    shown = row_of(
        table_with("README.md", "dispatched operations per unit"), "dispatched operations per unit"
    )
    counts = table_with("benchmarks/README.md", "shardwright")
    assert shown[:2] == [row_of(counts, "shardwright")[0], row_of(counts, "FSDP2")[0]]


@pytest.mark.parametrize("page", MIGRATED)
def test_a_page_of_a_library_has_the_figures_of_the_results(page: str) -> None:
    model = read().models[0]
    name = f"docs/migration/{page}.md"
    assert RESULTS.name in (ROOT / name).read_text() and "6 layers" in model.title
    table = table_with(name, "Shardwright zero3, gloo")
    engines = table[0][1:]
    assert engines == [MIGRATED[page], "Shardwright zero3, gloo", "Shardwright zero3"]
    for row, figures in (
        ("time of a step, FSDP2 = 1", model.times),
        ("memory between steps, MiB a rank", model.between),
        ("largest memory in a step, MiB a rank", model.most),
    ):
        assert row_of(table, row) == [[figures[engine]] for engine in engines]


@pytest.mark.parametrize("version", ["2.13", "2.15"])
def test_the_benchmarks_page_has_the_ratios_of_the_results(version: str) -> None:
    models = read(RESULTS.with_name(f"peers-torch-{version}-cpu.txt")).models
    rows = [row[2:] for row in table_with("benchmarks/README.md", "zero3, arena") if row[1] == version]
    shown = [{name: float(cell) for name, cell in zip(RATIOS, row, strict=True) if cell} for row in rows]
    assert shown == [{name: model.times[name] for name in RATIOS if name in model.times} for model in models]


def test_the_features_page_has_the_differences_of_the_results() -> None:
    results = "benchmarks/results/losses-torch-2.13-cpu.txt"
    pairs = {tuple(sorted(row[:2])): row[2] for row in table_with(results, "max diff")[2:]}
    shown = {}
    for engines, dtypes, difference in table_with("docs/features.md", "largest difference")[2:]:
        ending = "-bf16" if dtypes.startswith("bfloat16") else ""
        shown[tuple(sorted(f"{name}{ending}" for name in re.findall(r"`(\w+)`", engines)))] = difference
    assert shown == pairs


#: A page's table by a cell that no other has, its results, and the columns that they do not have.
OF_RESULTS = [
    ("benchmarks/README.md", "blocked, s, 1 and 2 ranks", "checkpoints-torch-2.13-cpu", ()),
    ("benchmarks/README.md", "install, s", "first-loss-torch-2.13-cpu", ()),
    ("benchmarks/README.md", "tokens made, 1 process", "data-torch-2.13-cpu", ()),
    ("docs/planning_accuracy.md", "live", "published-rows", ()),
    ("docs/planning_accuracy.md", "8B, the same compiled", "published-rows", ("published",)),
    ("docs/planning_accuracy.md", "FSDP over 32", "hsdp-rows", ()),
    ("docs/planning_accuracy.md", "context 8, 256k", "trainer-rows", ()),
    ("docs/planning_accuracy.md", "160 wide, 8 layers", "calibrated-torch-2.13-cpu", ()),
]  # fmt: skip


@pytest.mark.parametrize(("page", "cell", "results", "others"), OF_RESULTS)
def test_each_row_of_a_table_has_the_figures_of_one_row_of_its_results(
    page: str, cell: str, results: str, others: tuple[str, ...]
) -> None:
    number = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?")
    text = (RESULTS.parent / f"{results}.txt").read_text(encoding="utf-8")
    committed = [[float(n.replace(",", "")) for n in number.findall(line)] for line in text.splitlines()]

    def has(figures: list[float], shown: str) -> bool:
        half = 0.5 * 10.0 ** -len(shown.partition(".")[2])
        return any(abs(float(shown.replace(",", "")) - each) <= 1.001 * half for each in figures)

    head, _, *rows = table_with(page, cell)
    for row in rows:
        cells = [cell for name, cell in zip(head[1:], row[1:], strict=True) if name not in others]
        parts = [cell.split(", ") for cell in cells if not re.search("[a-z]{5}", cell)]
        for each in range(max(map(len, parts))):  # "0.49, 0.16" are of two rows
            shown = [n for part in parts if part[each:] for n in number.findall(part[each])]
            assert shown and any(all(has(figures, n) for n in shown) for figures in committed), row


def test_plans_say_how_many_published_speeds_were_inside_their_ranges() -> None:
    number = r"\d+(?:,\d{3})*"
    rows = [
        [float(each.replace(",", "")) for each in found]
        for name in ("published-rows", "hsdp-rows", "trainer-rows")
        for found in re.findall(
            f"({number})-({number}) +({number})", (RESULTS.parent / f"{name}.txt").read_text(encoding="utf-8")
        )
    ]
    assert (sum(low <= published <= high for low, high, published in rows), len(rows)) == (INSIDE, PUBLISHED)
    page = (ROOT / "docs/planning_accuracy.md").read_text(encoding="utf-8")
    assert f"{INSIDE} of {PUBLISHED} published speeds" in page


def test_the_picture_is_drawn_from_the_results() -> None:
    assert PICTURE.read_text(encoding="utf-8") == svg(read().models), "python -m benchmarks.peers.committed"


def test_no_page_names_a_time_beside_fsdp2_s_that_is_not_compared() -> None:
    """A ratio in the middle of a sentence stays as it is when the results change: pages link to a table instead."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    found = [
        f"{page.name}: {sentence}"
        for page in pages
        for sentence in re.findall(r"[^.|\n]*\b0\.\d+ of FSDP2's time", page.read_text(encoding="utf-8"))
    ]
    assert found == []
