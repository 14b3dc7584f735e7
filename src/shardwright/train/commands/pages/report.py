"""`shardwright report`: one HTML file about runs. It reads all that can be read of them, and says what cannot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from shardwright.common.json_text import strict_json
from shardwright.train.commands.pages.html_file import check_place, write_page
from shardwright.train.commands.pages.shown_run import Curve, ShownRun, read_shown_run, shortened
from shardwright.train.report.page.document import LIMIT, document, size_of, thinned
from shardwright.train.run.evaluations import TASKS

FILE = "report.html"  #: in the folder of the first run
OF_A_RUN = ("run.dir", "run.name")  #: settings that differ between any two runs
SIDE_BY_SIDE = (
    "validation_losses/",
    "extra_losses/",
    "metrics/",
    "validation_metrics/",
    TASKS,
)  #: drawn of several runs
FILES = {
    "curves": "metrics.jsonl", "settings": "config.toml", "noted": "step_notes.json", "plan": "logs/plan.json",
    "sessions": "run.json", "norms": "unit_norms.jsonl",
}  # fmt: skip
"""The file of each part of a page that may be large, by the part's key."""


class Share(NamedTuple):
    """The most that a page shows.

    Attributes:
        points: of curves.
        rows: incidents, and likewise sessions.
        characters: of memory.txt.
    """

    points: int
    rows: int
    characters: int

    def divided(self, curves: int, runs: int) -> Share:
        """Return the share of one curve and of one run."""
        shares = Share(self.points // curves, self.rows // runs, self.characters // runs)
        return Share(
            *(min(most, max(least, own)) for least, own, most in zip(LEAST, shares, MOST, strict=True))
        )


LEAST, MOST = Share(4, 10, 1_000), Share(1_000, 1_000, 100_000)  #: of one curve, and of one run
OF_ALL_RUNS = Share(30_000, 2_000, 300_000)


def report(runs: Sequence[Path], html: Path | None) -> int:
    """Write a page about one run, or several side by side; returns 0.

    Args:
        runs: their folders; the first one is the reference.
        html: the file (default: report.html in the first run's folder).

    Raises:
        UserError: a folder holds no run, the page is too large, or the file cannot be written.
    """
    file = runs[0] / FILE if html is None else html
    read = [read_shown_run(path) for path in runs]
    check_place(file)
    write_page(file, page_of(read), _advice(read))
    print(f"wrote {file}")
    return 0


def page_of(runs: Sequence[ShownRun]) -> str:
    """Return the text of the HTML file. It is below the limit of a page, unless what cannot be shortened is too
    large."""
    curves = [_curves(run, runs) for run in runs]
    each = OF_ALL_RUNS.divided(max(1, sum(map(len, curves))), len(runs))
    longest = max((len(curve) for own in curves for curve in own.values()), default=0)
    title = " and ".join(run.name for run in runs) if len(runs) < 3 else f"{len(runs)} runs"
    while True:
        data = {
            "kind": "runs",
            "thinned": each.points if longest > each.points else 0,
            "differences": _differences(runs),
            "runs": [
                {
                    **run.values(each.rows, each.characters),
                    **({"noted": None, "norms": None} if len(runs) > 1 else {}),  # these pictures are large
                    **_largest(own.get("difference", [])),
                    "curves": {key: thinned(curve, each.points) for key, curve in own.items()},
                }
                for run, own in zip(runs, curves, strict=True)
            ],
        }
        text = document(title, data)
        smaller = each.divided(2, 2)
        if size_of(text) < LIMIT or smaller == each:
            return text
        each = smaller


def _advice(runs: Sequence[ShownRun]) -> str:
    """Return the part that a user can leave out of a page which is too large."""
    if len(runs) > 1:
        return "Report fewer runs"
    (run,) = runs
    parts = {**run.values(LEAST.rows, LEAST.characters), "curves": run.curves()}
    file = max(FILES, key=lambda part: len(strict_json(parts[part])))
    return f"Most of it is from {FILES[file]}: move this file out of {run.path}, and report again"


def _curves(run: ShownRun, runs: Sequence[ShownRun]) -> dict[str, Curve]:
    """Return the curves of a run that are drawn, and the relative difference of its loss from the first run's, in
    percent."""
    curves, first = run.curves(), runs[0]
    if len(runs) > 1:
        curves = {
            key: curve for key, curve in curves.items() if "/" not in key or key.startswith(SIDE_BY_SIDE)
        }
    if run is not first:
        reference = dict(first.curves().get("loss", []))
        curves["difference"] = [
            (step, 100 * abs(loss - reference[step]) / (abs(reference[step]) or 1.0))
            for step, loss in curves.get("loss", [])
            if step in reference
        ]
    return curves


def _largest(difference: Curve) -> dict[str, float | None]:
    step, value = max(difference, key=lambda point: point[1], default=(None, None))
    return {"largest_difference": None if value is None else value / 100, "largest_at": step}


def _differences(runs: Sequence[ShownRun]) -> list[Mapping[str, Any]]:
    facts = [run.facts for run in runs]
    keys = dict.fromkeys(key for each in facts for key in each if key not in OF_A_RUN)
    rows = {key: [each.get(key) for each in facts] for key in keys}
    return [
        {"key": key, "values": [None if value is None else shortened(value) for value in values]}
        for key, values in rows.items()
        if len(set(values)) > 1
    ]
