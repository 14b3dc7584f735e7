"""`shardwright train`."""

from __future__ import annotations

import argparse
import difflib
import os
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from shardwright.cli.command import Call, Command, Overrides
from shardwright.cli.parsing import Parser, integer, wants_traceback
from shardwright.train.errors import UserError

if TYPE_CHECKING:
    from shardwright.train.config import Config


def _run(call: Call) -> int:
    from shardwright.train.launch.slurm import variables_of_task
    from shardwright.train.report.progress import START

    os.environ.update(variables_of_task(os.environ))
    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if not launched or (os.environ["RANK"] == "0" and "SHARDWRIGHT_LAUNCHER" not in os.environ):
        START.begin("loading PyTorch")
    try:
        try:
            config, resume = _job_of(call.options, _with_restarts(call))
            from shardwright.train.models.vocabulary import with_vocabulary

            config = with_vocabulary(config)
        except UserError as error:
            if not launched and not call.options.resume:
                raise
            from shardwright.train.commands.train import refuse_config

            return refuse_config(error, call.options.resume, wants_traceback(call.arguments))

        from shardwright.train.commands.train import run_train

        return run_train(config, nproc=call.options.nproc, resume=resume, argv=call.arguments)
    finally:
        START.end()


def _with_restarts(call: Call) -> Overrides:
    """Return the keys on the command line. --max-restarts counts as one."""
    restarts = call.options.max_restarts
    return call.overrides if restarts is None else [*call.overrides, ("fault.max_restarts", str(restarts))]


def _ranks_of_environment() -> int:
    """Return the number of ranks that torchrun or our launcher has set; 1 without one.

    Other values are refused later.
    """
    text = os.environ.get("WORLD_SIZE", "")
    return max(1, int(text)) if text.isdecimal() else 1


def _job_of(options: argparse.Namespace, overrides: Overrides) -> tuple[Config, str | None]:
    """Return the configuration, and the run to continue: None for a new run, "" for the newest run with that name."""
    from shardwright.train.config import load_config, stored_config

    path, resume = options.config, options.resume
    if options.go_on:
        return _job_to_continue(options, overrides)
    ranks = options.nproc or _ranks_of_environment()
    if path is None and resume is not None and resume.endswith(".toml"):
        # `--resume CONFIG.toml`: a run is a folder, so this can only be the config.
        path, resume = resume, ""
    if path is None and resume:
        # A run's folder has the configuration of its last start.
        path = Path(resume, "config.toml")
        if not path.is_file():
            found = "no config.toml in" if os.path.isdir(resume) else "no such folder at"
            from shardwright.train.run.folder import runs_near

            raise UserError(
                f"--resume: expected the folder of a run, found {found} {resume}{runs_near(Path(resume))}"
            )
        for key, value in overrides:
            if key == "run.dir" and os.path.abspath(value) != os.path.abspath(resume):
                raise UserError(
                    f"run.dir: expected none with --resume {resume}, which continues in that folder, found {value}; "
                    "leave --run.dir out"
                )
        return stored_config(Path(resume), overrides, ranks=ranks, resumes=True), resume
    if path is None:
        raise UserError(
            "train: expected CONFIG.toml or --resume RUN, found neither; examples are in the folder examples/"
        )
    config = load_config(Path(path), overrides, ranks=ranks, resumes=resume is not None)
    if resume is not None:
        from shardwright.train.run.finding import as_saved

        config = as_saved(config, resume)
    return config, resume


def _job_to_continue(options: argparse.Namespace, overrides: Overrides) -> tuple[Config, str]:
    """Return the configuration of a job that begins or goes on in its `run.dir`."""
    from shardwright.train.config import load_config
    from shardwright.train.run.finding import CONTINUE, as_saved

    if options.config is None or options.resume is not None:
        raise UserError(
            "--continue: expected CONFIG.toml and no --resume; it resumes if there is a checkpoint"
        )
    ranks = options.nproc or _ranks_of_environment()
    config = load_config(Path(options.config), overrides, ranks=ranks, resumes=True)
    if not config.run.dir:
        raise UserError(
            "--continue: expected run.dir, found none; add --run.dir FOLDER, the same at each start"
        )
    return as_saved(config, CONTINUE), CONTINUE


