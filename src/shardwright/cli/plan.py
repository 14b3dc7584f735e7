"""`shardwright plan`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shardwright.cli.command import Call, Command
from shardwright.cli.parsing import Parser
from shardwright.train.errors import UserError

if TYPE_CHECKING:
    from shardwright.train.commands.plan import Keys
    from shardwright.train.config import Config


def _run(call: Call) -> int:
    # argparse would report missing arguments before misspelt options.
    for name, value in (("CONFIG.toml", call.options.config), ("--on NxDEVICE", call.options.on)):
        if value is None:
            raise UserError(f"plan: expected {name}, found none; see shardwright plan --help")

    from shardwright.planner.devices import DeviceError, parse_devices

    try:
        ranks, device = parse_devices(call.options.on)
    except DeviceError as error:
        raise UserError(str(error)) from error

    from shardwright.train.config import load_config
    from shardwright.train.models.vocabulary import with_vocabulary

    def configured(keys: Keys) -> Config:
        overrides = [*call.overrides, *keys]
        return with_vocabulary(load_config(Path(call.options.config), overrides, ranks=ranks))

    configured(())  # mistakes are reported before PyTorch is imported

    from shardwright.train.commands.plan import plan

    return plan(configured, ranks, device, call.options.json, not call.options.no_cache)


def _add_options(parser: Parser) -> None:
    parser.usage = (
        "shardwright plan CONFIG.toml --on NxDEVICE [--json] [--no-cache]\n"
        "                        [--section.key value ...] [--debug]"
    )
    parser.add_argument(
        "config", metavar="CONFIG.toml", nargs="?", help="the job, in TOML; it is not started"
    )
    parser.add_argument(
        "--on", metavar="NxDEVICE",
        help="the devices, such as 8xh100: a name, or a .toml file with the memory of a device as `gib`",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print all figures in bytes, as JSON")
    parser.add_argument(
        "--no-cache", action="store_true",
        help="plan again, and keep nothing; other plans are kept in ~/.cache/shardwright, or below $XDG_CACHE_HOME",
    )  # fmt: skip


COMMAND = Command(
    "plan",
    "say whether a job fits into the memory of its GPUs, without a GPU",
    _add_options,
    _run,
    takes_keys=True,
)
