"""Kills a training job in many ways and checks from its history that nothing is lost.

``make faults`` runs this: at least 200 faults, drawn from a seed, over 1 to 4 ranks. Ranks are forked from a process
that has imported torch; 20 kills meet the real command. The table goes to benchmarks/results.

Most of a run is waiting, so several lanes run at the same time: each is a process with its part of the faults, and
what it draws depends on the seed and the number of lanes alone. All lanes write one history.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import shardwright.train.rank.process  # noqa: F401  # the ranks are forked, and need not import it
from tools.faults.campaign import Campaign
from tools.faults.checker import Verdict, check
from tools.faults.commands import KILLS, SETTINGS, Command
from tools.faults.history import read
from tools.faults.jobs import store


def main() -> int:
    parser = argparse.ArgumentParser(prog="make faults", description=__doc__)
    parser.add_argument("--kills", type=int, default=200, help="faults of forked ranks (%(default)s)")
    parser.add_argument("--commands", type=int, default=20, help="kills of the real command (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--lanes", type=int, choices=(1, 2, 4), default=2, help="forked jobs at the same time (%(default)s)"
    )
    parser.add_argument("--minutes", type=float, default=28.0, help="no run begins after them (%(default)s)")
    parser.add_argument(
        "--keep", type=Path, help="a folder that does not exist, for the runs and the history"
    )
    parser.add_argument("--table", type=Path, help="a file for the table, beside the terminal")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.keep is not None and options.keep.exists():
        parser.error(f"--keep: expected a folder that does not exist, found {options.keep}; give another one")
    folder = options.keep or Path(tempfile.mkdtemp(prefix="shardwright-faults-"))
    folder.mkdir(parents=True, exist_ok=True)
    history, began = folder / "history.jsonl", time.monotonic()
    history.touch()
    try:
        _run(folder, history, options)
        verdicts, problems = check(read(history))
        if len(verdicts) < options.kills + options.commands:
            problems.append(
                f"the time was up after {len(verdicts)} of {options.kills + options.commands} faults"
            )
    except BaseException:
        print(f"the runs are in {folder}", file=sys.stderr)
        raise
    text = table(verdicts, problems, options.seed, time.monotonic() - began)
    print(text)
    if options.table is not None:
        options.table.write_text(text)
    found = problems or any(each.problems for each in verdicts)
    if found:
        print(f"the runs are in {folder}", file=sys.stderr)
    elif options.keep is None:
        shutil.rmtree(folder)
    return 1 if found else 0


class Interrupted(RuntimeError):
    """A lane has not come to its end."""


def _run(folder: Path, history: Path, options: argparse.Namespace) -> None:
    """Run all lanes to their ends.

    Raises:
        Interrupted: one of them has failed. The others are ended.
    """
    deadline = time.monotonic() + 60 * options.minutes
    lanes = (
        {_forked(_commands, folder, history, options, deadline): "of the command"} if options.commands else {}
    )
    for lane in range(options.lanes):
        lanes[_forked(_kills, folder, history, options, deadline, lane)] = str(lane)
    try:
        while lanes:
            process, status = os.wait()
            lane = lanes.pop(process)
            if status:
                raise Interrupted(f"the lane {lane} ended with status {os.waitstatus_to_exitcode(status)}")
    finally:
        for process in lanes:
            os.kill(process, signal.SIGTERM)
        for process in lanes:
            os.waitpid(process, 0)


def _forked(run: Callable[..., None], *arguments: Any) -> int:
    """Run a lane in a process, whose id this returns."""
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))
        run(*arguments)
        status = 0
    except Exception:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _kills(folder: Path, history: Path, options: argparse.Namespace, deadline: float, lane: int) -> None:
    """Runs of forked ranks: each other pair of them if there are two lanes. A pair saves in two ways, see SETTINGS."""
    numbers = (number for number in itertools.count() if number // 2 % options.lanes == lane)
    kills = len(range(lane, options.kills, options.lanes))
    with store() as port:
        campaign = Campaign(folder, history, options.seed, port)
        met = 0
        while met < kills and time.monotonic() < deadline:
            met += campaign.run(number := next(numbers), kills - met)
            _say(f"lane {lane}: run {number} is over, {met} faults of {kills}")


def _commands(folder: Path, history: Path, options: argparse.Namespace, deadline: float) -> None:
    """Runs of the real command, with their references from forked ranks."""
    with store() as port:
        campaign = Campaign(folder, history, options.seed, port)
        met = number = 0
        while met < options.commands and time.monotonic() < deadline:
            setting = SETTINGS[number % len(SETTINGS)]
            campaign.reference(setting)
            command = Command(setting, folder / f"command-{number}", history, f"command {number}")
            kills = min(KILLS, options.commands - met)
            met += command.with_kills(random.Random(f"{options.seed} command {number}"), kills)
            number += 1
            _say(f"the command: {met} kills of {options.commands}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def table(verdicts: list[Verdict], problems: list[str], seed: int, seconds: float) -> str:
    """The faults by kind and phase, and what they have done to the runs."""
    groups: dict[tuple[str, str], list[Verdict]] = defaultdict(list)
    for each in verdicts:
        fault = each.fault
        how = "SIGKILL" if fault["fault_kind"] == "kill" else fault["fault_kind"]
        who = f"{how} {fault['fault_victim']}" if how == "SIGKILL" else how
        groups[who, fault["fault_phase"]].append(each)
    head = f"{'fault':18} {'at':10} {'faults':>6} {'wrong':>6} {'steps again':>12} {'longest s':>10}"
    lines = [head, "-" * len(head)]
    for (who, phase), group in sorted(groups.items()):
        wrong = sum(bool(each.problems) for each in group)
        again = max(each.repeated for each in group)
        longest = max(each.seconds for each in group)
        lines.append(f"{who:18} {phase:10} {len(group):6} {wrong:6} {again:12} {longest:10.1f}")
    wrong = sum(bool(each.problems) for each in verdicts)
    lines.append(
        f"\n{len(verdicts)} faults, {wrong} with a problem, {len(problems)} problems of runs; seed {seed}, "
        f"torch {torch.__version__}, {seconds / 60:.1f} minutes"
    )
    lines += [problem for each in verdicts for problem in each.problems] + problems
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
