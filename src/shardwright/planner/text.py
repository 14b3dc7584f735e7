"""A verdict as JSON for programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from shardwright.planner.speed import Speed
from shardwright.planner.verdict import Verdict, peak_in_words


def as_values(
    verdict: Verdict,
    edits: Sequence[tuple[str, Verdict]] = (),
    assumed: Mapping[str, object] = MappingProxyType({}),
    failed: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, object]:
    """Return all figures in bytes.

    ``edits``: changes of the job in words, and the verdicts on the changed jobs. ``assumed``: values of keys that
    nobody gave. ``failed``: errors of changes that have no plan.
    """
    peak = verdict.peak
    return {
        "fits": verdict.answer,
        "assumed": dict(assumed),
        "device": verdict.device.key,
        "device_bytes": verdict.device.nbytes,
        "ranks": verdict.ranks,
        "reserved_bytes": verdict.usage.reserved,
        "unlimited_reserved_bytes": verdict.unlimited.reserved,
        "retries": verdict.retries,
        "retries_each_step": verdict.retries_each_step,
        "active_bytes": verdict.usage.active,
        "live_bytes": peak.nbytes,
        "cached_bytes": verdict.cached,
        "room_bytes": verdict.room,
        "left_bytes": verdict.left,
        "runtime_bytes": list(verdict.runtime),
        "exact": verdict.exact,
        "traced": verdict.traced,
        "phases": {
            name: {"live_bytes": on_device, "host_bytes": on_host}
            for name, (on_device, on_host) in verdict.parts.items()
        },
        "host": verdict.host,
        "host_need_bytes": verdict.host_need,
        "host_device_bytes": verdict.device.host_nbytes,
        "speed": _speed(verdict.speed),
        "edits": [
            {
                "keys": words,
                "fits": other.answer,
                "reserved_bytes": other.usage.reserved,
                "step_seconds": None if other.speed is None else other.speed.seconds[1],
                "unlimited_reserved_bytes": other.unlimited.reserved,
            }
            for words, other in edits
        ],
        "failed_edits": dict(failed),
        "peak": {
            "text": peak_in_words(peak),
            "phase": peak.phase,
            "owner": peak.owner.group,
            "unit": peak.owner.unit,
            "operation": peak.owner.what,
            "line": peak.owner.line,
        },
    }


def _speed(speed: Speed | None) -> dict[str, object] | None:
    """Return times in seconds. A time that is a range is the least, the likely and the largest one."""
    if speed is None:
        return None
    return {
        "step_seconds": list(speed.seconds),
        "tokens_per_second": list(speed.tokens_per_second) if speed.tokens else None,
        "mfu": speed.mfu if speed.model_flops else None,
        "losses": [
            {"name": loss.name, "seconds": loss.seconds, "setting": loss.setting} for loss in speed.losses()
        ],
        "collectives_seconds": dict(speed.timeline.communication),
    }
