"""The page of a plan: its figures, the course of a step, and the settings that a search has planned.

The figures are those of ``shardwright plan --json``. Nothing here makes a plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shardwright.planner import Program, Speed, Verdict, as_values
from shardwright.train.report.page.document import LIMIT, document, size_of
from shardwright.train.report.page.step import MOST, step_picture, tensors_of


def plan_page(
    title: str,
    head: Sequence[str],
    program: Program,
    verdict: Verdict,
    edits: Sequence[tuple[str, Verdict]] = (),
    assumed: Mapping[str, object] | None = None,
    grid: Mapping[str, Any] | None = None,
    failed: Mapping[str, str] | None = None,
) -> str:
    """Return the text of an HTML file.

    Args:
        title: of the job.
        head: facts about the job.
        program, verdict: of the job.
        edits, assumed: as for `as_values`.
        grid: the plans of a search. Of each dimension ``name`` and ``values``; of each plan ``at``, the numbers of its
            values, ``keys``, ``fits``, ``reserved_bytes``, ``step_seconds``, ``tokens_per_second`` and ``losses``.
        failed: errors of changes that have no plan.
    """
    speed = verdict.speed
    values = {
        **as_values(verdict, edits, assumed or {}, failed or {}),
        "losses": losses_of(speed) if speed is not None else [],
        "tokens": program.tokens,
        "model_flops": program.model_flops,
        "tensors": tensors_of(verdict.peak),
        "grid": grid,
    }
    most = MOST
    while True:
        step = step_picture(program, verdict.device.figures, verdict.ranks, most)
        text = document(title, {"kind": "plan", "head": list(head), "plan": {**values, "step": step}})
        if size_of(text) < LIMIT or most < 100:
            return text
        most //= 2


def losses_of(speed: Speed) -> list[dict[str, object]]:
    """Return the parts of a step's time, each with its text and the setting that changes it."""
    return [loss._asdict() for loss in speed.losses()]
