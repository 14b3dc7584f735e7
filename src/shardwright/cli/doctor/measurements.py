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

from shardwright.cli.doctor import memory
from shardwright.cli.doctor.clocks import find_clocks
from shardwright.cli.doctor.devices import find_devices
from shardwright.cli.doctor.finding import Finding, unmeasured
from shardwright.cli.doctor.folders import find_folder
from shardwright.cli.doctor.hosts import find_hosts
from shardwright.cli.doctor.links import find_link
from shardwright.cli.doctor.network import find_network
from shardwright.cli.doctor.words import error_text


def measure(report: dict[str, Any], folder: Path) -> list[Finding]:
    """Measure the machine of a report, and the folder. Takes about 10 s; each measurement has a limit.

    Clocks and hosts come first: the other ranks of a job wait for these, and nothing else.
    """
    torch = report["torch"]
    gpus = len(torch.get("devices", ()))
    backends = torch.get("backends", {})
    if torch["version"] is None:
        found = [unmeasured("clocks", "torch cannot be imported", "see `problems`")]
    else:
        found = _found("clocks", lambda: [find_clocks()])
        found += _found("hosts", lambda: find_hosts(gpus))
    found += _found("devices", lambda: find_devices(gpus))
    if torch["version"] is None:
        found.append(unmeasured("gloo", "torch cannot be imported", "see `problems`"))
    elif not backends.get("gloo"):
        found.append(unmeasured("gloo", "this torch has no gloo", "install a torch that has it"))
    else:
        found += _found("gloo", lambda: [find_link("gloo")])
    if gpus > 1:
        if backends.get("nccl"):
            found += _found("NCCL", lambda: [find_link("nccl")])
        else:
            advice = "GPUs communicate through NCCL: install a torch that has it"
            found.append(unmeasured("NCCL", "this torch has no NCCL", advice))
    elif gpus:
        found.append(Finding("NCCL", "one GPU, so no two ranks were measured"))
    found += _found("network", lambda: [find_network()])
    found += _found("memory", lambda: memory.findings(gpus > 1))
    return found + _found("folder", lambda: [find_folder(folder)])


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
    """The findings for people: a line of each, and a second one with what to do."""
    rows = [row for finding in findings for row in finding.lines]
    advised = sum(bool(finding.advice) for finding in findings)
    end = f"{advised} of {len(findings)} lines have advice (->)" if advised else "nothing to do"
    rows.append(("measured", end))
    width = max(len(name) for name, _ in rows) + 2
    return "\n".join(f"{name:{width}}{text}" for name, text in rows)


def _found(subject: str, find: Callable[[], list[Finding]]) -> list[Finding]:
    try:
        return find()
    except Exception as error:  # of a driver or a file system that nobody has thought of
        return [unmeasured(subject, error_text(error))]
