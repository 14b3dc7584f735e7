"""Entries of torch's flight recorder of this process: collectives that nobody has noted on the heartbeat, such as a
user's own barrier. Only the process itself can read its recorder, so a thread of it copies this to the heartbeat."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from typing import Any

from shardwright.engine import heartbeat
from shardwright.engine.compat import flight_entries, ranks_by_group_name

MOST = 32  #: collectives that are noted


def note_flights(beat: heartbeat.Heartbeat) -> None:
    """Copy the collectives that run, and the numbers of the last ones of each group, to the heartbeat.

    Copies nothing if a record has another form, or a group ends meanwhile: without the thread that calls this, the rank
    would look as if something held its interpreter.
    """
    with suppress(LookupError, TypeError, ValueError, RuntimeError):
        entries = flight_entries()
        if entries is not None:
            _note(beat, entries)


def _note(beat: heartbeat.Heartbeat, entries: list[dict[str, Any]]) -> None:
    ranks = ranks_by_group_name()
    counts: dict[str, int] = {}
    flights: list[tuple[str, str, int, float]] = []
    for entry in entries:
        group = _group_of(entry, ranks)
        if group is None or entry.get("is_p2p"):
            continue
        number = int(entry["collective_seq_id"])
        counts[group] = max(number, counts.get(group, 0))
        if not entry["retired"] and len(flights) < MOST:
            age = max(0.0, (time.time_ns() - entry["time_created_ns"]) / 1e9)
            flights.append((entry["profiling_name"].partition(":")[2] or "a collective", group, number, age))
    beat.note_flights(json.dumps({"time": time.monotonic_ns(), "counts": counts, "flights": flights}))


def _group_of(entry: dict[str, Any], ranks: dict[str, list[int]]) -> str | None:
    """Return the group of a collective on heartbeats. torch numbers its collectives, so its name has
    torch's name, too."""
    name = entry["process_group"][0]
    return f"{heartbeat.group_name(ranks[name])}#{name}" if name in ranks else None
