"""Verdicts on ranks that do not go on, from what was seen of each one. All functions here are pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from shardwright.engine import heartbeat
from shardwright.watching.reading import (
    BETWEEN_STEPS,
    DISK,
    ENDED,
    LEFT,
    RUNS,
    SILENT,
    STOPPED,
    Seen,
    outer_phase,
    place_in_words,
    step_in_words,
)

#: Factor by which a phase that reads or writes files, or compiles, may last longer than others.
PATIENCE = 10
#: Kinds of verdicts.
BEHIND, OUTSIDE, ALONE, JOINED, MIXED = (
    "behind in a collective", "behind outside any collective", "nobody waits", "all joined", "in different collectives"
)  # fmt: skip

#: Phases in which collectives may run that are not on heartbeats.
_WITHOUT_NOTES = (heartbeat.OUTSIDE, heartbeat.MODEL, heartbeat.VALIDATION, heartbeat.SAMPLE, heartbeat.END)
#: Phases that may last for ever in code of a user.
_OWN_CODE = (heartbeat.OUTSIDE, heartbeat.START)
_PROCESS = {
    STOPPED: "process stopped (T)",
    DISK: "waits for a disk or a driver (D)",
    ENDED: "process ended without a word",
    LEFT: "process ended in order",
}
_HELD = "no thread of it runs: something holds Python's interpreter (GIL)"
_WAYS = {
    STOPPED: "A debugger, a terminal (Ctrl-Z) or a program of the host has stopped the process.",
    DISK: "Look at the disks, network file systems and drivers of its host.",
    ENDED: "Look for the out-of-memory killer in the host's log (dmesg), and at the end of that rank's output.",
    LEFT: "Every rank must make the same number of steps: give each the same number of batches.",
    SILENT: "Look whether its host runs, and at the network.",
    RUNS: "",  # only its stacks show more, and whoever writes them says so
}
_WAY_ALONE = " No other host answers host {host}, so its own link may be cut: look there, too."
_WAY_HELD = "A call into C or C++ code keeps the interpreter and does not return."
_WAY_JOINED = (
    "Every rank must call it with the same arguments, such as the source of a broadcast. Else look at the network "
    "between hosts, and at the driver of the devices. If it is only slow, raise {key}."
)
_WAY_MIXED = "Every rank must call the same collectives, of the same groups, in the same order."
_WAY_DATA = "Look at the data: a file system, a worker of a loader or a stream that does not answer."


@dataclass(frozen=True)
class Diagnosis:
    """The reason why the job does not go on.

    Attributes:
        kind: BEHIND, OUTSIDE, ALONE (outside any collective, and no rank waits for it), JOINED or MIXED.
        culprits: the ranks for which the others wait; empty with JOINED and MIXED.
        reason: where each rank is, in one line.
        way: what to do.
        lost: the culprits cannot go on: their processes are stopped, have ended, or do not answer.
        step: the running step of the culprits, or of the rank that is furthest behind. Between two steps, the next one.
        phase: of that rank, or the phase around it, one of ``heartbeat.PHASES`` by number.
    """

    kind: str
    culprits: tuple[int, ...]
    reason: str
    way: str
    lost: bool
    step: int
    phase: int = heartbeat.OUTSIDE

    @property
    def text(self) -> str:
        """Some lines: what is wrong, where each rank is, what to do."""
        parts = self.reason.split("; ")
        return "\n".join([self.headline, *("  " + part for part in parts), *([self.way] if self.way else [])])

    @property
    def done(self) -> int:
        """The steps that this rank has done."""
        return max(0, self.step - 1)

    @property
    def headline(self) -> str:
        who, several = heartbeat.ranks_in_words(self.culprits), len(self.culprits) > 1
        place = f"in step {self.step}"
        if self.phase in BETWEEN_STEPS:
            place = f"in the {heartbeat.PHASES[self.phase]} after step {self.done}"
        if self.phase == heartbeat.END:
            place = f"at the end of the job, after step {self.done}"
        if self.phase == heartbeat.START:
            place = "at the start of the job"
        hangs = f"the job hangs {place}"
        if self.kind == BEHIND:
            return f"{hangs}: {who} {'are' if several else 'is'} behind the others"
        if self.kind == OUTSIDE:
            return f"{hangs}: {who} {'are' if several else 'is'} behind the others, outside any collective"
        if self.kind == ALONE:
            return f"{hangs}: {who} {'do' if several else 'does'} not go on, outside any collective"
        if self.kind == MIXED:
            return f"{hangs}: the ranks wait for each other in different collectives"
        return f"{hangs}: all ranks have joined a collective, and it does not end"


def diagnose(
    seen: Sequence[Seen], stall_seconds: float, key: str = "stall_seconds", strict: bool = False
) -> Diagnosis | None:
    """Return the verdict on the ranks now, or None if they go on, or may still go on.

    Args:
        seen: every rank of the job.
        stall_seconds: how long a rank may wait.
        key: the name of that setting, for messages.
        strict: whether a rank outside the model must go on even if no rank waits for it. A user's code between two
            steps may take any time.
    """
    ranks = {each.rank: _with_flight(each) for each in seen}
    waiting = [each for each in ranks.values() if each.collective and not each.is_stuck]
    late = [each for each in waiting if each.age > stall_seconds]
    if not late:
        return _alone(ranks, stall_seconds, key, strict) if not waiting else None
    missing = {each.rank: _missing(each, ranks) for each in waiting}
    behind = {rank for each in missing.values() for rank in each}
    roots = [
        ranks[rank] for rank in sorted(behind) if ranks[rank] not in waiting or ranks[rank].answers is False
    ]
    longest = max(each.age for each in late)
    if roots:
        if longest <= PATIENCE * stall_seconds and not any(_is_late(each, stall_seconds) for each in roots):
            return None
        outside = all(not each.collective and each.process != SILENT for each in roots)
        return _verdict(OUTSIDE if outside else BEHIND, roots, ranks, key)
    if not behind:
        stuck = [each for each in ranks.values() if each.is_stuck and each.process != LEFT] or [
            each for each in ranks.values() if each.answers is False
        ]
        if stuck:
            return _verdict(BEHIND, stuck, ranks, key)
    if longest <= stall_seconds * (PATIENCE if all(each.patient for each in late) else 1):
        return None
    mixed = behind or len({(each.group, each.count) for each in waiting}) < len(
        {_place(each) for each in waiting}
    )
    return _verdict(MIXED if mixed else JOINED, [], ranks, key)


def diagnose_start(seen: Sequence[Seen], seconds: float, key: str = "stall_seconds") -> Diagnosis | None:
    """Return the verdict on ranks of which some have no heartbeat yet. None: no process is stopped, or not for so many
    seconds.

    A rank without a heartbeat has the age of its process's state.
    """
    stopped = [each for each in seen if each.process == STOPPED and each.age > seconds]
    ranks = {each.rank: each for each in seen}
    if not stopped:
        return None
    kind = ALONE if len(stopped) == len(seen) else OUTSIDE
    return replace(_verdict(kind, stopped, ranks, key), phase=heartbeat.START)


def _alone(ranks: Mapping[int, Seen], stall_seconds: float, key: str, strict: bool) -> Diagnosis | None:
    """Return the verdict if no rank waits for another one: each is at its own work, as a job of one rank always is."""
    culprits = [each for each in ranks.values() if each.process != LEFT and _is_late(each, stall_seconds)]
    if not strict:
        culprits = [each for each in culprits if each.is_stuck or each.phase not in _OWN_CODE]
    if not culprits or any(not each.is_gone and each.age <= stall_seconds for each in ranks.values()):
        return None
    return _verdict(ALONE, culprits, ranks, key)


def _with_flight(seen: Seen) -> Seen:
    """Add the collective of torch's flight recorder, if a rank that seems to be outside waits in one."""
    if seen.collective or not seen.flights or seen.is_stuck or seen.phase not in _WITHOUT_NOTES:
        return seen
    name, group, count, _ = seen.flights[0]
    return replace(seen, collective=name, group=group, count=count)


