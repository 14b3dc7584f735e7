"""`shardwright extensions`."""

from __future__ import annotations

from shardwright.cli.command import Call, Command
from shardwright.cli.parsing import Parser, width_of_terminal


def _run(call: Call) -> int:
    from shardwright.train.commands.extensions import listing

    print(listing(call.options.names, width_of_terminal()))
    return 0


def _add_options(parser: Parser) -> None:
    parser.add_argument(
        "names", metavar="NAME", nargs="*",
        help="strategies, layouts, memories, optimizers, models, sinks, stores or hooks; or the import path of one "
        "value, as in my_optimizers:LION (default: all registered values)",
    )  # fmt: skip


COMMAND = Command(
    "extensions",
    "list strategies, layouts, memories, optimizers, models, sinks, stores and hooks",
    _add_options,
    _run,
)
