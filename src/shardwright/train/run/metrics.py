"""The end of metrics.jsonl: the last step that a run has recorded."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

INCIDENT = "incident"
"""The second key of a line of metrics.jsonl about samples that were left out. Its step is the one that comes next."""
SAVE_FAILURE = "save_failure"
"""The second key of a line about a checkpoint that could not be written. Steps after its own may come before it."""


LAST_BYTES = 1 << 16
"""The end of a file of metrics that certainly has a whole line."""


def recorded_step(metrics_file: Path) -> int:
    """Return the step of the last line of metrics.jsonl: the steps that a run has done. 0 if it has none."""
    return int(last_record(metrics_file).get("step", 0))


def last_record(metrics_file: Path) -> dict[str, Any]:
    """Return the last whole line of metrics.jsonl about a step that was done. Empty if there is none."""
    if not os.path.isfile(metrics_file):
        return {}
    try:
        with open(metrics_file, "rb") as stream:
            stream.seek(-min(LAST_BYTES, os.path.getsize(metrics_file)), os.SEEK_END)
            # After the last line end there is nothing, or half a line.
            lines = stream.read().split(b"\n")[:-1]
    except OSError:
        return {}
    for line in reversed(lines):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if not isinstance(record, dict) or type(record.get("step")) is not int:
            continue
        if not record.keys() & {INCIDENT, SAVE_FAILURE}:
            return record
    return {}