def _missing(seen: Seen, ranks: Mapping[int, Seen]) -> list[int]:
    """Return the ranks that have not begun the collective in which this one waits."""
    members = heartbeat.ranks_of(seen.group.partition("#")[0])
    return [rank for rank in members if rank in ranks and ranks[rank].counts.get(seen.group, 0) < seen.count]


def _is_late(seen: Seen, stall_seconds: float) -> bool:
    """Return whether it has had its time. A process that cannot go on gets no patience."""
    patient = seen.patient and not seen.is_stuck
    return seen.age > stall_seconds * (PATIENCE if patient else 1)


def _place(seen: Seen) -> tuple[str, int, str, str]:
    return seen.group, seen.count, seen.collective, seen.subject


def _verdict(kind: str, culprits: Iterable[Seen], ranks: Mapping[int, Seen], key: str) -> Diagnosis:
    culprits = list(culprits)
    numbers = {each.rank for each in culprits}
    steps = [each.step for each in ranks.values() if each.step]  # of a silent host they may not be known
    differ = len(set(steps)) > 1
    groups: dict[tuple[str, str, str, int], list[Seen]] = {}
    for each in [*culprits, *(each for rank, each in sorted(ranks.items()) if rank not in numbers)]:
        host = each.host if each.process == SILENT else ""
        groups.setdefault((host, _doing(each), _state(each), each.step), []).append(each)
    reason = "; ".join(_in_words(each, differ) for each in groups.values())
    lost = bool(culprits) and all(each.is_stuck or each.answers is False for each in culprits)
    known = [each for each in culprits if each.step] or [each for each in ranks.values() if each.step]
    behind = min(known, key=lambda each: each.step, default=None)
    step, phase = (
        (behind.step, outer_phase(behind.phase, behind.around)) if behind else (0, heartbeat.OUTSIDE)
    )
    way = _way(kind, culprits, key)
    hosts = {each.host for each in ranks.values() if each.process != SILENT}
    if len(hosts) == 1 and any(each.process == SILENT for each in culprits):
        (here,) = hosts  # a cut link looks the same at both ends
        way += _WAY_ALONE.format(host=here)
    return Diagnosis(kind, tuple(sorted(numbers)), reason, way, lost, step, phase)


