"""Gradient norms by unit: they make the gradient norm of the step, cost no collective, and name units in incidents."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from shardwright.train.commands.pages.report import page_of
from shardwright.train.commands.pages.shown_run import read_shown_run
from shardwright.train.report.unit_norms import CELLS, UnitNorms, UnitNormsFile, heat_map, read_unit_norms
from shardwright.train.run.past import Past
from shardwright.train.run.position import Position
from shardwright.train.step.numerics import detect
from tests.support import multirank
from tests.train.kit.jobs import HYBRID, config_file, records, tiny, train_here, train_step, trainer
from tests.train.kit.plain_norms import plain_norms
from tests.train.report.page.kit import read_page

STRATEGIES, LAYOUTS = ("ddp", "zero1", "zero2", "zero3"), ("per_parameter", "ragged", "element")
FEW: list[dict[str, Any]] = [
    {"strategy": "zero1", "layout": "element"},
    {"strategy": "zero3", "layout": "ragged"},
    {"tensor": 2, "layout": "per_parameter"},
]
ALL: list[dict[str, Any]] = [
    *({"strategy": name, "layout": layout} for name in STRATEGIES for layout in LAYOUTS),
    *({"tensor": 2, "layout": layout} for layout in LAYOUTS[:2]),
    {"strategy": "zero3", "offload": "cpu"},
]
ON_FOUR: list[dict[str, Any]] = [
    {"strategy": "hsdp", "replicas": 2},
    {"strategy": "hsdp", "replicas": 2, "layout": "ragged"},
    {"strategy": "hfsdp", "replicas": 2},
    {"strategy": "zero3", "tensor": 2},
]


def check(rank: int, world_size: int, parallel: dict[str, Any], model: dict[str, Any] | None = None) -> None:
    """The units of a step have norms which make the norm of the step, and are all units with gradients."""
    config = tiny(
        model=model or {"n_kv_heads": 2},
        parallel={"engine": "shardwright", **parallel},
        train={"micro_batch": 1, "max_norm": 0.01},
    )
    job = trainer(config, rank, world_size)
    agreed = train_step(job).agreed
    job.close()
    norms = agreed.unit_norms
    assert agreed.norm is not None and len(norms) >= 4
    # Both are made of the same float32 norms of parameters, the one in float32 and the other in float64.
    assert math.hypot(*norms.values()) == pytest.approx(agreed.norm, rel=1e-5), parallel
    everyones: list[Any] = [None] * world_size
    dist.all_gather_object(everyones, dict(norms))
    assert all(each == everyones[0] for each in everyones), parallel


@multirank(2)
def test_the_norms_of_units_make_the_norm_of_the_step(rank: int, world_size: int) -> None:
    for options in FEW:
        check(rank, world_size, options)
    check(rank, world_size, {"expert": 2, "strategy": "zero3"}, HYBRID)


@pytest.mark.extensive("all strategies and layouts")
@multirank(2)
def test_so_with_all_strategies_and_layouts(rank: int, world_size: int) -> None:
    for options in ALL:
        check(rank, world_size, options)


@pytest.mark.extensive("four ranks")
@multirank(4)
def test_replicas_are_counted_once(rank: int, world_size: int) -> None:
    for options in ON_FOUR:
        check(rank, world_size, options)


@multirank(2)
def test_units_have_the_norms_of_the_plain_model_and_cost_no_collective(rank: int, world_size: int) -> None:
    calls: Counter[int] = Counter()
    found = {}
    all_reduce = dist.all_reduce
    for every in (0, 1):
        config = tiny(
            parallel={"engine": "shardwright"}, log={"unit_norms": every}, train={"accumulate": "hold"}
        )
        job = trainer(config, rank, world_size)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                dist,
                "all_reduce",
                lambda *a, every=every, **k: (calls.update([every]), all_reduce(*a, **k))[1],
            )
            found[every] = train_step(job).agreed.unit_norms
        job.close()
    assert calls[0] == calls[1] > 0 and found[0] == {}
    plain = plain_norms(tiny())
    for unit in ("layers.0", "layers.1"):
        # Gradients are means over other groupings of samples, in float32.
        assert found[1][unit] == pytest.approx(plain[unit], rel=1e-4)


def test_a_run_records_units_and_its_page_shows_them(tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = ("--run.dir", run, "--parallel.engine", "shardwright", "--run.sample_tokens", "0")
    config = config_file(tmp_path)
    assert train_here(config, *arguments, "--train.steps", "4", "--log.unit_norms", "2") == 0
    read = read_unit_norms(run / "unit_norms.jsonl")
    assert [*read.steps] == [1, 2, 4] and not read.damaged
    totals = {record["step"]: record["grad_norm"] for record in records(run)}
    for step, norms in read.steps.items():
        assert math.hypot(*(norm or 0.0 for norm in norms.values())) == pytest.approx(totals[step], rel=1e-3)
    page = json.loads(read_page(page_of([read_shown_run(run)]))[1]["data"])["runs"][0]
    assert page["norms"]["columns"] == [[1, 1], [2, 2], [4, 4]] and "layers.1" in page["norms"]["units"]


def test_a_file_goes_on_after_a_rewind_and_a_crash(tmp_path: Path) -> None:
    path = tmp_path / "unit_norms.jsonl"

    def session(steps_done: int, norms: dict[int, dict[str, float]]) -> None:
        file = UnitNormsFile(path, steps_done)
        for step, each in norms.items():
            file.unit_norms(step, each)

    session(0, {1: {"a": 1.0, "b": 2.0}, 10: {"a": 1.5, "b": math.inf}, 20: {"a": 1.0, "b": 1.0}})
    with path.open("a") as stream:
        stream.write('{"step": 30, "nor')
    session(9, {10: {"a": 1.25, "c": 3.0}})
    read = read_unit_norms(path)
    assert read.steps == {1: {"a": 1.0, "b": 2.0}, 10: {"a": 1.25, "c": 3.0}} and read.damaged == [5]
    picture = heat_map(read)
    assert picture is not None and picture["rows"] == [[1.0, 1.25], [2.0, None], [None, 3.0]]
    session(0, {1: {"a": 1.0}, 10: {"a": 2.0}})
    file = UnitNormsFile(path, 10)
    file.unit_norms(11, {"a": math.nan}, left_out=True)
    file.rewind(8)
    read = read_unit_norms(path)
    assert [*read.steps] == [1] and read.left_out == [(11, {"a": None})]
    picture = heat_map(read)
    assert picture is not None and picture["rows"] == [[1.0, -1]] and picture["left_out"] == [11]
    file.unit_norms(11, {"a": 3.0})
    assert heat_map(read_unit_norms(path))["columns"] == [[1, 1], [11, 11], [11, 11]]  # type: ignore[index]
    assert heat_map(read_unit_norms(tmp_path / "no")) is None


def test_a_picture_of_many_units_is_small_and_loses_no_peak() -> None:
    steps: dict[int, dict[str, float | None]] = {
        step: {f"layers.{unit}": 1.0 + unit for unit in range(400)} for step in range(1, 2001)
    }
    steps[777]["layers.300"] = 1e9
    steps[778]["layers.301"] = None
    picture = heat_map(UnitNorms(steps))
    assert picture is not None
    assert picture["more_units"] == 100 and len(picture["rows"]) * len(picture["columns"]) <= CELLS
    assert len(json.dumps(picture)) < 150_000
    row = picture["rows"][picture["units"].index("layers.300")]
    assert max(row) == 1e9 and -1 in picture["rows"][picture["units"].index("layers.301")]
    first, last = picture["columns"][row.index(1e9)]
    assert first <= 777 <= last


@multirank(2)
@pytest.mark.parametrize("every", [0, 1])
def test_incidents_name_units(rank: int, world_size: int, every: int) -> None:
    """Also if the step has not recorded its norms: they are computed again, from gradients that are clipped."""
    fault = {"on_spike": "skip", "spike_window": 4, "spike_sigmas": 1e-3, "on_non_finite": "skip"}
    config = tiny(
        parallel={"engine": "shardwright"}, log={"unit_norms": every}, fault=fault, train={"max_norm": 0.01}
    )
    job = trainer(config, rank, world_size)
    job.position = Position(step=0, samples=0, past=Past(losses=(0.0, 0.1)))
    seen: list[Any] = []
    unit_norms = detect._unit_norms
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(detect, "_unit_norms", lambda *a: (seen.append(unit_norms(*a)), seen[-1])[1])
        result = train_step(job)
        assert result.fault is not None and result.agreed.norm is not None
        text = result.fault.reason
        assert "is a spike" in text and "; largest gradient norms by unit: " in text
        assert math.hypot(*seen[0].values()) == pytest.approx(result.agreed.norm, rel=1e-4)
        weight = next(p for name, p in job.model.named_parameters() if "layers.1" in name)
        handle = weight.register_post_accumulate_grad_hook(
            lambda p: p.grad._local_tensor.fill_(math.nan)  # type: ignore[union-attr]
        )
        result = train_step(job)
        handle.remove()
    job.close()
    assert result.fault is not None
    assert "gradient norms are not finite in 1 of 4 units: layers.1" in result.fault.reason


def test_words_of_units_are_short() -> None:
    wrong = detect._units_in_words({f"layers.{n}": math.nan for n in range(5)})
    assert wrong == (
        "; gradient norms are not finite in 5 of 5 units: layers.0, layers.1, layers.2 and 2 more"
    )
    assert detect._units_in_words({"one": 1.0}) == ""
