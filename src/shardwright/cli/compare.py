"""`shardwright compare`."""

from __future__ import annotations

from pathlib import Path

from shardwright.cli.command import Call, Command
from shardwright.cli.parsing import Parser
from shardwright.train.errors import UserError


def _run(call: Call) -> int:
    if len(call.options.runs) < 2:
        raise UserError(f"compare: expected two runs or more, found {len(call.options.runs)}")
    from shardwright.train.commands.compare import compare

    return compare(
        [Path(run) for run in call.options.runs], Path(call.options.out) if call.options.out else None
    )


def _add_options(parser: Parser) -> None:
    parser.add_argument(
        "runs", metavar="RUN", nargs="+", help="run folders, two or more; the first is the reference"
    )
    parser.add_argument("--out", metavar="DIR", help="folder for the table and the picture")


COMMAND = Command("compare", "compare the losses, speeds and memory of runs", _add_options, _run)
