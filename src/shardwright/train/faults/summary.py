"""What the end of a run says about samples that were left out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwright.train.errors import counted
from shardwright.train.trainer import Trainer


def counts_of_incidents(trainer: Trainer) -> dict[str, int]:
    """Figures for run.json. Empty if no sample was left out."""
    past = trainer.position.past
    if not past.left_out:
        return {}
    return {"skipped_steps": past.skips, "rewinds": past.rewinds, "samples_left_out": past.samples_left_out}


def incidents_in_words(results: Mapping[str, Any]) -> list[str]:
    """The summary's line about them."""
    if "samples_left_out" not in results:
        return []
    samples, skips, rewinds = (results[key] for key in ("samples_left_out", "skipped_steps", "rewinds"))
    return [
        f"{counted(samples, 'sample')} left out: {counted(skips, 'step')} skipped, {counted(rewinds, 'rewind')}; "
        "metrics.jsonl has the reasons"
    ]
