"""`shardwright layout`."""

from __future__ import annotations

from pathlib import Path

from shardwright.cli.command import Call, Command
from shardwright.cli.parsing import Parser, integers
from shardwright.train.errors import UserError


def _run(call: Call) -> int:
    # argparse would report missing arguments before misspelt options.
    for name, value in (
        ("CONFIG.toml", call.options.config),
        ("--world-size N[,N...]", call.options.world_size),
    ):
        if value is None:
            raise UserError(f"layout: expected {name}, found none; see shardwright layout --help")

    from shardwright.train.config import load_config

    config = load_config(Path(call.options.config), call.overrides)

    from shardwright.train.commands.layouts import layout

    return layout(config.model, config.parallel, call.options.world_size)


def _add_options(parser: Parser) -> None:
    parser.usage = (
        "shardwright layout CONFIG.toml --world-size N[,N...]\n"
        "                          [--section.key value ...] [--debug]"
    )
    parser.add_argument(
        "config", metavar="CONFIG.toml", nargs="?", help="the job, in TOML; it is not started"
    )
    parser.add_argument(
        "--world-size", metavar="N[,N...]", type=integers(1),
        help="numbers of ranks to compare, such as 64,256,1024; no rank is started",
    )  # fmt: skip


COMMAND = Command(
    "layout",
    "show the cost of each layout of the shards, for any number of ranks",
    _add_options,
    _run,
    takes_keys=True,
)
