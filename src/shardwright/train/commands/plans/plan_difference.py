"""`shardwright plan A.toml B.toml`: what makes the difference between the plans of two jobs. Nothing is started."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from shardwright.common.json_text import strict_json
from shardwright.planner import Owner, Verdict, in_gib, in_time
from shardwright.train.commands.plans.plan import program_and_verdict
from shardwright.train.commands.plans.planned_job import PlannedJob

SHOWN = 6  #: owners of memory, and losses
LEAST = 0.01  #: the part of a peak, or of a step, that a difference must have to be shown


def plan_difference(jobs: Sequence[PlannedJob], json: bool) -> int:
    """Print both plans side by side, with the tensors and the losses that differ; returns 0, or 3 if one does not fit.

    ``jobs``: two of them.

    Raises:
        UserError: no plan covers a job.
    """
    verdicts = [program_and_verdict(job, job())[1] for job in jobs]
    (a, b), names = verdicts, [job.name for job in jobs]
    memory, time = _memory(a, b), _time(a, b)
    if json:
        values = {
            "jobs": [
                {
                    "job": name,
                    "fits": each.answer,
                    "reserved_bytes": each.usage.reserved,
                    "step_seconds": None if each.speed is None else list(each.speed.seconds),
                }
                for name, each in zip(names, verdicts, strict=True)
            ],
            "memory": [{"owner": words, "bytes": nbytes} for nbytes, words in memory],
            "time": [{"loss": words, "seconds": seconds} for seconds, words in time],
        }
        print(strict_json(values, indent=2))
    else:
        for name, each in zip(names, verdicts, strict=True):
            print(f"{name:24} {_figures(each)}")
        print(*_rows("memory", [(f"{_signed(n, in_gib)} GiB", words) for n, words in memory]), sep="\n")
        print(*_rows("time", [(_signed(s, in_time), words) for s, words in time]), sep="\n")
    return max(each.status for each in verdicts)


def _figures(verdict: Verdict) -> str:
    words = f"{in_gib(verdict.usage.reserved)} GiB reserved of {in_gib(verdict.room)}"
    if (speed := verdict.speed) is not None:
        words += (
            f"; {speed.tokens_per_second[1]:,.0f} tokens/s on each device, {in_time(speed.seconds[1])} a step"
        )
    return words


def _rows(head: str, rows: list[tuple[str, str]]) -> Iterator[str]:
    yield f"{head:8} {'the second one has' if rows else 'no difference of 1% or more'}"
    yield from (f"{'':8} {figure:>12}  {words}" for figure, words in rows)


def _signed(value: float, in_words: Callable[[float], str]) -> str:
    return f"{'+' if value >= 0 else '-'}{in_words(abs(value))}"


def _memory(a: Verdict, b: Verdict) -> list[tuple[int, str]]:
    """Owners of other bytes at the peaks, with the difference, those that differ most first."""
    first, second = _by_owner(a), _by_owner(b)
    differences = [(second.get(key, 0) - first.get(key, 0), key) for key in {*first, *second}]
    least = LEAST * max(a.peak.nbytes, b.peak.nbytes)
    return sorted(
        (each for each in differences if abs(each[0]) >= least), key=lambda each: (-abs(each[0]), each[1])
    )[:SHOWN]


def _by_owner(verdict: Verdict) -> dict[str, int]:
    nbytes_of: dict[str, int] = {}
    for owner, nbytes in verdict.peak.by_owner.items():
        words = _in_words(owner)
        nbytes_of[words] = nbytes_of.get(words, 0) + nbytes
    return nbytes_of


def _in_words(owner: Owner) -> str:
    """Owners of all layers together."""
    if not owner.what:
        return owner.group
    operation = owner.what.split(" ")[0] if owner.line else owner.what.split(" of ")[0]
    return f"{owner.group}, {operation}" + (f", {owner.line}" if owner.line else "")


def _time(a: Verdict, b: Verdict) -> list[tuple[float, str]]:
    """Losses that differ, those that differ most first."""
    if a.speed is None or b.speed is None:
        return []
    first, second = ({loss.text: loss.seconds for loss in each.losses()} for each in (a.speed, b.speed))
    least = LEAST * max(a.speed.seconds[1], b.speed.seconds[1])
    differences = [(second.get(text, 0.0) - first.get(text, 0.0), text) for text in {*first, *second}]
    return sorted(
        (each for each in differences if abs(each[0]) >= least), key=lambda each: (-abs(each[0]), each[1])
    )[:SHOWN]
