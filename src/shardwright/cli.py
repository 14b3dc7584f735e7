"""The command line: it parses arguments, calls a command and prints. The commands themselves are in `train/`.

Only commands that need torch import it, so help and errors in arguments appear at once. The configuration's models
define the keys; argparse does the rest. (pydantic-settings was tried. Its help opens with a page of usage and shows no
ranges, and it reads values as JSON, but the file has TOML.)
"""

from __future__ import annotations

import argparse
import atexit
import difflib
import gc
import io
import json
import os
import shutil
import sys
import textwrap
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from shardwright import __version__
from shardwright.train.errors import UserError

if TYPE_CHECKING:
    from shardwright.train.config import Config

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
    """
    status = _status_of(list(sys.argv[1:] if argv is None else argv))
    if argv is None and (sink_thread := sys.modules.get("shardwright.train.sink_thread")):
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
    except UserError as error:
        return _failed(str(error), STATUS_USER_ERROR, arguments)
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
        need = f"{root} is not installed; the trainer needs the extra train: pip install 'shardwright[train]'"
        return _failed(need, STATUS_USER_ERROR, arguments)
    except Exception as error:
        return _failed_itself(error, arguments)


def _print_on_any_terminal() -> None:
    """Escape characters that the terminal's encoding lacks, so that a run does not fail at its last line."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _file_that_hides(package: str) -> str | None:
    """The user's file that Python imported instead of this package. None if Python imported the package."""
    module = sys.modules.get(package)
    return None if module is None or hasattr(module, "__path__") else getattr(module, "__file__", None)


def _failed_itself(error: Exception, arguments: Sequence[str]) -> int:
    hint = "" if _debug(arguments) else " (add --debug to see the traceback)"
    return _failed(f"{type(error).__name__}: {error}{hint}", STATUS_FAILED, arguments)


def _failed(message: str, status: int, arguments: Sequence[str]) -> int:
    if _debug(arguments):
        traceback.print_exc()
    print("error:", " ".join(message.split()), file=sys.stderr)
    return status


def _debug(arguments: Sequence[str]) -> bool:
    return "--debug" in arguments


def _run(arguments: list[str]) -> int:
    parser, commands = _parsers()
    if not arguments:
        parser.print_help()
        return 0
    command = next((argument for argument in arguments if not argument.startswith("-")), "")
    if command and command not in commands:
        near = difflib.get_close_matches(command, commands, 1)
        hint = f"did you mean {near[0]}?" if near else f"the commands are {', '.join(commands)}"
        raise UserError(f"unknown command {command}; {hint}")
    plain_arguments, overrides = (
        _split_overrides(arguments) if command in ("train", "layout") else (arguments, [])
    )
    try:
        options, unknown = parser.parse_known_args(plain_arguments)
    except SystemExit as leaving:  # --help and --version leave this way.
        return int(leaving.code or 0)
    if unknown:
        raise UserError(_unknown_argument(unknown[0], commands.get(command, parser)))
    if options.command == "train":
        return _train(options, overrides, arguments)
    if options.command == "compare":
        return _compare(options)
    if options.command == "generate":
        return _generate(options)
    if options.command == "export":
        return _export(options)
    if options.command == "layout":
        return _layout(options, overrides)
    if options.command == "extensions":
        return _extensions(options)
    if options.command == "doctor":
        return _doctor(options)
    parser.print_help()
    return 0


def _train(options: argparse.Namespace, overrides: Sequence[tuple[str, str]], arguments: list[str]) -> int:
    from shardwright.train.starting import START

    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if not launched or (os.environ["RANK"] == "0" and "SHARDWRIGHT_LAUNCHER" not in os.environ):
        START.begin("loading PyTorch")
    try:
        try:
            config, resume = _job_of(options, overrides)
        except UserError as error:
            if not launched:
                raise
            from shardwright.train.launch import refuse_config

            return refuse_config(error, _debug(arguments))

        from shardwright.train.launch import run_train

        return run_train(config, nproc=options.nproc, resume=resume, argv=arguments)
    finally:
        START.end()


def _job_of(options: argparse.Namespace, overrides: Sequence[tuple[str, str]]) -> tuple[Config, str | None]:
    """The configuration, and the run to continue: None for a new run, "" for the newest run with that name."""
    from shardwright.train.config import load_config, stored_config

    path, resume = options.config, options.resume
    if path is None and resume is not None and resume.endswith(".toml"):
        path, resume = (
            resume,
            "",
        )  # `--resume CONFIG.toml`: a run is a folder, so this can only be the config.
    if path is None and resume:
        # A run's folder has the configuration of its last start.
        path = Path(resume, "config.toml")
        if not path.is_file():
            raise UserError(f"--resume: expected the folder of a run, found no config.toml in {resume}")
        return stored_config(Path(resume), overrides), resume
    if path is None:
        raise UserError(
            "train: expected CONFIG.toml or --resume RUN, found neither; examples are in the folder examples/"
        )
    return load_config(Path(path), overrides), resume


