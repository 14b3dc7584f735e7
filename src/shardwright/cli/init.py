"""`shardwright init`."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardwright.cli.command import Call, Command
from shardwright.cli.parsing import Parser, integer
from shardwright.cli.plan import devices_of
from shardwright.planner import MOST_AT_A_TIME
from shardwright.train.errors import UserError

CPU = "cpu"


def _run(call: Call) -> int:
    import warnings

    from shardwright.planner import known_devices
    from shardwright.train.commands.plans import new_job

    options = call.options
    file = Path(options.file)
    if file.is_dir() or not file.parent.is_dir():
        raise UserError(f"init: expected a file in a folder that exists, found {file}; name another file")
    if file.exists() and not options.force:
        raise UserError(f"init: {file} exists already; name another file, or add --force")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # of plans

    ask = _Questions()
    names = f"{', '.join(new_job.presets())}, or hf:NAME or hf:FOLDER"
    model = ask(options.model, "--model", f"Model: {names}", "debug", new_job.checked_model)
    question = "Data: files or folders, quoted if they have spaces, or pydoc (text to try)"
    data = (
        new_job.checked_data(options.data)
        if options.data
        else ask(None, "--data", question, "pydoc", lambda text: new_job.checked_data(_words(text)))
    )
    tokenizer = options.tokenizer and new_job.checked_tokenizer(options.tokenizer)
    if tokenizer is None and ask.asks and not model.startswith("hf:"):
        question = "Tokenizer: a folder or name of Hugging Face, or bytes"
        tokenizer = ask(None, "--tokenizer", question, "bytes", new_job.checked_tokenizer)
    known = f"NxDEVICE with a device of {', '.join(known_devices())}, local, or 2xcpu"
    ranks, device = ask(options.on, "--on", f"Devices: {known}", _here(), _devices)
    default = "finetune" if model.startswith("hf:") else "pretrain"
    given = options.task or (None if ask.asks else default)
    question = "Task: pretrain, finetune or lora"
    task = ask(given, "--task", question, default, lambda text: new_job.checked_task(text, model))

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    wanted = new_job.Wanted(model, data, task, ranks, device, options.seq_len or 0, tokenizer or "")
    processes = min(MOST_AT_A_TIME, os.cpu_count() or 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        verdict = new_job.new_job(wanted, file, processes, say, not options.no_plan)
    print(f"{file} is written. {verdict}".rstrip())
    print(f"next     shardwright train {file} --nproc {ranks}")
    return 0


class _Questions:
    """Asks for what no option says, if there is a terminal to ask.

    Attributes:
        asks: whether one is there.
    """

    def __init__(self) -> None:
        self.asks = sys.stdin.isatty() and sys.stdout.isatty()

    def __call__(
        self, given: Any, option: str, question: str, default: str, read: Callable[[str], Any]
    ) -> Any:
        """Return the value that `read` makes of what is given, or of the first answer of which it raises no
        UserError."""
        if given is not None:
            return read(given)
        if not self.asks:
            raise UserError(
                f"init: expected {option}, found none, and there is no terminal to ask; {question}"
            )
        while True:
            try:
                return read(input(f"{question} [{default}]: ").strip() or default)
            except EOFError:
                raise UserError(f"init: expected {option}, found the end of the input") from None
            except UserError as error:
                print(error)


def _devices(text: str) -> tuple[int, Any]:
    """Return the number of ranks and their device; None for the CPU."""
    if (of_cpu := re.fullmatch(r"(?:(\d+)x)?cpu", text, re.IGNORECASE)) is not None:
        ranks = int(of_cpu[1] or 2)
        if not ranks:
            raise UserError(f"--on: expected at least 1 rank, found {text!r}")
        return ranks, None
    return devices_of(text, ", or 2xcpu for two ranks of the CPU")


def _words(answer: str) -> list[str]:
    try:
        return shlex.split(answer)
    except ValueError as error:
        raise UserError(f"--data: {str(error).lower()} in {answer!r}") from None


def _here() -> str:
    """Return the devices of this machine, without an import of torch."""
    from shutil import which
    from subprocess import run

    if which("nvidia-smi"):
        lines = run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout.splitlines()
        if lines:
            return f"{len(lines)}xlocal"
    return f"2x{CPU}"


def _add_options(parser: Parser) -> None:
    parser.usage = (
        "shardwright init [FILE.toml] [--model MODEL] [--data FILE ...] [--tokenizer NAME]\n"
        "                        [--on NxDEVICE] [--task pretrain|finetune|lora] [--seq-len N] [--no-plan] [--force]\n"
        "                        [--debug]"
    )
    add: Callable[..., Any] = parser.add_argument
    add(
        "file",
        metavar="FILE.toml",
        nargs="?",
        default="job.toml",
        help="the file to write (default: job.toml)",
    )
    add("--model", metavar="MODEL", help="a preset (8B, hybrid:9B), or hf: with a model of transformers")
    add(
        "--data",
        metavar="FILE",
        nargs="+",
        help="files, patterns or folders with text, conversations or completions, or pydoc; of a folder the files of "
        "one kind",
    )
    add(
        "--tokenizer",
        metavar="NAME",
        help="a folder or name of Hugging Face, or bytes (default: the model's own of transformers, bytes for a "
        "preset)",
    )
    add("--on", metavar="NxDEVICE", help="the devices, as for plan, such as 8xh100; or 2xcpu")
    add(
        "--task",
        metavar="TASK",
        help="pretrain, finetune or lora (default: finetune for a model of transformers)",
    )
    add(
        "--seq-len",
        metavar="N",
        type=integer(1),
        help="tokens of a sequence (default: 4096, or the model's longest)",
    )
    add("--no-plan", action="store_true", help="compare no settings: write plain ones")
    add("--force", action="store_true", help="replace the file if it exists")


COMMAND = Command(
    "init",
    "write the file of a new job, with settings that the planner chooses",
    _add_options,
    _run,
)
