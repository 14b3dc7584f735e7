"""The judgement of a campaign's history: whether each run went on rightly after each fault. Nothing here runs a job.

A run that nobody disturbed is the reference of runs with the same configuration and the same number of ranks.

1. A checkpoint whose save has returned is not lost: the next attempt resumes from it, or from a later one.
2. Every rank resumes from the same step, and does each step after it once, with the samples of the reference.
3. Weights and optimizer state of each rank are bit-equal to the reference after each step, and after each resume. In a
   run whose number of ranks changes, losses differ by rounding at most.
4. No rank has to be killed because it waits without end, apart from those that a fault has stopped. The ranks that are
   left end with status 75, or 1 after an error. No writer process lives longer than its trainer.
5. The last attempt of each run does the last step, and its last checkpoint is bit-equal to the reference.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

Line = dict[str, Any]
ROUNDING = 1e-3
"""Largest difference of losses, as a part of the loss, between different numbers of ranks."""


@dataclass
class Attempt:
    """The lines of one attempt."""

    ranks: int
    faults: list[Line] = field(default_factory=list)
    resumed: list[Line] = field(default_factory=list)
    steps: list[Line] = field(default_factory=list)
    saved: list[int] = field(default_factory=list)
    ended: Line | None = None

    @property
    def begins_after(self) -> int | None:
        """The step after which it goes on; None if no rank has come so far."""
        if self.resumed:
            return int(self.resumed[0]["step"])
        return min((int(each["step"]) for each in self.steps), default=1) - 1 if self.steps else None


@dataclass
class Run:
    """The lines of one run."""

    config: str
    ranks: int  #: of its first attempt
    steps: int  #: that it has to do
    is_reference: bool
    attempts: list[Attempt] = field(default_factory=list)
    final: str = ""

    def reference(self) -> dict[tuple[int, int], Line]:
        return {(line["step"], line["rank"]): line for line in self.attempts[0].steps}


@dataclass(frozen=True)
class Verdict:
    """The outcome of one fault."""

    fault: Line
    problems: tuple[str, ...]
    repeated: int  #: steps that were done again
    seconds: float  #: from the start of the attempt to the end of all its ranks


def runs_of(lines: Iterable[Line]) -> dict[str, Run]:
    """The runs of a history."""
    runs: dict[str, Run] = {}
    for line in lines:
        event, name = line["event"], line["run"]
        if event == "run":
            runs[name] = Run(line["config"], line["ranks"], line["steps"], line["is_reference"])
            continue
        run = runs[name]
        if event == "attempt":
            run.attempts.append(Attempt(line["ranks"]))
        elif event == "final":
            run.final = line["digest"]
        elif event == "saved":
            run.attempts[-1].saved.append(line["step"])
        elif event == "ended":
            run.attempts[-1].ended = line
        elif event in ("fault", "resumed", "step"):
            lists = {
                "fault": run.attempts[-1].faults,
                "resumed": run.attempts[-1].resumed,
                "step": run.attempts[-1].steps,
            }
            lists[event].append(line)
    return runs


def check(lines: Iterable[Line]) -> tuple[list[Verdict], list[str]]:
    """A verdict for each fault, and problems of runs that belong to no fault."""
    runs = runs_of(lines)
    references = {(run.config, run.ranks): run for run in runs.values() if run.is_reference}
    verdicts, problems = [], []
    for name, run in runs.items():
        found = _check_run(run, references[run.config, run.ranks])
        problems += [f"{name}: {problem}" for problem in _check_end(run, references[run.config, run.ranks])]
        for number, attempt in enumerate(run.attempts):
            following = found.get(number + 1, ()) if number + 1 < len(run.attempts) else ()
            for fault in attempt.faults:
                own = (*_check_ended(attempt, fault), *following)
                after = run.attempts[number + 1].begins_after if number + 1 < len(run.attempts) else None
                last = max((each["step"] for each in attempt.steps), default=0)
                repeated = max(0, last - after) if after is not None and attempt.steps else 0
                seconds = float(attempt.ended["seconds"]) if attempt.ended is not None else 0.0
                verdicts.append(
                    Verdict(
                        fault,
                        tuple(f"{name}, attempt {number + 1}: {each}" for each in own),
                        repeated,
                        seconds,
                    )
                )
        problems += [f"{name}, attempt 1: {each}" for each in found.get(0, ())]
    return verdicts, problems


def _check_run(run: Run, reference: Run) -> dict[int, tuple[str, ...]]:
    """By number of the attempt, from 0, what it does wrong."""
    expected = reference.reference()
    rows = _rows(reference.attempts[0])
    found: dict[int, tuple[str, ...]] = {}
    acknowledged, same_ranks = 0, True
    for number, attempt in enumerate(run.attempts):
        same_ranks = same_ranks and attempt.ranks == run.ranks
        problems = []
        begins = attempt.begins_after
        if begins is not None and begins < acknowledged:
            problems.append(f"step {acknowledged} was saved, and the attempt goes on from step {begins}")
        if len({line["step"] for line in attempt.resumed}) > 1:
            problems.append("ranks resume from different steps")
        if same_ranks:
            problems += [
                f"rank {line['rank']} has other weights at step {line['step']}, from its {line['event']}"
                for line in (*attempt.resumed, *attempt.steps)
                if "digest" in line and line["digest"] != expected[line["step"], line["rank"]]["digest"]
            ]
        problems += _check_steps(attempt, begins, expected, rows)
        found[number] = tuple(problems)
        acknowledged = max([acknowledged, *attempt.saved])
    return found


def _check_steps(
    attempt: Attempt, begins: int | None, expected: dict[tuple[int, int], Line], rows: dict[int, list[int]]
) -> list[str]:
    problems = []
    by_rank: dict[int, list[int]] = defaultdict(list)
    for line in attempt.steps:
        by_rank[line["rank"]].append(line["step"])
        loss = expected[line["step"], 0]["loss"]
        if not abs(line["loss"] - loss) <= ROUNDING * abs(loss):
            problems.append(f"the loss of step {line['step']} is {line['loss']}, expected {loss}")
    for rank, steps in by_rank.items():
        assert begins is not None
        if steps != list(range(begins + 1, begins + 1 + len(steps))):
            problems.append(f"rank {rank} does steps {steps} after step {begins}")
    for step, found in _rows(attempt).items():
        if found != rows[step]:
            problems.append(f"step {step} has other samples")
    return problems


def _rows(attempt: Attempt) -> dict[int, list[int]]:
    """By step the checksums of its samples in order of their value, for steps that every rank has done."""
    rows: dict[int, list[int]] = defaultdict(list)
    ranks: dict[int, int] = defaultdict(int)
    for line in attempt.steps:
        rows[line["step"]] += line["rows"]
        ranks[line["step"]] += 1
    return {step: sorted(found) for step, found in rows.items() if ranks[step] == attempt.ranks}


def _check_ended(attempt: Attempt, fault: Line) -> list[str]:
    ended = attempt.ended
    if ended is None:
        return ["the attempt did not end"]
    problems = []
    held = {fault["fault_rank"]} if fault["fault_kind"] == "gil" else set()
    if waiting := sorted(set(ended["killed"]) - held):
        problems.append(f"ranks {waiting} had to be killed")
    allowed = (0, -9, 75, 1) if fault["fault_kind"] == "error" else (0, -9, 75)
    if odd := [status for status in ended["statuses"] if status not in allowed]:
        problems.append(f"ranks ended with status {odd}")
    if ended["orphans"]:
        problems.append(f"{ended['orphans']} writer processes outlived their trainers")
    return problems


def _check_end(run: Run, reference: Run) -> list[str]:
    problems = []
    last = run.attempts[-1]
    if last.ended is None or any(last.ended["statuses"]):
        problems.append("the last attempt failed")
    if last.steps and max(line["step"] for line in last.steps) != run.steps:
        problems.append(f"the last step is not {run.steps}")
    if all(attempt.ranks == run.ranks for attempt in run.attempts) and run.final != reference.final:
        problems.append("the last checkpoint is not bit-equal to the reference")
    if not run.final:
        problems.append("no last checkpoint")
    return problems
