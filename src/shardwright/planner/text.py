"""A verdict in lines for people, and as JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from shardwright.planner.allocator import GIB
from shardwright.planner.verdict import MARGIN, Verdict

_ANSWERS = {
    "yes": "YES",
    "barely": f"BARELY: less room is left than the {MARGIN:.0%} by which the plan may be off",
    "no": "NO",
}


def in_gib(nbytes: float) -> str:
    return f"{nbytes / GIB:.2f}"


def lines_of(verdict: Verdict) -> list[str]:
    """The lines that ``shardwright plan`` prints below the model's."""
    usage, peak = verdict.usage, verdict.peak
    least, most = (in_gib(each) for each in verdict.runtime)
    missing = "" if verdict.left >= 0 else f"; {in_gib(-verdict.left)} GiB are missing"
    if missing and verdict.answer == "barely":
        missing += ", which PyTorch's allocator gets by emptying its cache in each step"
    rows = [
        ("fits?", _ANSWERS[verdict.answer] + missing),
        (
            "",
            f"{in_gib(usage.reserved)} GiB reserved of {in_gib(verdict.room)}, which are the "
            f"{in_gib(verdict.device.nbytes)} of {verdict.device.name} less a runtime of {most}",
        ),
        ("exact", _sum(verdict.exact)),
        ("traced", _sum(verdict.traced)),
        (
            "cache",
            f"{in_gib(verdict.cached):>7}  reserved and not live when most is reserved: PyTorch's allocator",
        ),
        ("runtime", f"{most:>7}  CUDA context and NCCL, between {least} and {most}; not measured here"),
        ("peak", f"{peak.phase}: {peak.owner.what}" + (f", {peak.owner.line}" if peak.owner.line else "")),
    ]
    return [f"{head:8} {text}" for head, text in rows]


def _sum(groups: Mapping[str, int]) -> str:
    shown = [(name, nbytes) for name, nbytes in groups.items() if round(nbytes / GIB, 2) > 0]
    parts = ", ".join(f"{name} {in_gib(nbytes)}" for name, nbytes in shown)
    return f"{in_gib(sum(groups.values())):>7}  {parts or 'less than 0.01 GiB each'}"


def as_json(verdict: Verdict, edits: Sequence[tuple[str, Verdict]] = ()) -> str:
    """All figures in bytes. ``edits``: changes of the job in words, and the verdicts on the changed jobs."""
    peak = verdict.peak
    return json.dumps(
        {
            "fits": verdict.answer,
            "device": verdict.device.key,
            "device_bytes": verdict.device.nbytes,
            "ranks": verdict.ranks,
            "reserved_bytes": verdict.usage.reserved,
            "active_bytes": verdict.usage.active,
            "live_bytes": peak.nbytes,
            "cached_bytes": verdict.cached,
            "room_bytes": verdict.room,
            "left_bytes": verdict.left,
            "runtime_bytes": list(verdict.runtime),
            "exact": verdict.exact,
            "traced": verdict.traced,
            "edits": [
                {"keys": words, "fits": other.answer, "reserved_bytes": other.usage.reserved}
                for words, other in edits
            ],
            "peak": {"phase": peak.phase, "operation": peak.owner.what, "line": peak.owner.line},
        },
        indent=2,
    )
