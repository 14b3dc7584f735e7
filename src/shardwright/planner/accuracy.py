"""Plans beside the runs that followed them: a line of JSON for each run, in a file of the user's state folder.

Lines are appended in one write, so runs that end together keep theirs. A line that cannot be read counts as none.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from shardwright.common.json_text import strict_json
from shardwright.planner.verdict import in_gib


class Residual(NamedTuple):
    """A plan beside the run that followed it.

    Attributes:
        ended: the time of the run's end, in ISO form.
        device: the key of the device.
        ranks: the number of ranks.
        fits: the plan's answer: "yes", "barely" or "no".
        planned: bytes that the plan had reserved.
        reserved: bytes that the rank with the most has reserved; None: the run was out of memory.
        torch: the version of torch.
        shardwright: the version of this package.
    """

    ended: str
    device: str
    ranks: int
    fits: str
    planned: int
    reserved: int | None
    torch: str
    shardwright: str

    @property
    def share(self) -> float | None:
        """The part of the reserved bytes by which the plan is above them; None if the run was out of memory."""
        return self.planned / self.reserved - 1 if self.reserved else None


def file() -> Path:
    """Return the file of residuals: ``$XDG_STATE_HOME/shardwright/plans.jsonl``, by default in ``~/.local/state``."""
    home = os.environ.get("XDG_STATE_HOME", "")
    base = Path(home) if os.path.isabs(home) else Path(os.path.expanduser("~"), ".local", "state")
    return base / "shardwright" / "plans.jsonl"


def append(residual: Residual) -> None:
    """Keep a residual. Nothing happens if the file cannot be written."""
    line = strict_json(residual._asdict()).encode() + b"\n"
    path = file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            os.write(handle, line)
        finally:
            os.close(handle)
    except OSError:
        return


def read() -> list[Residual]:
    """Return the residuals that were kept, the oldest first."""
    try:
        lines = file().read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    return [each for line in lines if (each := _residual(line)) is not None]


def _residual(line: str) -> Residual | None:
    try:
        values: Mapping[str, Any] = json.loads(line)
        found = Residual(**values)
    except (ValueError, TypeError):
        return None
    numbers = [found.ranks, found.planned, *([] if found.reserved is None else [found.reserved])]
    texts = [found.ended, found.device, found.fits, found.torch, found.shardwright]
    right = all(type(each) is int for each in numbers) and all(type(each) is str for each in texts)
    return found if right else None


def in_words(residuals: Iterable[Residual]) -> str:
    """Return a table with a row for each device: how far plans were from the bytes that runs have reserved."""
    by_device: dict[str, list[Residual]] = {}
    for each in residuals:
        by_device.setdefault(each.device, []).append(each)
    if not by_device:
        return f"no run with a plan has ended yet; each one on a GPU adds a line to {file()}"
    lines = [
        f"plans beside runs, from {file()}; a plan above the bytes that were reserved is +",
        f"{'device':12} {'runs':>5} {'median':>8} {'least':>8} {'most':>8}  out of memory",
    ]
    for device, found in sorted(by_device.items()):
        shares = sorted(share for each in found if (share := each.share) is not None)
        figures = (
            [f"{share:+.1%}" for share in (median(shares), shares[0], shares[-1])] if shares else ["-"] * 3
        )
        failed = [each for each in found if each.reserved is None]
        unforeseen = sum(each.fits == "yes" for each in failed)
        words = f"{len(failed)}, {unforeseen} of them with a plan that fits" if failed else "0"
        lines.append(
            f"{device:12} {len(found):5} " + " ".join(f"{each:>8}" for each in figures) + f"  {words}"
        )
    worst = max((each for found in by_device.values() for each in found if each.share is not None),
                key=lambda each: abs(each.share or 0.0), default=None)  # fmt: skip
    if worst is not None and worst.reserved is not None:
        lines.append(
            f"farthest: {worst.ended}, {worst.ranks}x {worst.device}, planned {in_gib(worst.planned)} GiB, reserved "
            f"{in_gib(worst.reserved)}"
        )
    return "\n".join(lines)
