"""`shardwright relay`."""

from __future__ import annotations

import argparse
from pathlib import Path

from shardwright.cli.command import Call, Command
from shardwright.cli.parsing import Parser
from shardwright.train.errors import UserError


def _run(call: Call) -> int:
    command = call.options.command_line
    command = command[1:] if command[:1] == ["--"] else command
    if not command:
        raise UserError("relay: expected a command after RUN and --, found none")

    from shardwright.train.launch.relay import relay

    return relay(Path(call.options.run), command)


def _add_options(parser: Parser) -> None:
    parser.usage = "shardwright relay RUN -- COMMAND ..."
    parser.add_argument(
        "run", metavar="RUN", help="the folder of the run that the command trains, its run.dir"
    )
    parser.add_argument(
        "command_line", metavar="COMMAND", nargs=argparse.REMAINDER, help="the command, after --"
    )


COMMAND = Command(
    "relay", "run a command that trains, and return the status of the run's exit.json", _add_options, _run
)
