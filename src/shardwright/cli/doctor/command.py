"""`shardwright doctor`."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from shardwright.cli.command import Call, Command
from shardwright.cli.parsing import Parser
from shardwright.common.json_text import strict_json
from shardwright.train.errors import UserError


def _run(call: Call) -> int:
    from shardwright.cli.doctor.description import examine, text_of

    options = call.options
    if not options.measure:
        report = examine()
        print(strict_json(report, indent=2) if options.json else text_of(report))
        return 0

    from shardwright.cli.doctor.links import find_hosts, is_rank_of_several
    from shardwright.cli.doctor.measurements import exit_at_sigterm, measure, text_of_findings
    from shardwright.train.launch.slurm import variables_of_task

    with suppress(UserError):  # of a job that SLURM started in an unusual way: then this process is alone
        os.environ.update(variables_of_task(os.environ))
    report = examine()
    if is_rank_of_several(os.environ) and os.environ["RANK"] != "0":
        with suppress(Exception):  # the first rank reports what failed
            find_hosts(len(report["torch"].get("devices", ())))
        return 0
    with exit_at_sigterm():
        findings = measure(report, Path(options.folder))
    if options.json:
        print(strict_json({**report, "measured": [each.as_json() for each in findings]}, indent=2))
    else:
        print(f"{text_of(report)}\n\n{text_of_findings(findings)}")
    return 0


def _add_options(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON; sizes are bytes")
    parser.add_argument(
        "--measure",
        action="store_true",
        help="measure GPUs, links, memory and a folder, too, and say what to do about each; takes about 10 s",
    )
    parser.add_argument(
        "--folder",
        metavar="DIR",
        default=".",
        help="with --measure: the folder for checkpoints whose speed is measured (default: the current one)",
    )


COMMAND = Command("doctor", "show versions, devices and settings for a bug report", _add_options, _run)