def _compare(options: argparse.Namespace) -> int:
    if len(options.runs) < 2:
        raise UserError(f"compare: expected two runs or more, found {len(options.runs)}")
    from shardwright.train.compare import compare

    return compare([Path(run) for run in options.runs], Path(options.out) if options.out else None)


def _generate(options: argparse.Namespace) -> int:
    from shardwright.train.generate import generate

    text = generate(
        Path(options.run),
        _as_typed(options.prompt),
        tokens=options.tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        seed=options.seed,
    )
    print(text)
    return 0


def _export(options: argparse.Namespace) -> int:
    from shardwright.train.export import export, in_words

    exported = export(
        Path(options.run),
        Path(options.folder),
        step=options.step,
        dtype=options.dtype,
        max_shard_size=options.max_shard_size,
        say=lambda text: print(text, file=sys.stderr, flush=True),
    )
    print(in_words(exported))
    return 0


def _as_typed(text: str) -> str:
    """Text of the command line, also if the terminal uses UTF-8 and the locale does not."""
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeDecodeError:
        return text


def _layout(options: argparse.Namespace, overrides: Sequence[tuple[str, str]]) -> int:
    # argparse would report missing arguments before misspelt options.
    for name, value in (("CONFIG.toml", options.config), ("--world-size N[,N...]", options.world_size)):
        if value is None:
            raise UserError(f"layout: expected {name}, found none; see shardwright layout --help")

    from shardwright.train.config import load_config

    config = load_config(Path(options.config), overrides)

    from shardwright.train.layouts import layout

    return layout(config, options.world_size)


def _extensions(options: argparse.Namespace) -> int:
    from shardwright.train.listing import listing

    print(listing(options.names, _width()))
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from shardwright.doctor import examine, text_of

    report = examine()
    print(json.dumps(report, indent=2) if options.json else text_of(report))
    return 0


# ------------------------------------------------------------------------------
# Parsing


class _Parser(argparse.ArgumentParser):
    """argparse that raises `UserError`, and that makes its help only when a user asks for it."""

    keys_help: Callable[[int], str] | None = None

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{self.prog.partition(' ')[2] or self.prog}: {message}; see {self.prog} --help")

    def print_help(self, file: Any = None) -> None:
        print(self.format_help(), end="", file=file)  # argparse's method hides the error of a closed pipe.

    def format_help(self) -> str:
        width = _width()
        return super().format_help() + (self.keys_help(width) if self.keys_help else "")


def _width() -> int:
    """Columns of help and lists."""
    return min(shutil.get_terminal_size().columns, 120) - 2


def _parsers() -> tuple[_Parser, dict[str, _Parser]]:
    parser = _Parser(
        prog="shardwright",
        allow_abbrev=False,
        description="Trains PyTorch models that do not fit on one device.",
        epilog="`shardwright COMMAND --help` shows the options of a command.",
    )
    parser.add_argument("--version", action="version", version=f"shardwright {__version__}")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    commands: dict[str, _Parser] = {}
    for name, add_options, summary in (
        ("train", _add_train, "train the model of a configuration"),
        ("compare", _add_compare, "compare the losses, speeds and memory of runs"),
        ("generate", _add_generate, "continue a text with a trained model"),
        ("export", _add_export, "write a trained model as a folder of Hugging Face"),
        ("layout", _add_layout, "show the cost of each layout of the shards, for any number of ranks"),
        ("extensions", _add_extensions, "list strategies, layouts, memories, optimizers, models and sinks"),
        ("doctor", _add_doctor, "show versions, devices and settings for a bug report"),
    ):
        command = subparsers.add_parser(
            name, help=summary, description=summary[0].upper() + summary[1:] + ".", allow_abbrev=False
        )
        add_options(command)
        # Without a default here, `shardwright --debug train` keeps the option before the command.
        command.add_argument(
            "--debug", action="store_true", default=argparse.SUPPRESS, help="show tracebacks"
        )
        commands[name] = command
    return parser, commands


def _add_train(parser: _Parser) -> None:
    parser.usage = (
        "shardwright train CONFIG.toml [--section.key value ...]\n"
        "                         [--nproc N] [--resume [RUN]] [--debug]\n"
        "       shardwright train --resume RUN [--section.key value ...]\n"
        "                         [--nproc N] [--debug]"
    )
    parser.add_argument("config", metavar="CONFIG.toml", nargs="?", help="the job, in TOML")
    parser.add_argument(
        "--nproc", metavar="N", type=_integer(1),
        help="ranks to start on this machine (default: one for each of its GPUs, else 1)",
    )  # fmt: skip
    parser.add_argument(
        "--resume", metavar="RUN", nargs="?", const="",
        help="continue this run folder from its last checkpoint, with its own configuration unless you name a "
        "CONFIG.toml; without RUN: the newest run with the name in CONFIG.toml",
    )  # fmt: skip
    parser.keys_help = _keys_help


def _add_compare(parser: _Parser) -> None:
    parser.add_argument(
        "runs", metavar="RUN", nargs="+", help="run folders, two or more; the first is the reference"
    )
    parser.add_argument("--out", metavar="DIR", help="folder for the table and the picture")


