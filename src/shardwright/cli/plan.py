"""`shardwright plan`."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from shardwright.cli.command import Call, Command
from shardwright.cli.parsing import Parser
from shardwright.planner import MOST_AT_A_TIME
from shardwright.train.errors import UserError, as_user_errors

if TYPE_CHECKING:
    from shardwright.planner import Device


def _run(call: Call) -> int:
    os.environ.setdefault(
        "TORCH_CPP_LOG_LEVEL", "ERROR"
    )  # collectives without other ranks are nobody's mistake
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _plan(call)


def _plan(call: Call) -> int:
    if call.options.accuracy:
        from shardwright.planner import in_words, read

        print(in_words(read()))
        return 0
    # argparse would report missing arguments before misspelt options.
    for name, value in (("CONFIG.toml or hf:MODEL", call.options.config), ("--on NxDEVICE", call.options.on)):
        if value is None:
            raise UserError(f"plan: expected {name}, found none; see shardwright plan --help")

    ranks, device = devices_of(call.options.on)
    from shardwright.planner import Rules
    from shardwright.train.commands.plans.planned_job import PlannedJob
    from shardwright.train.config.conflicts.jobs import PLANNED
    from shardwright.train.config.conflicts.table import refuse
    from shardwright.train.config.plans.job_of_model import ASSUMED_KEYS

    options = call.options
    with as_user_errors(ValueError):
        rules = Rules.of(os.environ)
    keys, caches = tuple(call.overrides), not options.no_cache
    names = [name for name in (options.config, options.other) if name is not None]
    jobs = [PlannedJob(name, keys, ranks, device, rules, caches) for name in names]
    for each in jobs:
        refuse(PLANNED, each())  # mistakes are reported before PyTorch is imported
    html = None if options.html is None else Path(options.html)
    if html is not None:
        from shardwright.train.commands.pages.html_file import check_place

        if len(jobs) > 1:
            raise UserError("plan: expected one job with --html, found two")
        check_place(html)
    unset = [key for key in ASSUMED_KEYS if key not in dict(call.overrides)] if jobs[0].assumes else []
    if options.only and not options.fit:
        raise UserError("--only: expected --fit, of whose search it names the keys, found none; add it")
    if options.fit:
        if len(jobs) > 1:
            raise UserError("plan: expected one job with --fit, found two")
        from shardwright.train.commands.plans.fit import fit
        from shardwright.train.commands.plans.grids import with_only

        processes = options.processes or min(MOST_AT_A_TIME, os.cpu_count() or 1)
        job = with_only(jobs[0], options.only.split(",")) if options.only else jobs[0]
        return fit(job, options.json, processes, unset, html)
    if len(jobs) > 1:
        from shardwright.train.commands.plans.plan_difference import plan_difference

        return plan_difference(jobs, options.json)

    from shardwright.train.commands.plans.plan import plan

    return plan(jobs[0], options.json, unset, names_edits=not options.no_edits, html=html)


def devices_of(text: str, others: str = "") -> tuple[int, Device]:
    """Return the number of ranks and their device, from the value of --on.

    Args:
        text: the value.
        others: what else the command takes, for the message.

    Raises:
        UserError: there is no such device.
    """
    from shardwright.planner import DeviceError, parse_devices

    def local() -> Device:
        from shardwright.planner.tracing import local_device  # which imports torch

        return local_device()

    try:
        return parse_devices(text, local)
    except DeviceError as error:
        raise UserError(f"--on: {error}{others}") from error


def _add_options(parser: Parser) -> None:
    parser.usage = (
        "shardwright plan CONFIG.toml|hf:MODEL --on NxDEVICE [--json] [--html FILE] [--no-edits]\n"
        "                        [--no-cache] [--section.key value ...] [--debug]\n"
        "       shardwright plan CONFIG.toml|hf:MODEL --on NxDEVICE --fit [--only KEYS] [--processes N] [--json]\n"
        "                        [--html FILE] [--no-cache] ...\n"
        "       shardwright plan CONFIG.toml OTHER.toml --on NxDEVICE [--json] [--no-cache] [--section.key value ...]\n"
        "       shardwright plan --accuracy"
    )
    parser.add_argument(
        "config", metavar="CONFIG.toml", nargs="?",
        help="the job, in TOML, which is not started; or hf: with the folder of a model of transformers, or its name "
        "on the hub: only its config.json is read, and the rest of the job is assumed",
    )  # fmt: skip
    parser.add_argument(
        "other",
        metavar="OTHER.toml",
        nargs="?",
        help="another job: what makes the difference between the two plans",
    )
    parser.add_argument(
        "--on", metavar="NxDEVICE",
        help="the devices, such as 8xh100 (h100: one): a name, a .toml file with the memory of a device as `gib`, or "
        "local, this machine's GPU",
    )  # fmt: skip
    parser.add_argument(
        "--accuracy", action="store_true", help="say how far the plans of this user's runs on GPUs were from what they "
        "reserved",
    )  # fmt: skip
    parser.add_argument(
        "--fit", action="store_true", help="find the fastest settings that fit: strategy, micro-batch, activation "
        "checkpointing, compilation and loss chunks, if needed tensor, expert and context parallelism or offload; keys "
        "of the command line stay as they are",
    )  # fmt: skip
    parser.add_argument(
        "--only", metavar="KEYS", help="with --fit: the keys that may change, separated by commas; "
        "--only train.micro_batch finds the largest micro-batch that fits with all else as it is",
    )  # fmt: skip
    parser.add_argument(
        "--processes", metavar="N", type=int, default=0,
        help="with --fit: plans that are made at a time (default: the processors of this machine, "
        f"{MOST_AT_A_TIME} at most)",
    )  # fmt: skip
    parser.add_argument("--no-edits", action="store_true", help="name no changes that save memory")
    parser.add_argument("--json", action="store_true", help="print all figures in bytes, as JSON")
    parser.add_argument(
        "--html", metavar="FILE", help="also write one HTML file, which needs no network: memory over a step above its "
        "streams, the tensors of each moment, the losses of speed, and with --fit the planned settings",
    )  # fmt: skip
    parser.add_argument(
        "--no-cache", action="store_true",
        help="plan again, and keep nothing; other plans are kept in ~/.cache/shardwright, or below $XDG_CACHE_HOME",
    )  # fmt: skip


COMMAND = Command(
    "plan",
    "say whether a job fits into the memory of its GPUs, and how fast it is, without a GPU",
    _add_options,
    _run,
    takes_keys=True,
)
