"""The interface of a command of the command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

from shardwright.cli.parsing import Parser

Overrides = list[tuple[str, str]]
"""Keys of the configuration, as SECTION.KEY, and the texts of their values."""


@dataclass(frozen=True)
class Call:
    """One call of a command.

    Attributes:
        options: the values of its own options.
        overrides: keys of the configuration among the arguments, for a command with ``takes_keys``.
        arguments: all arguments of the process, with the command.
    """

    options: argparse.Namespace
    overrides: Overrides
    arguments: list[str]


@dataclass(frozen=True)
class Command:
    """A command.

    Attributes:
        name: its name on the command line.
        summary: what it does, in a line without a capital letter and a full stop.
        add_options: adds its options to a parser.
        run: does it, and returns the status of the process.
        takes_keys: whether `--section.key value` is an override of the configuration.
    """

    name: str
    summary: str
    add_options: Callable[[Parser], None]
    run: Callable[[Call], int]
    takes_keys: bool = False
