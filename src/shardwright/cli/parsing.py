"""Reading arguments: a parser that raises `UserError`, types of values, and keys of the configuration among them.

argparse does the work. (pydantic-settings was tried. Its help opens with a page of usage and shows no ranges, and it
reads values as JSON, but the file has TOML.)
"""

from __future__ import annotations

import argparse
import difflib
import itertools
import shutil
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from shardwright.train.errors import UserError


class Parser(argparse.ArgumentParser):
    """argparse that raises `UserError`, and that makes its help only when a user asks for it."""

    keys_help: Callable[[int], str] | None = None
    section_help: Callable[[str, int], str] | None = None

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{self.prog.partition(' ')[2] or self.prog}: {message}; see {self.prog} --help")

    def print_help(self, file: Any = None) -> None:
        print(self.format_help(), end="", file=file)  # argparse's method hides the error of a closed pipe.

    def format_help(self) -> str:
        width = width_of_terminal()
        return super().format_help() + (self.keys_help(width) if self.keys_help else "")


def width_of_terminal() -> int:
    """Columns of help and lists."""
    return min(shutil.get_terminal_size().columns, 120) - 2


def wants_traceback(arguments: Sequence[str]) -> bool:
    return "--debug" in arguments


def integers(least: int) -> Callable[[str], list[int]]:
    def parse(text: str) -> list[int]:
        try:
            values = [int(part) for part in text.split(",")]
        except ValueError:
            values = []
        if not values or min(values) < least:
            raise argparse.ArgumentTypeError(
                f"expected integers >= {least}, separated by commas, found {text!r}"
            )
        return list(dict.fromkeys(values))

    return parse


def integer(least: int, most: int | None = None) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least or (most is not None and value > most):
            limits = f">= {least}" if most is None else f"from {least} to {most}"
            raise argparse.ArgumentTypeError(f"expected an integer {limits}, found {text!r}")
        return value

    return parse


def number(least: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not least <= value < float("inf"):
            raise argparse.ArgumentTypeError(f"expected a number >= {least}, found {text!r}")
        return value

    return parse


def split_overrides(arguments: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Take `--section.key value` and `--section.key=value` out of the arguments."""
    others: list[str] = []
    overrides: list[tuple[str, str]] = []
    rest = iter(enumerate(arguments))
    for position, argument in rest:
        name, equals, value = argument.partition("=")
        if not name.startswith("--") or "." not in name:
            others.append(argument)
            continue
        if not equals:
            if position + 1 == len(arguments) or arguments[position + 1].startswith("--"):
                raise UserError(f"{name}: expected a value after it, found none; write {name} VALUE")
            value = next(rest)[1]
            following = itertools.takewhile(lambda each: not each.startswith("--"), arguments[position + 2 :])
            words = [value, *following]
            if value.startswith("[") and not value.endswith("]") and words[-1].endswith("]"):
                raise UserError(
                    f"{name}: expected one word, found a list with spaces in {len(words)} words; put it into single "
                    f"quotes: {name} '{' '.join(words)}'"
                )
        overrides.append((name[2:], value))
    return others, overrides


def unknown_argument(argument: str, parser: Parser) -> str:
    if not argument.startswith("-"):
        return f"{parser.prog.partition(' ')[2]}: unexpected argument {argument!r}; see {parser.prog} --help"
    name = argument.partition("=")[0]
    # Compare without the dashes: two dashes make any short names look similar.
    options = [
        option[2:] for action in parser._actions for option in action.option_strings if option[:2] == "--"
    ]
    near = next(iter(difflib.get_close_matches(name.lstrip("-"), options, 1, cutoff=0.7)), None)
    if near is None and parser.keys_help:
        from shardwright.train.config.keys import nearest_key

        near = nearest_key(name.lstrip("-"))
    return f"unknown option {name}; " + (f"did you mean --{near}?" if near else f"see {parser.prog} --help")