USUAL = {
    "model.kind": "llama, hybrid, hf (any model of transformers), python (yours)",
    "model.preset": "size of a llama or hybrid",
    "data.source": "files with the text, or pydoc: text that every Python has",
    "data.tokenizer": "bytes, a tokenizer.json, its folder, or a name on the hub",
    "train.steps": "optimizer steps in all",
    "train.seq_len": "tokens per sequence",
    "train.global_batch": "sequences per optimizer step, over all ranks",
    "train.micro_batch": "sequences per rank and forward pass; lower it if memory runs out",
    "optimizer.lr": "peak learning rate",
    "parallel.strategy": "what is sharded: zero3 all, zero1 the optimizer, ddp nothing",
}
"""The keys that most jobs set, which the help shows first."""


def _keys_help(width: int) -> str:
    """Return the usual keys, then every key of the configuration, wrapped to `width` columns."""
    from shardwright.train.config import Config
    from shardwright.train.config.keys import keys

    def wrapped(text: str) -> list[str]:
        return textwrap.wrap(text, width, initial_indent="  ", subsequent_indent="  ")

    by_path = {key.path: key for key in keys()}
    blocks = ["", "usual keys:"]
    for path, words in USUAL.items():
        line = f"  --{path:<20}{words} (default {by_path[path].default})"
        blocks += textwrap.wrap(line, width, subsequent_indent=" " * 24, break_on_hyphens=False)
    intro = (
        "Every key of CONFIG.toml can be set on the command line too. Values are TOML; words need no quotes. "
        "Other keys have their defaults. `shardwright extensions` lists all registered values and the options of "
        f"optimizers. `shardwright train --help SECTION` shows one of the sections {', '.join(Config.model_fields)}."
    )
    return "\n".join([*blocks, "", "configuration keys:", *wrapped(intro), *_described(width)]) + "\n"


def _section_help(section: str, width: int) -> str:
    """Return the keys of one section. Raises UserError if there is no such section."""
    from shardwright.train.config import Config

    section = section.strip("[]")
    if section not in Config.model_fields:
        near = difflib.get_close_matches(section, Config.model_fields, 1)
        hint = f"did you mean {near[0]}?" if near else f"the sections are {', '.join(Config.model_fields)}"
        raise UserError(f"train --help: expected a section, found {section!r}; {hint}")
    return "\n".join(_described(width, section)[1:]) + "\n"


def _described(width: int, only: str = "") -> list[str]:
    """Return lines with type, default and description of every key, or of those of one section."""
    from shardwright.train.config.keys import keys, section_summary

    blocks: list[str] = []
    section = ""
    for key in keys():
        if only not in ("", key.path.partition(".")[0]):
            continue
        if key.path.partition(".")[0] != section:
            section = key.path.partition(".")[0]
            blocks += ["", *textwrap.wrap(f"[{section}] {section_summary(section)}", width)]
        facts = f"{key.title}  {key.expected}; default {key.default}"
        blocks += textwrap.wrap(facts, width, initial_indent="  ", subsequent_indent=" " * 6)
        blocks += textwrap.wrap(
            key.description, width, initial_indent=" " * 6, subsequent_indent=" " * 6, break_on_hyphens=False
        )
    return blocks


def _add_options(parser: Parser) -> None:
    parser.usage = (
        "shardwright train CONFIG.toml [--section.key value ...]\n"
        "                         [--nproc N] [--max-restarts N]\n"
        "                         [--resume [RUN] | --continue] [--debug]\n"
        "       shardwright train --resume RUN [--section.key value ...]\n"
        "                         [--nproc N] [--max-restarts N] [--debug]\n"
        "       shardwright train --help [SECTION]"
    )
    parser.add_argument("config", metavar="CONFIG.toml", nargs="?", help="the job, in TOML")
    parser.add_argument(
        "--nproc", metavar="N", type=integer(1),
        help="ranks to start on this machine (default: one for each of its GPUs, else 1)",
    )  # fmt: skip
    parser.add_argument(
        "--max-restarts", metavar="N", type=integer(0),
        help="how often the job starts again by itself after a rank was killed or failed (default: the "
        "configuration's fault.max_restarts, 0)",
    )  # fmt: skip
    parser.add_argument(
        "--resume", metavar="RUN", nargs="?", const="",
        help="continue this run folder from its last checkpoint, with its own configuration unless you name a "
        "CONFIG.toml; without RUN: the newest run with the name in CONFIG.toml",
    )  # fmt: skip
    parser.add_argument(
        "--continue", dest="go_on", action="store_true",
        help="go on from the last checkpoint in run.dir, or start there if it has none: for a command that is "
        "started again and again",
    )  # fmt: skip
    parser.keys_help, parser.section_help = _keys_help, _section_help


COMMAND = Command("train", "train the model of a configuration", _add_options, _run, takes_keys=True)
