"""``shardwright doctor --measure``: all measurements in their order, as findings, and their text.

Each subject decides in its own file what is found and what to do. Here an unexpected error of one becomes a line, so
the others are still measured. Nothing here knows a threshold.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shardwright.cli.doctor.devices import find_devices
from shardwright.cli.doctor.findings import Finding, aligned, error_text, unmeasured
from shardwright.cli.doctor.folders import find_folder
from shardwright.cli.doctor.links import find_hosts, find_link
from shardwright.cli.doctor.memory import judge_host, judge_shared


def measure(report: dict[str, Any], folder: Path) -> list[Finding]:
    """Measure the machine of a report, and the folder. Takes about 10 s; each measurement has a limit.

    Hosts come first: the other ranks of a job wait for these, and for nothing else.
    """
    torch = report["torch"]
    gpus = len(torch.get("devices", ()))
    subjects: dict[str, Callable[[], list[Finding]]] = {
        "hosts": lambda: find_hosts(gpus),
        "devices": lambda: find_devices(gpus),
        "gloo": lambda: [find_link("gloo", torch)],
        "NCCL": lambda: [find_link("nccl", torch)],
        "memory": lambda: [judge_host(report["memory"])],
        "shared memory": lambda: [judge_shared(report["shared_memory"], gpus > 1)],
        "folder": lambda: [find_folder(folder)],
    }
    if gpus < 2:
        del subjects["NCCL"]
    found: list[Finding] = []
    for subject, find in subjects.items():
        try:
            found += find()
        except Exception as error:  # of a driver or a file system that nobody has thought of
            found.append(unmeasured(subject, error_text(error)[:200]))
    return found


@contextmanager
def exit_at_sigterm() -> Iterator[None]:
    """Let SIGTERM raise SystemExit, so that processes and files of a measurement are removed. For the main thread."""

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def text_of_findings(findings: Sequence[Finding]) -> str:
    """Return the findings for people: a line of each, and a second one with what to do."""
    rows = [row for finding in findings for row in finding.lines]
    advised = sum(bool(finding.advice) for finding in findings)
    end = f"{advised} of {len(findings)} lines have advice (->)" if advised else "nothing to do"
    return aligned([*rows, ("measured", end)])
