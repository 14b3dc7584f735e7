"""metrics.jsonl with figures that are nan or infinite: strict JSON in the file, the same figures when it is read."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import pytest

from shardwright.train.config.catalog.records import scalars
from shardwright.train.errors import UserError
from shardwright.train.extend import RunEnd, StepRecord
from shardwright.train.report import plots
from shardwright.train.report.jsonl import JsonLines, drop_after, read_records
from tests.support.strict_json import WRONG, strict

RECORD = StepRecord(
    step=1, loss=2.5, grad_norm=1.0, lr=1e-3, samples=8, seconds=0.5, data_seconds=0.1, tokens_per_second=100.0,
    flops_per_second=1e9, mfu=0.5, memory_active=1, memory_reserved=2, memory_total=3, validation_loss=2.0,
    parts={"forward": 0.3, "host": 0.2}, extra_losses={"balance": 1.0, "mtp": 3.0}, metrics={"a": 1.0, "b.c": 2.0},
    validation_metrics={"rows": 4.0}, perplexity=7.0, validation_losses={"code": 5.0},
    validation_perplexities={"code": 148.0},
)  # fmt: skip
FIGURES = [
    each.name
    for each in fields(StepRecord)
    if each.init and "float" in str(each.type) and each.name != "seconds"
]


def broken(name: str, value: float) -> StepRecord:
    old: Any = getattr(RECORD, name)
    return replace(RECORD, **{name: {**old, next(iter(old)): value} if isinstance(old, dict) else value})


def written(folder: Path, *records: StepRecord) -> Path:
    file = folder / "metrics.jsonl"
    sink = JsonLines(file, 0, folder / "metrics.dropped.jsonl")
    for record in records:
        sink.step(record)
    sink.close(RunEnd("finished", len(records)))
    return file


def same(one: Any, other: Any) -> bool:
    return repr(one) == repr(other)  # nan == nan is false


@pytest.mark.parametrize("value", WRONG, ids=str)
@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_that_is_not_finite_is_null_in_the_file_and_itself_when_read(
    name: str, value: float, tmp_path: Path
) -> None:
    records = [RECORD, replace(broken(name, value), step=2), replace(RECORD, step=3)]
    file = written(tmp_path, *records)
    lines = [strict(line) for line in file.read_text().splitlines()]
    assert [set(line) - set(asdict(RECORD)) for line in lines] == [set(), {"not_finite"}, set()]
    figure = lines[1][name]
    assert figure is None or None in figure.values()
    assert same(read_records(file), [asdict(each) for each in records])
    drop_after(file, 2, tmp_path / "dropped")  # as a resume rewrites the file
    assert same(read_records(file), [asdict(each) for each in records[:2]])
    assert [strict(line) for line in file.read_text().splitlines()] == lines[:2]
    drop_after(file, 1, tmp_path / "dropped")
    assert strict((tmp_path / "dropped").read_text().splitlines()[-1]) == lines[1]


@pytest.mark.extensive("a picture of each", but=("loss-*", "validation_loss-*", "*-nan"))
@pytest.mark.parametrize("value", WRONG, ids=str)
@pytest.mark.parametrize("name", FIGURES)
def test_results_and_the_picture_take_it(name: str, value: float, tmp_path: Path) -> None:
    records = [asdict(replace(broken(name, value) if step else RECORD, step=step + 1)) for step in range(3)]
    session = dict.fromkeys(plots.SPEED, "same") | {"from_step": 0}
    results = plots.results(records, [session])
    if name in ("validation_loss", "loss"):
        assert same(results["train_loss" if name == "loss" else name], value)
    plots.loss_figure(records, "a run", 256).savefig(tmp_path / "loss.png")
    assert (tmp_path / "loss.png").stat().st_size


def test_a_null_of_another_program_is_nan_in_an_object_of_figures(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text(json.dumps({**asdict(RECORD), "metrics": {"a": None}}) + "\n")
    assert math.isnan(read_records(file)[0]["metrics"]["a"])


@pytest.mark.parametrize(
    "content",
    [3, ["loss"], {"loss": "much"}, {"nothing": {"a": "nan"}}, {"loss": {"a": "nan"}}, {"loss": None}],
    ids=str,
)
def test_a_damaged_line_is_one_error(content: Any, tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text(json.dumps({**asdict(RECORD), "not_finite": content}) + "\n")
    with pytest.raises(UserError, match=f"expected figures of the step in not_finite in line 1 of {file}"):
        read_records(file)


def test_metadata_of_the_fields_of_a_step_agrees_with_their_types() -> None:
    hints = get_type_hints(StepRecord)
    for each in fields(StepRecord):
        parts = get_args(hints[each.name])
        assert each.metadata.get("optional", False) is (type(None) in parts)
        assert each.metadata.get("numbers", False) is (get_origin(hints[each.name]) is Mapping)


def test_sinks_show_each_loss_once() -> None:
    shown = scalars(RECORD, every=1)
    assert {name for name in shown if not name.startswith("step/")} == {
        "loss/train", "loss/validation", "loss/mtp", "loss/balance", "metrics/a", "metrics/b.c", "validation/rows",
        "parts/forward", "parts/host",
        "loss/perplexity", "validation_loss/code",
    }  # fmt: skip
    assert {name for name in shown if name.startswith("step/")} == {
        "step/grad_norm", "step/lr", "step/samples", "step/seconds", "step/data_seconds", "step/tokens_per_second",
        "step/flops_per_second", "step/mfu", "step/memory_active", "step/memory_reserved", "step/memory_total",
    }  # fmt: skip
