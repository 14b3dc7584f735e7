"""`shardwright train`: a job is checked and gets its folder; then it runs here, or in ranks that the launcher starts.

Importing this imports no engine: that takes seconds, which a launcher and those who wait for its ranks save.
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from functools import partial
from types import ModuleType
from typing import NoReturn

import rich.progress  # noqa: F401  # every rank needs it: where it is missing, the launcher says so, once
import torch

from shardwright.train.config import Config
from shardwright.train.config.catalog.sinks import check_packages
from shardwright.train.data.sources.places import locate
from shardwright.train.errors import UserError
from shardwright.train.launch.environment import check_environment
from shardwright.train.launch.forecast import forecast, is_out_of_memory, note_out_of_memory
from shardwright.train.launch.launcher import launch_until_done
from shardwright.train.launch.opening import open_run, refuse_resume
from shardwright.train.launch.restarts import Attempt
from shardwright.train.parallel.checks import (
    check_device,
    check_least_ranks,
    check_ranks,
)
from shardwright.train.parallel.rank_facts import choose_device, under_launcher
from shardwright.train.rank.hosts import INTERFACE_VARIABLE, loopback
from shardwright.train.report.progress import START
from shardwright.train.run.exits import Outcome
from shardwright.train.run.finding import CONTINUE
from shardwright.train.run.steps_left import check_steps


def run_train(config: Config, *, nproc: int | None, resume: str | None, argv: list[str]) -> int:
    """Train and return the exit status, see `run.exits`.

    `resume` is None for a new run, "" for the newest run of that name, `CONTINUE`, or a run's folder. `argv` is the
    command line, for starting the ranks with. Raises UserError, in one process only, for what the user has to correct.
    """
    check_environment()
    if under_launcher():
        return _rank().run_rank(lambda: _with_packages(config), resume, "--debug" in argv)
    try:
        ranks = _checked_ranks(_with_packages(config), nproc, resume)
        # Modules that cannot be imported are found before there is a folder.
        alone = _rank().train_alone if ranks == 1 and not config.fault.max_restarts else None
        run = open_run(config, resume)
    except UserError as error:
        refuse_resume(lambda: config, resume, Outcome(error.status, str(error)))
        raise
    with run.lock, ExitStack() as stack:
        try:
            if run.resumes and run.attempt == 1:
                check_steps(config.train, config.checkpoint, run.folder)
            _stay_local()
            planned = (
                forecast(config, run.folder, ranks, choose_device(config.run)) if run.attempt == 1 else None
            )
            if planned is not None:
                stack.callback(planned.stop)
                planned.check()
            if alone is not None:
                return alone(config, run)
            # The ranks would find these, after the seconds that they need to start.
            _check_files(config)
            arguments = [each for each in without_nproc(argv) if each != CONTINUE]
            if resume == CONTINUE and run.resumes:
                arguments += ["--resume", str(run.folder.path)]
            attempt = Attempt(run.attempt, ranks, tuple(arguments))
            return launch_until_done(config.fault, run.folder, attempt, partial(_can_run, config))
        except BaseException as error:
            for line in note_out_of_memory(run.folder) if is_out_of_memory(error) else ():
                print(line, file=sys.stderr, flush=True)
            if isinstance(error, UserError) and not run.folder.exit_file.exists():
                run.job_end.write_exit_file(Outcome(error.status, str(error)))
            run.discard_if_unused()
            raise


def _checked_ranks(config: Config, nproc: int | None, resume: str | None) -> int:
    """Return the number of ranks, with which this machine can run the job. Raises UserError."""
    ranks = _number_of_ranks(config, nproc)
    START.doing("checking the configuration")
    check_ranks(config, ranks, resume is not None)
    check_least_ranks(config.fault, ranks)
    check_device(config.train, choose_device(config.run))
    return ranks


def _check_files(config: Config) -> None:
    """Refuse local data that is missing. Files on other machines are looked up when they are read."""
    for source in (*config.data.training, *(config.data.validating if config.validation.every else ())):
        for path in source.paths:
            if "://" not in path:
                locate(path, source.key)


def _with_packages(config: Config) -> Config:
    """Return the configuration. Raises UserError if a package of a sink is missing, or tasks cannot be evaluated."""
    check_packages(config.log.sinks)
    if config.validation.tasks:
        # Its imports take seconds.
        from shardwright.train.commands.hugging_face.evaluate import check_job

        check_job(config.validation, config.data, config.model.shape())
    return config


def refuse_config(error: UserError, resume: str | None, debug: bool) -> int:
    """End a job whose configuration cannot be read. A rank lets the others know, and returns the exit status."""

    def unreadable() -> NoReturn:
        raise error

    if not under_launcher():
        refuse_resume(unreadable, resume, Outcome(error.status, str(error)))
        raise error
    check_environment()
    return _rank().run_rank(unreadable, resume, debug)


def _rank() -> ModuleType:
    """Return the module with the work of a rank. Its import takes seconds, so the launcher does not import it."""

    from shardwright.train.rank import process

    return process


def _number_of_ranks(config: Config, nproc: int | None) -> int:
    gpus = torch.cuda.device_count() if choose_device(config.run) == "cuda" else 0
    if nproc is not None:
        if gpus and nproc > gpus:
            raise UserError(f"--nproc: expected at most {gpus}, the GPUs of this machine, found {nproc}")
        return nproc
    return 1 if config.parallel.facts.one_rank else max(1, gpus)


def _stay_local() -> None:
    """Ranks of one machine talk over the loopback: gloo else looks the machine's name up, which may lead nowhere."""
    os.environ.setdefault(INTERFACE_VARIABLE, loopback())


def _can_run(config: Config, ranks: int) -> bool:
    try:
        check_ranks(config, ranks, resumes=True)
    except UserError:
        return False
    return True


def without_nproc(argv: list[str]) -> list[str]:
    """Return the command line for a rank, which must not launch again."""
    remaining_arguments, skip = [], False
    for argument in argv:
        if skip:
            skip = False
        elif argument == "--nproc":
            skip = True
        elif not argument.startswith("--nproc="):
            remaining_arguments.append(argument)
    return remaining_arguments
