"""`shardwright report`: one HTML file about runs. It reads all that can be read of them, and says what cannot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwright.page.curves import thinned
from shardwright.page.document import LIMIT, document
from shardwright.train.commands.pages.html_file import check_place, write_page
from shardwright.train.commands.pages.shown_run import Curve, ShownRun, read_shown_run

FILE = "report.html"  #: in the folder of the first run
MOST = 1_000  #: points of a curve
POINTS = 30_000  #: of all curves
OF_A_RUN = ("run.dir", "run.name")  #: settings that differ between any two runs


def report(runs: Sequence[Path], html: Path | None) -> int:
    """Write a page about one run, or several side by side; returns 0.

    Args:
        runs: their folders; the first one is the reference.
        html: the file (default: report.html in the first run's folder).

    Raises:
        UserError: a folder holds no run, or the file cannot be written.
    """
    file = runs[0] / FILE if html is None else html
    read = [read_shown_run(path) for path in runs]
    check_place(file)
    write_page(file, page_of(read))
    print(f"wrote {file}")
    return 0


def page_of(runs: Sequence[ShownRun]) -> str:
    """The text of the HTML file."""
    curves = [_curves(run, runs[0]) for run in runs]
    most = min(MOST, max(20, POINTS // max(1, sum(map(len, curves)))))
    longest = max((len(curve) for own in curves for curve in own.values()), default=0)
    title = " and ".join(run.name for run in runs) if len(runs) < 3 else f"{len(runs)} runs"
    while True:
        data = {
            "kind": "runs",
            "thinned": most if longest > most else 0,
            "differences": _differences(runs),
            "runs": [
                {
                    **run.values(),
                    **({"noted": None} if len(runs) > 1 else {}),  # pictures of steps are large
                    **_largest(own.get("difference", [])),
                    "curves": {key: thinned(curve, most) for key, curve in own.items()},
                }
                for run, own in zip(runs, curves, strict=True)
            ],
        }
        text = document(title, data)
        if len(text) < LIMIT or most <= 4:
            return text
        most //= 2


def _curves(run: ShownRun, first: ShownRun) -> dict[str, Curve]:
    """The curves of a run, and the relative difference of its loss from the first run's, in percent."""
    curves = run.curves()
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
    rows = [{"key": key, "values": [each.get(key) for each in facts]} for key in keys]
    return [row for row in rows if len(set(row["values"])) > 1]
