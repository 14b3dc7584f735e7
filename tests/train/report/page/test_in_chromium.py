"""Pages in a headless Chromium, at the width of a desktop and of a phone: drawn without errors, and used by hand."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardwright.train.report.page.document import document
from shardwright.train.report.page.notes import notes_picture
from shardwright.train.report.page.plan import losses_of, plan_page
from tests.support import chromium
from tests.train.report.page.kit import HOSTILE, judged, noted, small_program

pytestmark = [
    pytest.mark.extensive("a browser"),
    pytest.mark.skipif(chromium.program() is None, reason="needs Chromium: apt-get install chromium"),
]
WIDTHS = (1440, 390)


@pytest.fixture(scope="module")
def browser() -> Iterator[chromium.Browser]:
    with chromium.browser() as found:
        yield found


def grid() -> dict[str, Any]:
    losses = losses_of(speed) if (speed := judged(small_program()).speed) else []
    plans = [
        {
            "at": [i, k], "keys": {"train.micro_batch": str(2**i)}, "fits": i < 2, "is_job": False, "losses": losses,
            "reserved_bytes": (i + 1) * (2 - k) << 34, "step_seconds": 2.0 / (1 + i) + k / 3,
            "tokens_per_second": 1000.0 * (1 + i) / (1 + k),
        }
        for i in range(3)
        for k in range(2)
        if (i, k) != (2, 1)
    ]  # fmt: skip
    dimensions = [
        {"name": "train.micro_batch", "values": ["1", "2", "4"]},
        {"name": "activations.checkpoint", "values": ["none", "full"]},
    ]
    return {"dimensions": dimensions, "plans": plans, "failed": [], "shown": "the job as it is"}


def plan_file(folder: Path, unit: str = "layers") -> Path:
    program = small_program(layers=12, unit=unit)
    file = folder / "plan.html"
    file.write_text(plan_page("a plan", ["facts"], program, judged(program), grid=grid()))
    return file


NORMS = {
    "units": ["Model", "layers.0", "norm"], "more_units": 2, "columns": [[1, 1], [10, 10], [20, 30]],
    "rows": [[0.5, 1.0, 2.0], [1e-3, 50.0, -1], [0.0, 1.0, None]],
}  # fmt: skip
"""Gradient norms of three units."""


def a_run(name: str, **values: Any) -> dict[str, Any]:
    curve = [[step, 5.0 / step] for step in range(1, 41)]
    session = {"start": "2026-01-01T00:00:00+00:00", "from_step": 0, "to_step": 40, "ranks": 2, "threads": 1,
               "device": "cpu", "engine": "shardwright", "status": "finished", "versions": {"torch": "2"}}  # fmt: skip
    curves = dict.fromkeys(
        ("loss", "tokens_per_second", "grad_norm", "memory_active", "memory_reserved", "lr"), curve
    )
    return {
        "name": name, "folder": "/runs/" + name, "status": "finished", "end": None, "on_gpu": False,
        "out_of_memory": False, "parameters": 10, "steps": 40, "results": {"train_loss": 1.0}, "plan": None,
        "split": {"data": 0.1, "the rest": 0.9}, "step_seconds": 1.0, "sessions": [session], "memory_text": "text",
        "incidents": [{"step": 3, "what": "restart", "text": name, "time": None}], "settings": {name: name},
        "notices": [name], "table": [[1, 5.0, None, 1.0, 10.0, 1.0, 3]], "largest_difference": None,
        "largest_at": None, "curves": {**curves, f"metrics/{name}": curve, "validation_loss": curve[::10]}, **values,
    }  # fmt: skip


def runs_file(folder: Path, *names: str) -> Path:
    runs = [a_run(name) for name in names]
    runs[0]["plan"] = {"fits": "yes", "device": "h100", "ranks": 2, "reserved_bytes": 5, "live_bytes": 4,
                       "exact": {}, "peak": {"text": names[0]}, "speed": {"step_seconds": [1, 2, 3]}}  # fmt: skip
    differ = [{"key": names[0], "values": [*names]}] if len(names) > 1 else []
    file = folder / "runs.html"
    file.write_text(document(names[0], {"kind": "runs", "runs": runs, "differences": differ, "thinned": 0}))
    return file


def check(browser: chromium.Browser) -> None:
    """Nothing is logged or loaded, and the page is no wider than its window."""
    assert browser.errors == []
    assert browser.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    inside = (
        "document.querySelector('main').getBoundingClientRect().right <= document.documentElement.clientWidth"
    )
    assert browser.evaluate(inside)


def text_of(browser: chromium.Browser, selector: str) -> str:
    return str(browser.evaluate(f"document.querySelector({selector!r}).textContent"))


@pytest.mark.parametrize("names", [("one",), ("one", "two")], ids=["one run", "two runs"])
def test_losses_and_perplexities_of_sets_are_shown(
    browser: chromium.Browser, tmp_path: Path, names: tuple[str, ...]
) -> None:
    results = {"train_loss": 1.0, "perplexity": 7.5, "metrics": {"validation_loss/code": 2.0}}
    runs = [a_run(name, results=results) for name in names]
    for run in runs:
        run["curves"]["validation_losses/code"] = [[10, 3.0], [20, 2.0]]
    file = tmp_path / "sets.html"
    file.write_text(
        document("sets", {"kind": "runs", "runs": runs, "differences": [], "thinned": 0}), encoding="utf-8"
    )
    browser.open(file, 1440)
    check(browser)
    cells = [name + value * len(names) for name, value in {
        "perplexity, last": "7.5", "validation loss on code": "2.0000", "perplexity on code": "7.39",
    }.items()]  # fmt: skip
    rows = browser.evaluate(
        "[...document.querySelectorAll('#results tbody tr')].map((each) => each.textContent)"
    )
    assert set(cells) <= set(rows)
    title = "Validation loss by set" if len(names) == 1 else "code (loss on a validation set)"
    titles = browser.evaluate("[...document.querySelectorAll('figcaption')].map((each) => each.textContent)")
    assert titles.count(title) == 1


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_pages_are_drawn(browser: chromium.Browser, tmp_path: Path, width: int, dark: bool) -> None:
    one = tmp_path / "one.html"
    run = a_run("one", noted=notes_picture(noted()), norms=NORMS)
    one.write_text(document("one", {"kind": "runs", "runs": [run], "differences": [], "thinned": 100}))
    for file in (plan_file(tmp_path), one, runs_file(tmp_path, "one", "two", "three")):
        browser.open(file, width, dark=dark)
        check(browser)
        assert browser.evaluate("document.querySelectorAll('svg').length") > 2
        assert browser.evaluate(
            "new Set([...document.querySelectorAll('[id]')].map((each) => each.id)).size"
        ) == (browser.evaluate("document.querySelectorAll('[id]').length"))
        assert browser.evaluate("[...document.querySelectorAll('th')].every((each) => each.scope)")
        assert not browser.evaluate(
            "/undefined|NaN|\\[object/.test(document.querySelector('main').textContent)"
        )
        ground = browser.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (ground == "rgb(255, 255, 255)") != dark


@pytest.mark.parametrize("width", WIDTHS)
def test_a_moment_is_chosen_by_a_click_and_by_keys(
    browser: chromium.Browser, tmp_path: Path, width: int
) -> None:
    browser.open(plan_file(tmp_path), width)
    browser.evaluate("document.getElementById('step').scrollIntoView()")
    tables = [(text_of(browser, "#tensors"), text_of(browser, "#moment"))]
    assert "the peak of the step" in tables[0][1]
    left, top, across = browser.evaluate(
        "(({left, top, width}) => [left, top, width])(document.getElementById('step').getBoundingClientRect())"
    )
    browser.click(left + 62 + 0.1 * (across - 74), top + 120)
    tables.append((text_of(browser, "#tensors"), text_of(browser, "#moment")))
    for key in ("PageDown", "ArrowRight", "ArrowDown", "End", "Home"):
        browser.press(key)
        tables.append((text_of(browser, "#tensors"), text_of(browser, "#moment")))
    for before, after in itertools.pairwise(tables):
        assert before[1] != after[1]
    assert len({tensors for tensors, _ in tables}) >= 5
    browser.press("+")
    browser.press("p")
    assert (text_of(browser, "#tensors"), text_of(browser, "#moment")) == tables[0]
    assert "live" in browser.evaluate("document.getElementById('step').getAttribute('aria-valuetext')")
    check(browser)


@pytest.mark.parametrize("width", WIDTHS)
def test_settings_are_chosen_with_sliders(browser: chromium.Browser, tmp_path: Path, width: int) -> None:
    browser.open(plan_file(tmp_path), width)
    browser.evaluate("document.getElementById('dimension-0').focus()")
    shown = [text_of(browser, "#planned")]
    browser.press("ArrowRight")
    shown.append(text_of(browser, "#planned"))
    assert browser.evaluate("document.getElementById('dimension-0').getAttribute('aria-valuetext')") == "4"
    browser.evaluate("document.getElementById('dimension-1').focus()")
    browser.press("ArrowRight")
    shown.append(text_of(browser, "#planned"))
    assert "fit" in shown[0] and "do not fit" in shown[1] and "were not planned" in shown[2]
    browser.evaluate("document.querySelector('#plans button').click()")
    assert text_of(browser, "#planned") == shown[1]
    check(browser)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_chart_is_read_with_keys(browser: chromium.Browser, tmp_path: Path, width: int) -> None:
    browser.open(runs_file(tmp_path, "one", "two"), width)
    browser.evaluate("document.querySelector('.charts .plot').focus()")
    browser.press("End")
    assert text_of(browser, ".charts .readout").startswith("Step 40: 1. one, training")
    browser.press("ArrowLeft")
    assert text_of(browser, ".charts .readout").startswith("Step 39: ")
    check(browser)


@pytest.mark.parametrize("width", WIDTHS)
def test_norms_of_units_are_read_with_keys_and_by_pointing(
    browser: chromium.Browser, tmp_path: Path, width: int
) -> None:
    file = tmp_path / "norms.html"
    runs = [a_run("one", norms=NORMS)]
    file.write_text(document("one", {"kind": "runs", "runs": runs, "differences": [], "thinned": 0}))
    browser.open(file, width)
    readout = "#unit-norms + .readout"
    browser.evaluate("document.querySelector('#unit-norms').focus()")
    browser.press("ArrowRight")
    assert text_of(browser, readout) == "Step 1, Model: 0.5"
    browser.press("ArrowDown")
    browser.press("End")
    assert text_of(browser, readout) == "Steps 20 to 30, layers.0: not finite"
    assert browser.evaluate("document.querySelector('#unit-norms').getAttribute('aria-valuenow')") == "20"
    assert "layers.0" in text_of(browser, "#unit-growth tbody tr")  # the first that is not finite
    browser.evaluate("document.querySelector('#unit-norms').scrollIntoView({ block: 'center' })")
    x, y = browser.evaluate(
        "(() => { const box = document.querySelector('#unit-norms').getBoundingClientRect();"
        " return [box.right - 20, box.top + 50]; })()"
    )
    browser.click(x, y)
    assert text_of(browser, readout) == "Steps 20 to 30, norm: no gradient"
    check(browser)


def test_sessions_begin_at_lines_in_charts_and_in_norms_of_units(
    browser: chromium.Browser, tmp_path: Path
) -> None:
    file = tmp_path / "norms.html"
    first, *_ = a_run("one")["sessions"]
    sessions = [first, first | {"from_step": 10}, first | {"from_step": 24}]
    runs = [a_run("one", norms=NORMS, sessions=sessions)]
    file.write_text(document("one", {"kind": "runs", "runs": runs, "differences": [], "thinned": 0}))
    browser.open(file, WIDTHS[0])
    assert browser.evaluate("document.querySelector('.charts .plot').querySelectorAll('.begin').length") == 2
    edges = browser.evaluate(
        "[...document.querySelectorAll('#unit-norms .begin')].map((each) => +each.getAttribute('x1'))"
    )
    left, across = browser.evaluate(
        "(({ x, width }) => [x, width])(document.querySelector('#unit-norms rect').getBBox())"
    )
    assert [(x - left) / across * 3 for x in edges] == pytest.approx([2, 2 + 5 / 11])
    browser.evaluate("document.querySelector('#unit-norms').focus()")
    browser.press("End")
    browser.press("End")
    assert text_of(browser, "#unit-norms + .readout").endswith("; a session begins here")
    check(browser)


@pytest.mark.parametrize("width", WIDTHS)
def test_hostile_names_are_shown_as_text(browser: chromium.Browser, tmp_path: Path, width: int) -> None:
    for file in (plan_file(tmp_path, HOSTILE), runs_file(tmp_path, HOSTILE, "two")):
        browser.open(file, width)
        check(browser)
        assert HOSTILE in text_of(browser, "main")
        assert browser.evaluate("document.querySelectorAll('img').length") == 0
        assert browser.evaluate("document.scripts.length") == 2


def test_data_of_an_unexpected_kind_leave_the_other_parts(browser: chromium.Browser, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    runs = [a_run("one", incidents=None)]
    file.write_text(document("one", {"kind": "runs", "runs": runs, "differences": [], "thinned": 0}))
    browser.open(file, WIDTHS[0])
    check(browser)
    assert "could not be drawn" in text_of(browser, "main")
    assert browser.evaluate("document.querySelectorAll('section').length") == 6


def test_lines_end_inside_long_names_behind_their_parts(browser: chromium.Browser, tmp_path: Path) -> None:
    browser.open(plan_file(tmp_path), 1440)
    parts = browser.evaluate(
        "breakable('backward: _log_softmax x.py:5, 2.07 s').map((each) => each.outerHTML || each).join('')"
    )
    assert parts == "backward: _log_<wbr>softmax x.<wbr>py:5, 2.07 s"
