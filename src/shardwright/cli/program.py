"""The program: its commands, their parser, and how errors become one line and a status."""

from __future__ import annotations

import argparse
import atexit
import difflib
import gc
import io
import os
import sys
import traceback
from collections.abc import Sequence

from shardwright.cli import (
    calibrate,
    compare,
    convert,
    evaluate,
    export,
    extensions,
    generate,
    init,
    inspect,
    layout,
    plan,
    relay,
    report,
    train,
)
from shardwright.cli.command import Call
from shardwright.cli.doctor import command as doctor
from shardwright.cli.parsing import (
    Parser,
    split_overrides,
    unknown_argument,
    wants_traceback,
    width_of_terminal,
)
from shardwright.common.package import __version__
from shardwright.train.errors import JobError, UserError
from shardwright.train.launch.relay import note_mistake
from shardwright.train.launch.signals import restore_handlers

COMMANDS = {
    module.COMMAND.name: module.COMMAND
    for module in (
        init,
        train,
        compare,
        report,
        generate,
        evaluate,
        export,
        convert,
        inspect,
        layout,
        plan,
        calibrate,
        relay,
        extensions,
        doctor,
    )
}

EXTRA = ("annotated_types", "matplotlib", "psutil", "pydantic", "pydantic_core", "rich", "tensorboard")
"""Packages of the extra "train". The engine alone does not need them."""

STATUS_FAILED, STATUS_USER_ERROR, STATUS_INTERRUPTED, STATUS_BROKEN_PIPE = 1, 2, 130, 141


def _leave_objects_as_they_are() -> None:
    """Save 1 s at the end of the process: the interpreter does not look through all of torch's objects again.

    With triton loaded this is not done, because triton then reports each of its remaining objects as leaked.
    """
    if "triton" not in sys.modules:
        gc.freeze()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in `argv` (without the program's name; default: the process's arguments). Return its status.

    0: done; 1: the program failed; 2: the user made a mistake; 130: interrupted; 141: the reader of stdout has gone.
    An error is one line on stderr. With `--debug` a traceback comes before it.

    Without `argv` the process ends now. Signals that come after a run has ended well are ignored then.
    """
    status = _status_of(list(sys.argv[1:] if argv is None else argv))
    if argv is not None:
        restore_handlers()
    note_mistake(status)
    if argv is None and (sink_thread := sys.modules.get("shardwright.train.report.sink_thread")):
        sink_thread.leave_if_stuck(status)
    return status


def _status_of(arguments: list[str]) -> int:
    _print_on_any_terminal()
    atexit.unregister(_leave_objects_as_they_are)
    atexit.register(_leave_objects_as_they_are)
    try:
        try:
            return _run(arguments)
        finally:
            sys.stdout.flush()  # Inside the try, so that it catches the error of a closed pipe.
    except JobError as error:
        return _failed(str(error), error.status, arguments)
    except KeyboardInterrupt:
        return _failed("interrupted", STATUS_INTERRUPTED, arguments)
    except BrokenPipeError:
        # The reader (`| head`) has gone. Python would print the error again when it closes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return STATUS_BROKEN_PIPE
    except UnicodeEncodeError as error:
        characters = error.object[error.start : error.end]
        message = (
            f"the locale's encoding, {error.encoding}, cannot write {characters!a} of {error.object!a}; "
            "set PYTHONUTF8=1"
        )
        return _failed(message, STATUS_USER_ERROR, arguments)
    except ModuleNotFoundError as error:
        root = (error.name or "").partition(".")[0]
        if root not in EXTRA:
            return _failed_itself(error, arguments)
        if hiding := _file_that_hides(root):
            message = (
                f"Python imports {hiding} instead of the package {root}; rename this file, or start in another "
                "folder"
            )
            return _failed(message, STATUS_USER_ERROR, arguments)
        need = f"{root} is not installed; the trainer needs the extra train: pip install -e '.[train]' in the checkout"
        return _failed(need, STATUS_USER_ERROR, arguments)
    except Exception as error:
        return _failed_itself(error, arguments)


def _print_on_any_terminal() -> None:
    """Escape characters that the terminal's encoding lacks, so that a run does not fail at its last line."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _file_that_hides(package: str) -> str | None:
    """Return the user's file that Python imported instead of this package. None if Python imported the package."""
    module = sys.modules.get(package)
    return None if module is None or hasattr(module, "__path__") else getattr(module, "__file__", None)


def _failed_itself(error: Exception, arguments: Sequence[str]) -> int:
    hint = "" if wants_traceback(arguments) else " (add --debug to see the traceback)"
    return _failed(f"{type(error).__name__}: {error}{hint}", STATUS_FAILED, arguments)


def _failed(message: str, status: int, arguments: Sequence[str]) -> int:
    if wants_traceback(arguments):
        traceback.print_exc()
    print("error:", " ".join(message.split()), file=sys.stderr)
    return status


def _run(arguments: list[str]) -> int:
    parser, parsers = _parsers()
    if not arguments:
        parser.print_help()
        return 0
    name = next((argument for argument in arguments if not argument.startswith("-")), "")
    if name and name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, 1)
        hint = f"did you mean {near[0]}?" if near else f"the commands are {', '.join(COMMANDS)}"
        raise UserError(f"unknown command {name}; {hint}")
    command = COMMANDS.get(name)
    takes_keys = command is not None and command.takes_keys
    if takes_keys and (section := _section_asked_for(arguments)):
        own = parsers[name]
        assert own.section_help is not None
        print(own.section_help(section, width_of_terminal()), end="")
        return 0
    plain_arguments, overrides = split_overrides(arguments) if takes_keys else (arguments, [])
    try:
        options, unknown = parser.parse_known_args(plain_arguments)
    except SystemExit as leaving:  # --help and --version leave this way.
        return int(leaving.code or 0)
    if unknown:
        raise UserError(unknown_argument(unknown[0], parsers.get(name, parser)))
    if command is not None:
        return command.run(Call(options, overrides, arguments))
    parser.print_help()
    return 0


def _section_asked_for(arguments: Sequence[str]) -> str:
    """Return the word after --help, if there is one."""
    place = next(
        (number for number, each in enumerate(arguments) if each in ("-h", "--help")), len(arguments)
    )
    following = arguments[place + 1 : place + 2]
    return following[0] if following and not following[0].startswith("-") else ""


def _parsers() -> tuple[Parser, dict[str, Parser]]:
    parser = Parser(
        prog="shardwright",
        allow_abbrev=False,
        description="Trains PyTorch models that do not fit on one device.",
        epilog="`shardwright COMMAND --help` shows the options of a command.",
    )
    parser.add_argument("--version", action="version", version=f"shardwright {__version__}")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    parsers: dict[str, Parser] = {}
    for command in COMMANDS.values():
        summary = command.summary
        own = subparsers.add_parser(
            command.name, help=summary, description=summary[0].upper() + summary[1:] + ".", allow_abbrev=False
        )
        command.add_options(own)
        # Without a default here, `shardwright --debug train` keeps the option before the command.
        own.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show tracebacks")
        parsers[command.name] = own
    return parser, parsers
