"""Pictures and lines of a run explain themselves: names, units and meanings are in what a person sees."""

from __future__ import annotations

import io
import json
import math
import re
import shutil
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from shardwright import cli
from shardwright.engine.memory import Item, Plan, pack, slots
from shardwright.train.commands import compare
from shardwright.train.config.catalog import figures, records
from shardwright.train.report import console, plots
from shardwright.train.report.plan_picture import in_ranges, plan_figure, short_names
from shardwright.train.step.account.conclusion import validation_lines
from shardwright.train.step.account.notices import first_loss_in_words
from tests.train.kit.jobs import config_file, tiny, train_here

RECORD = records.StepRecord(
    step=1, loss=5.9, grad_norm=1.25, lr=1e-3, samples=8, seconds=0.5, data_seconds=0.01, tokens_per_second=4096.0,
    flops_per_second=2e12, mfu=0.25, memory_active=2**30, memory_reserved=2**31, memory_total=2**34,
    validation_loss=3.5, extra_losses={"balance": 1.0, "mtp": 6.0},
)  # fmt: skip

KIB = 1024


def texts(figure: Figure) -> list[str]:
    """All that is written in a figure, in its legends too."""
    from matplotlib.text import Text

    return [text.get_text() for text in figure.findobj(Text) if text.get_text()]


def steps_of_a_model(units: int, shard: int) -> list[Item]:
    """Items of a step with `units` units of 1 MiB whose gradients' shards have `shard` bytes."""
    end = 4 * units
    items = [Item("Model", "parameters", 200 * KIB, ((1, end),))]
    for i in range(units):
        backward = end - 2 * i
        items.append(Item(f"layers.{i}", "parameters", 2**20, ((2 + i, 4 + i), (backward - 2, backward))))
        items.append(Item(f"layers.{i}", "gradients", shard, ((backward, end + 1 + i),)))
    return items


# ------------------------------------------------------------------------------
# Memory plans


def test_plan_names_units_sizes_and_whose_bytes_it_counts() -> None:
    figure = plan_figure(pack(steps_of_a_model(4, 500 * KIB)), "job", "arena", 3)
    written = texts(figure)
    title = next(text for text in written if text.startswith("Memory plan of job"))
    assert "rank 3 alone" in title and "memory=arena" in title and "MiB" in title
    assert any("Not counted" in text and "buffers" in text and "activations" in text for text in written)
    for i in range(4):
        assert written.count(f"layers.{i}") == 3  # twice leased for parameters, once for gradients
    axes = figure.axes[0]
    assert axes.get_ylabel() == "address in the block (MiB)" and "leases and releases" in axes.get_xlabel()
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert any(label.startswith("parameters: ") for label in labels)
    assert any(label.startswith("gradients: ") for label in labels)
    assert any("no plan can be smaller" in label for label in labels)
    assert figure.legends[0].get_title().get_text() == ""


@pytest.mark.parametrize("units", [4, 30])
def test_names_stay_inside_their_blocks_and_a_key_has_the_others(units: int) -> None:
    plan = pack(steps_of_a_model(units, 2 * KIB))  # too thin for any name
    figure = plan_figure(plan, "job", "arena", 0)
    figure.draw_without_rendering()
    axes = figure.axes[0]
    boxes = [patch.get_window_extent() for patch in axes.patches]
    for text in axes.texts:
        extent = text.get_window_extent()
        x, y = (extent.x0 + extent.x1) / 2, (extent.y0 + extent.y1) / 2
        box = next(box for box in boxes if box.contains(x, y))
        assert box.x0 <= extent.x0 and extent.x1 <= box.x1 and box.height >= 0.7 * extent.height
    key = figure.legends[0].get_title().get_text()
    assert f"Without room for a name: gradients of layers.0-{units - 1}" in key and "memory_plan.json" in key


