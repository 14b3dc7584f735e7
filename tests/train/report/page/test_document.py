"""The file: hostile text stays text, nothing comes from elsewhere, and a large plan stays small."""

from __future__ import annotations

import base64
import hashlib
import random
import re

from shardwright.train.report.page.document import LIMIT, document, embedded, thinned
from shardwright.train.report.page.plan import plan_page
from tests.train.report.page.kit import HOSTILE, judged, read_page, small_program


def test_hostile_text_stays_text() -> None:
    program = small_program(unit=HOSTILE)
    text = plan_page(HOSTILE, [HOSTILE], program, judged(program))
    tags, texts, data = read_page(text)
    assert [name for name, _ in tags].count("script") == 2 and "img" not in [name for name, _ in tags]
    assert texts["title"] == HOSTILE and data["title"] == HOSTILE
    assert any(HOSTILE in each for each in data["plan"]["step"]["texts"])
    assert not re.search("[<>&\u2028]", embedded({"kind": HOSTILE, HOSTILE: [HOSTILE]}))


def test_it_needs_nothing_else_and_runs_no_other_script() -> None:
    tags, texts, _ = read_page(document("a", {"kind": "runs"}))
    assert not any({"src", "href"} & attributes.keys() for _, attributes in tags)
    policy = next(each["content"] for name, each in tags if name == "meta" and "http-equiv" in each)
    for kind in ("script", "style"):
        digest = base64.b64encode(hashlib.sha256(texts[kind].encode()).digest()).decode()
        assert policy is not None and f"{kind}-src 'sha256-{digest}'" in policy
    for text in (texts["script"], texts["style"]):
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|@import|url\(|fetch\(", text
        )


def test_a_large_plan_stays_small() -> None:
    text = plan_page("large", [], small_program(layers=6_000), judged(small_program()))
    assert len(text) < LIMIT
    assert len(read_page(text)[2]["plan"]["step"]["taken"]) > 1_000


def test_the_plan_has_the_figures_of_its_json() -> None:
    program = small_program()
    verdict = judged(program)
    plan = read_page(plan_page("a", [], program, verdict))[2]["plan"]
    assert plan["live_bytes"] == verdict.peak.nbytes == sum(each["bytes"] for each in plan["tensors"])
    assert verdict.speed is not None
    assert abs(sum(loss["seconds"] for loss in plan["losses"]) - verdict.speed.seconds[1]) < 1e-9


def test_thinned_curves_keep_their_ends_and_extremes() -> None:
    draw = random.Random(0)
    curve = [(step, draw.random()) for step in range(1, 5001)]
    curve[2345] = (2346, 99.0)
    few = thinned(curve, 100)
    assert len(few) <= 100 and few == sorted(few)
    assert few[0][0] == 1 and few[-1][0] == 5000 and [2346, 99.0] in few
    assert thinned(curve[:50], 100) == [[step, float(f"{value:.6g}")] for step, value in curve[:50]]
