"""Lines at the end of a run about samples that were left out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwright.train.errors import counted
from shardwright.train.step.trainer import Trainer


def counts_of_incidents(trainer: Trainer) -> dict[str, int]:
    """Figures for run.json. Empty if no sample was left out."""
    past = trainer.position.past
    if not past.left_out:
        return {}
    counts = {"skipped_steps": past.skips, "rewinds": past.rewinds, "samples_left_out": past.samples_left_out}
    return {**counts, "untrained_batches": past.untrained} if past.untrained else counts


def incidents_in_words(results: Mapping[str, Any]) -> list[str]:
    """The summary's line about them."""
    if "samples_left_out" not in results:
        return []
    samples, skips, rewinds = (results[key] for key in ("samples_left_out", "skipped_steps", "rewinds"))
    causes = [f"{counted(skips, 'step')} skipped", counted(rewinds, "rewind")] if skips or rewinds else []
    if untrained := results.get("untrained_batches", 0):
        causes.append(f"{counted(untrained, 'global batch', 'global batches')} without a trained token")
    return [f"{counted(samples, 'sample')} left out: {', '.join(causes)}; metrics.jsonl has the reasons"]