def test_slots_have_their_sizes() -> None:
    items = [i for i in steps_of_a_model(4, KIB) if i.kind == "parameters" and i.unit != "Model"]
    items = [replace(item, nbytes=item.nbytes // (1 + number)) for number, item in enumerate(items)]
    plan = slots(items, 2)
    written = texts(plan_figure(plan, "job", "max_pool", 0))
    assert any("2 slots of" in text for text in written)
    assert "slot 1\n1.00 MiB\nsize of layers.0" in written


def test_long_names_of_runs_and_units_stay_in_the_picture() -> None:
    items = [i for i in steps_of_a_model(4, KIB) if i.kind == "parameters"]
    items = [replace(item, unit=f"model.transformer.decoder.{item.unit}") for item in items]
    figure = plan_figure(slots(items, 2), "a-name-of-a-run-" * 6, "max_pool", 0)
    figure.draw_without_rendering()
    extent = figure.get_tightbbox()
    assert extent.x0 >= 0 and extent.x1 <= figure.get_figwidth() and extent.y1 <= figure.get_figheight()
    assert figure.axes[0].get_window_extent().width > 0.75 * figure.bbox.width


def test_plans_without_leases_are_drawn() -> None:
    written = texts(plan_figure(Plan((), (), 0, 0), "job", "arena", 0))
    assert "Memory plan of job, rank 0 alone: memory=arena, one block of 0 B" in written


def test_short_names_and_ranges() -> None:
    assert short_names(["model.layers.0", "model.layers.10", "norm"]) == {
        "model.layers.0": "0", "model.layers.10": "10",
    }  # fmt: skip
    assert short_names(["encoder.0", "decoder.0", "decoder.1"]) == {"decoder.1": "1"}
    names = ["layers.2", "norm", "layers.0", "layers.1", "layers.7", "head.4"]
    assert in_ranges(names) == ["layers.0-2", "layers.7", "head.4", "norm"]


def test_a_run_says_whose_memory_it_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (
        "--parallel.engine",
        "shardwright",
        "--parallel.memory",
        "arena",
        "--run.dir",
        tmp_path / "run",
    )
    assert train_here(config_file(tmp_path), *arguments) == 0
    out = capsys.readouterr().out
    assert "memory of rank 0 alone, without activations" in out and "buffers" in out
    assert "leased  up to" in out and "plan    arena of" in out
    assert (tmp_path / "run" / "memory.txt").read_text().startswith("Memory of rank 0 alone.")
    assert (tmp_path / "run" / "memory_plan.png").read_bytes().startswith(b"\x89PNG")
    assert out.count("figures of a step:") == 1 and "MFU" not in out


# ------------------------------------------------------------------------------
# Losses


def records_of(losses: list[float], validation: float | None = None) -> list[dict[str, Any]]:
    last = {"validation_loss": validation}
    records = [{"step": n, "loss": loss, "validation_loss": None} for n, loss in enumerate(losses, 1)]
    return [*records[:-1], {**records[-1], **last}]


def test_loss_curve_shows_the_loss_of_equally_likely_tokens() -> None:
    written = texts(plots.loss_figure(records_of([5.9, 4.0, 3.0], 2.5), "job", 256))
    assert "ln(256) = 5.545: all tokens equally likely" in written
    assert any(text.startswith("training:") and "before its update" in text for text in written)
    assert any(text.startswith("validation:") and "after the update" in text for text in written)
    assert not any("ln(" in text for text in texts(plots.loss_figure(records_of([1.0, 0.9]), "job", 256)))


def test_a_loss_above_and_one_below_are_explained() -> None:
    note = first_loss_in_words(5.9, 256)
    assert note is not None and f"ln(256) = {math.log(256):.4f}" in note and "random weights" in note
    assert first_loss_in_words(5.5, 256) is None
    far = first_loss_in_words(128 * 5.6, 256)
    assert (
        far is not None and "129 times ln(256)" in far and "by chance" not in far and "initial values" in far
    )
    summed = first_loss_in_words(128 * 5.6, 256, "my model", 128)
    assert summed is not None and "loss(batch) of my model seems to be a sum" in summed
    # Divided by its targets this loss is smaller than any model's.
    large = first_loss_in_words(20.0, 256, "my model", 2048)
    assert (
        large is not None and "seems to be a sum" not in large and "look at loss(batch) of my model" in large
    )
    config = tiny()
    assert validation_lines(None, 2.0, config.data) == ["  validation      none"]
    assert validation_lines(2.5, 2.0, config.data) == [
        "  validation      2.5000 on the text's last 5%, which no step trains on"
    ]
    lower = " ".join(validation_lines(1.5, 2.0, config.data))
    assert "lower than the training loss" in lower and "after the step's update" in " ".join(lower.split())


# ------------------------------------------------------------------------------
# The terminal


def test_every_figure_of_a_step_is_explained() -> None:
    shown = "  ".join(figures.texts_of(RECORD))
    assert "mem 1.00/2.00 GiB (6%/12%)" in shown and "data 2.0%" in shown and "MFU 25.0%" in shown
    for on_gpu in (False, True):
        run = figures.RunFacts(
            on_gpu=on_gpu,
            has_validation=True,
            has_norm=True,
            has_mfu=True,
            auxiliary={"mtp": 0.3, "balance": 0.01},
            meanings={"balance": "load of the experts; 2: all equal"},
            metrics={},
        )
        key = console.explain_figures(run)
        names = [line.split()[0] for line in key.splitlines()[1:]]
        assert all(name in shown for name in names) and len(names) == len(figures.texts_of(RECORD))
        assert max(map(len, key.splitlines())) <= 80
        assert "2: all equal" in key and "1: all equal" not in key
    bare = replace(RECORD, mfu=None, grad_norm=None, validation_loss=None, extra_losses={})
    key = console.explain_figures(figures.RunFacts(False, False, False, False, {}, {}, {}))
    assert len(key.splitlines()) - 1 == len(figures.texts_of(bare)) == 5
    assert "n/a" not in "".join(figures.texts_of(bare))


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_bar_labels_its_times_and_keeps_numbers_with_their_units(columns: int) -> None:
    file = io.StringIO()
    terminal = Console(file=file, force_terminal=True, width=columns, height=30, color_system=None)
    bar = console.Bar(100_000, 0, 1, terminal)
    bar.step(replace(RECORD, step=50_000))
    bar.close(records.RunEnd("finished", 50_000))
    shown = file.getvalue()
    assert all(part in shown for part in figures.texts_of(RECORD) if len(part) <= columns)
    if columns >= 80:
        line = next(line for line in shown.splitlines() if "50000/100000 steps" in line)
        assert line.index(" elapsed ") < line.index(" left")


def test_lines_are_filled_and_parts_stay_whole() -> None:
    assert console.lines_of(["aa", "bb", "cc"], 6) == ["aa  bb", "cc"]
    assert console.lines_of(["longer", "b"], 3) == ["longer", "b"]
    assert console.lines_of([], 80) == []


# ------------------------------------------------------------------------------
# Comparisons


def with_settings(source: Path, target: Path, **settings: str) -> Path:
    """A copy of a run whose last session had other settings."""
    shutil.copytree(source, target)
    record = json.loads((target / "run.json").read_text())
    record["sessions"][-1].update(settings)
    (target / "run.json").write_text(json.dumps(record))
    return target


def test_comparison_shows_settings_that_differ(
    sharded_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [
        sharded_run,
        with_settings(sharded_run, tmp_path / "pooled", memory="max_pool"),
        with_settings(sharded_run, tmp_path / "other", strategy="zero1", layout="ragged"),
    ]
    capsys.readouterr()
    assert cli.main(["compare", *map(str, runs), "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "Same in all runs: engine shardwright, 2 ranks, dtypes fp32" in shown
    header = next(line.split() for line in shown.splitlines() if "strategy" in line)
    assert header == ["run", "strategy", "layout", "memory"]
    rows = [line.split() for line in shown.splitlines()]
    assert ["pooled", "zero3", "per_parameter", "max_pool"] in rows
    assert ["other", "zero1", "ragged", "dynamic"] in rows
    assert "relative to the first run" in shown and "all ranks together" in shown
    written = json.loads((tmp_path / "compare.json").read_text())["runs"]
    assert [run["memory"] for run in written] == ["dynamic", "max_pool", "dynamic"]


def test_runs_of_before_settings_were_recorded_have_those_of_their_configuration(
    sharded_run: Path, plain_run: Path, tmp_path: Path
) -> None:
    older = shutil.copytree(sharded_run, tmp_path / "older")
    record = json.loads((older / "run.json").read_text())
    for key in ("strategy", "layout", "memory"):
        del record["sessions"][-1][key]
    (older / "run.json").write_text(json.dumps(record))
    assert compare.read_run(older).settings == compare.read_run(sharded_run).settings
    plain = compare.read_run(plain_run).settings
    assert plain["strategy"] == plain["layout"] == plain["memory"] == "-"
    assert "strategy" not in compare.settings_in_words(plain)


def test_tables_fit_a_narrow_terminal(sharded_run: Path, plain_run: Path) -> None:
    runs = [compare.read_run(path) for path in (sharded_run, plain_run)]
    names = ["llama-debug-20260101-120000", "another"]
    figures = [compare.figures_of(run, runs[0]) for run in runs]
    console = Console(width=80, file=io.StringIO(), record=True)
    settings = compare.split_settings(runs)[1]
    assert isinstance(compare.settings_of_runs(names, settings, Console(width=140)), Table)
    console.print(compare.settings_of_runs(names, settings, console))
    console.print(compare.table_of(names, figures))
    console.print(compare.explanation(runs), markup=False)
    console.print(compare.memory_table(names, figures))
    console.print(compare.memory_explanation(runs, figures), markup=False)
    shown = console.export_text()
    assert "…" not in shown and all(len(line) <= 80 for line in shown.splitlines())
    assert f"{figures[0]['train_loss']:.6f}" in shown
    assert "memory dynamic" in " ".join(shown.split()) and "engine none" in shown


def test_names_tell_runs_apart(sharded_run: Path, tmp_path: Path) -> None:
    copies = [shutil.copytree(sharded_run, tmp_path / name / "run") for name in ("a", "b")]
    runs = [compare.read_run(path) for path in copies]
    assert compare.names_of(runs) == ["a/run", "b/run"]
    assert compare.names_of([runs[0], runs[0]]) == ["run (1)", "run (2)"]


def test_comparison_picture_names_runs_with_their_settings() -> None:
    steps = [{"step": n, "loss": 5.0 / n} for n in range(1, 5)]
    curves = [
        plots.Curve("ours", "memory arena", steps, {}, 1000.0, 1.0),
        plots.Curve("same", "memory dynamic", steps, dict.fromkeys(range(1, 5), 0.0), 900.0, 2.0),
        plots.Curve("apart", "strategy ddp", steps, dict.fromkeys(range(1, 5), 1e-07), 900.0, 2.0),
    ]
    figure = plots.comparison_figure(curves, "2 ranks, dtypes fp32", compare.BY_DEVICE)
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["ours: memory arena", "same: memory dynamic", "apart: strategy ddp"]
    written = texts(figure)
    assert "Same in all runs: 2 ranks, dtypes fp32" in written and "equal at every step: same" in written
    assert (
        "GiB, rank with the highest peak (CPU: its process)" in written
        and "tokens per second (median of the steps)" in written
    )
    colors = [line.get_color() for line in figure.axes[0].get_lines()]
    assert len(set(colors)) == 3
    assert len({str(color) for color in plots._colors(40)}) == 40


def test_equal_runs_have_no_scale_of_differences(tmp_path: Path) -> None:
    steps = [{"step": n, "loss": 5.0 / n} for n in range(1, 5)]
    equal = dict.fromkeys(range(1, 5), 0.0)
    curves = [
        plots.Curve(name, "", steps, equal if name != "a" else {}, 1000.0, 1.0) for name in ("a", "b", "c")
    ]
    figure = plots.comparison_figure(curves, "2 ranks", compare.BY_DEVICE)
    figure.draw_without_rendering()
    differences = figure.axes[1]
    assert "equal at every step: b, c" in texts(figure)
    assert list(differences.get_yticks()) == [] and differences.get_ylabel() == ""
    assert differences.get_xlim() == figure.axes[0].get_xlim()


@pytest.mark.parametrize("runs", [2, 12])
def test_long_names_are_numbered_and_nothing_leaves_the_picture(runs: int) -> None:
    steps = [{"step": n, "loss": 5.0 / n} for n in range(1, 5)]
    settings = "engine shardwright, strategy zero3, layout per_parameter, memory double_buffer, " * 2
    curves = [
        plots.Curve(f"llama-debug-20260101-1200{n:02}", settings, steps, {1: 0.0}, 1000.0, 1.0)
        for n in range(runs)
    ]
    figure = plots.comparison_figure(curves, settings, compare.BY_ENGINE)
    figure.draw_without_rendering()
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels[1].startswith("run 2, llama-debug-20260101-120001: engine shardwright")
    assert [text.get_text() for text in figure.axes[2].get_yticklabels()][:2] == ["run 1", "run 2"]
    assert "Difference from the loss of run 1" in texts(figure)
    whole = figure.bbox
    for part in (*figure.legends, *figure.axes):
        extent = part.get_tightbbox()
        assert extent is not None and whole.x0 <= extent.x0 and extent.x1 <= whole.x1
        assert whole.y0 <= extent.y0 and extent.y1 <= whole.y1


def test_docs_explain_every_key_of_the_metrics_file() -> None:
    page = (Path(__file__).parents[3] / "docs" / "reading_runs.md").read_text(encoding="utf-8")
    section = page.partition("## metrics.jsonl\n")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", section, re.M) == [
        *(column.name for column in fields(records.StepRecord)),
        "not_finite",
    ]