def _add_generate(parser: _Parser) -> None:
    parser.add_argument("run", metavar="RUN", help="run folder with a checkpoint")
    parser.add_argument(
        "--prompt",
        metavar="TEXT",
        required=True,
        help='the text that the model continues; "": a document from its beginning, if the tokenizer marks it',
    )
    parser.add_argument(
        "--tokens",
        metavar="N",
        type=_integer(1),
        default=200,
        help="tokens to add at most; a token that ends a document ends the text (default 200)",
    )
    parser.add_argument(
        "--temperature", metavar="T", type=_number(0), default=0.8,
        help="0: always the most likely token; larger: more random (default 0.8)",
    )  # fmt: skip
    parser.add_argument(
        "--top-k", metavar="K", type=_integer(0), default=50,
        help="draw from the K most likely tokens; 0: from all (default 50)",
    )  # fmt: skip
    parser.add_argument(
        "--seed", metavar="N", type=_integer(0, 2**63 - 1), default=0, help="seed of the draws (default 0)"
    )


def _add_export(parser: _Parser) -> None:
    parser.add_argument("run", metavar="RUN", help="run folder with a checkpoint")
    parser.add_argument("folder", metavar="DIR", help="the new folder; it must not exist yet")
    parser.add_argument(
        "--step", metavar="N", type=_integer(0), help="step of the checkpoint (default: the newest whole one)"
    )
    parser.add_argument(
        "--dtype", metavar="DTYPE", choices=("float32", "bfloat16", "float16"),
        help="float32, bfloat16 or float16 (default: as in the checkpoint)",
    )  # fmt: skip
    parser.add_argument(
        "--max-shard-size",
        metavar="SIZE",
        default="5 GB",
        help='bytes in a file, such as "5 GB" (the default)',
    )


def _add_layout(parser: _Parser) -> None:
    parser.usage = (
        "shardwright layout CONFIG.toml --world-size N[,N...]\n"
        "                          [--section.key value ...] [--debug]"
    )
    parser.add_argument(
        "config", metavar="CONFIG.toml", nargs="?", help="the job, in TOML; it is not started"
    )
    parser.add_argument(
        "--world-size", metavar="N[,N...]", type=_integers(1),
        help="numbers of ranks to compare, such as 64,256,1024; no rank is started",
    )  # fmt: skip


def _add_extensions(parser: _Parser) -> None:
    parser.add_argument(
        "names", metavar="NAME", nargs="*",
        help="strategies, layouts, memories, optimizers, models or sinks; or the import path of one value, as in "
        "my_optimizers:LION (default: all registered values)",
    )  # fmt: skip


def _add_doctor(parser: _Parser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON; sizes are bytes")


def _integers(least: int) -> Callable[[str], list[int]]:
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


def _integer(least: int, most: int | None = None) -> Callable[[str], int]:
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


def _number(least: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not least <= value < float("inf"):
            raise argparse.ArgumentTypeError(f"expected a number >= {least}, found {text!r}")
        return value

    return parse


def _split_overrides(arguments: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
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
        overrides.append((name[2:], value))
    return others, overrides


def _unknown_argument(argument: str, parser: _Parser) -> str:
    if not argument.startswith("-"):
        return f"{parser.prog.partition(' ')[2]}: unexpected argument {argument!r}; see {parser.prog} --help"
    name = argument.partition("=")[0]
    # Compare without the dashes: two dashes make any short names look similar.
    options = [
        option[2:] for action in parser._actions for option in action.option_strings if option[:2] == "--"
    ]
    near = next(iter(difflib.get_close_matches(name.lstrip("-"), options, 1, cutoff=0.7)), None)
    if near is None and parser.keys_help:
        from shardwright.train.config import nearest_key

        near = nearest_key(name.lstrip("-"))
    return f"unknown option {name}; " + (f"did you mean --{near}?" if near else f"see {parser.prog} --help")


# ------------------------------------------------------------------------------
# Printing


def _keys_help(width: int) -> str:
    """Every key of the configuration with type, default and description, wrapped to `width` columns."""
    from shardwright.train.config import keys, section_summary

    intro = (
        "Every key of CONFIG.toml can be set on the command line too. Values are TOML; words need no quotes. "
        "Other keys have their defaults. `shardwright extensions` lists all registered values and the options of "
        "optimizers."
    )
    blocks = [
        "",
        "configuration keys:",
        *textwrap.wrap(intro, width, initial_indent="  ", subsequent_indent="  "),
    ]
    section = ""
    for key in keys():
        if key.path.partition(".")[0] != section:
            section = key.path.partition(".")[0]
            blocks += ["", *textwrap.wrap(f"[{section}] {section_summary(section)}", width)]
        facts = f"--{key.path}  {key.expected}; default {key.default}"
        blocks += textwrap.wrap(facts, width, initial_indent="  ", subsequent_indent=" " * 6)
        blocks += textwrap.wrap(
            key.description, width, initial_indent=" " * 6, subsequent_indent=" " * 6, break_on_hyphens=False
        )
    return "\n".join(blocks) + "\n"