def _way(kind: str, culprits: Sequence[Seen], key: str) -> str:
    if kind == JOINED:
        return _WAY_JOINED.format(key=key)
    if kind == MIXED:
        return _WAY_MIXED
    first = culprits[0]
    if first.phase == heartbeat.DATA and first.process == RUNS:
        return _WAY_DATA
    if first.process == RUNS and first.answers is False:
        return _WAY_HELD
    return _WAYS[first.process]


def _doing(seen: Seen) -> str:
    place = place_in_words(seen.phase, seen.unit, seen.around)
    if not seen.collective:
        return place
    return seen.collective + (f" of {seen.subject}" if seen.subject else f" ({place})")


def _state(seen: Seen) -> str:
    text = _PROCESS.get(seen.process, "")
    return text or (_HELD if seen.answers is False else "")


def _in_words(alike: Sequence[Seen], steps: bool) -> str:
    """Return a line about ranks that do the same: "rank 2: backward of layers.7 since 31 s, process stopped (T)"."""
    first = alike[0]
    who, state = heartbeat.ranks_in_words([each.rank for each in alike]), _state(first)
    if first.process == SILENT:
        return f"{who}: host {first.host} does not answer since {max(each.age for each in alike):.0f} s"
    since = f" since {max(each.age for each in alike):.0f} s" + (
        f", {step_in_words(first.step, first.phase, first.around)}" if steps else ""
    )
    if first.collective:
        does = f"{who} {'wait' if len(alike) > 1 else 'waits'} in {_doing(first)}{since}"
    else:
        does = f"{who}: {_doing(first)}{since}"
    if not state:
        return does
    places = ", ".join(f"{each.pid}{f' on {each.host}' if each.host else ''}" for each in alike)
    return f"{does}, {state}, pid {places}"
