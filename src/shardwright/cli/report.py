"""`shardwright report`."""

from __future__ import annotations

from pathlib import Path

from shardwright.cli.command import Call, Command
from shardwright.cli.parsing import Parser


def _run(call: Call) -> int:
    from shardwright.train.commands.pages.report import report

    html = call.options.html
    return report([Path(run) for run in call.options.runs], None if html is None else Path(html))


def _add_options(parser: Parser) -> None:
    parser.add_argument(
        "runs", metavar="RUN", nargs="+",
        help="run folders, one or more; with several the page also shows how they differ, and the first one is the "
        "reference",
    )  # fmt: skip
    parser.add_argument(
        "--html", metavar="FILE", help="the file (default: report.html in the first run's folder)"
    )


COMMAND = Command("report", "write one HTML file about runs, which needs no network", _add_options, _run)
