"""`shardwright doctor`."""

from __future__ import annotations

from shardwright.cli.command import Call, Command
from shardwright.cli.parsing import Parser
from shardwright.strict_json import strict_json


def _run(call: Call) -> int:
    from shardwright.doctor import examine, text_of

    report = examine()
    print(strict_json(report, indent=2) if call.options.json else text_of(report))
    return 0


def _add_options(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON; sizes are bytes")


COMMAND = Command("doctor", "show versions, devices and settings for a bug report", _add_options, _run)
