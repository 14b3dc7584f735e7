"""Whether a program fits a device: figures by how they are known, and a verdict.

Four classes of figures stay apart. *exact*: tensors whose sizes the engine knows. *traced*: tensors of a traced step.
*modelled*: bytes that PyTorch's allocator reserves beside these, by its rules. *runtime*: a range, by experience.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from shardwright.planner.allocator import (
    GIB,
    CachingAllocator,
    OutOfMemoryError,
    Rules,
    Usage,
    run,
)
from shardwright.planner.cycles import without_collections
from shardwright.planner.devices import Device
from shardwright.planner.program import SAVE, Peak, Program
from shardwright.planner.speed import Speed

Answer = Literal["yes", "barely", "no"]
EXACT = ("parameters", "optimizer", "gradients", "slabs")
#: Bytes of the CUDA context with PyTorch's kernels, and of NCCL's buffers, per process: the least and the most.
#: Sources: pytorch/pytorch#107667 (context, 0.3 GiB), pytorch/pytorch#144397 (NCCL, up to a few GiB).
CONTEXT = int(0.3 * GIB), int(0.6 * GIB)
NCCL = int(0.4 * GIB), int(2.2 * GIB)
#: Bytes of the host's memory that a process takes for Python, PyTorch and CUDA, by experience.
PROCESS = 3 * GIB
#: The memory into which an asynchronous save copies is a multiple of this.
STAGING_STEP = 2 << 20
#: A part of the reserved bytes by which the plan may be off.
MARGIN = 0.03
#: Steps after those of a program, in which the allocator comes to rest.
FURTHER_STEPS = 3


@dataclass(frozen=True)
class Verdict:
    """The memory of a program on a device, in bytes.

    Attributes:
        answer: ``yes``; ``barely``, with less room than the plan's margin, or only because the allocator empties its
            cache; or ``no``. The worse one of the device's memory and of the host's, as far as that is known.
        device: the device.
        ranks: processes with a device each.
        peak: the moment at which most bytes are live.
        usage: the largest figures of PyTorch's allocator in :attr:`room`; without a limit if the job does not fit.
        unlimited: the same on a device without end. The job needs no more room.
        cached: bytes of ``usage`` that are reserved and not live when most is reserved.
        retries: how often the allocator empties its cache for an allocation in the first steps, a validation and a
            save. The host waits for the GPU each time.
        retries_each_step: how often it does so in each later step.
        runtime: the least and the most that CUDA and NCCL take.
        room: bytes for PyTorch's allocator, if the runtime takes the most.
        parts: by part of the run (``step``, ``validation``, ``save``) the most live bytes of the device, and of the
            host.
        host: bytes of the host's memory of one rank when most of them are live, by group: ``staging`` is the copy of an
            asynchronous save. The process needs more: PyTorch itself, for example.
        speed: the time of a step; None: unknown.
    """

    answer: Answer
    device: Device
    ranks: int
    peak: Peak
    usage: Usage
    unlimited: Usage
    cached: int
    retries: int
    retries_each_step: int
    runtime: tuple[int, int]
    room: int
    parts: dict[str, tuple[int, int]]
    host: dict[str, int]
    speed: Speed | None = None

    @property
    def host_need(self) -> int:
        """Bytes of a host's memory that all ranks of a node need, if they keep anything there; else 0."""
        return self.device.ranks_of_node(self.ranks) * (sum(self.host.values()) + PROCESS) if self.host else 0

    @property
    def host_left(self) -> int:
        """Bytes of the host's memory that are never needed; negative if some are missing. 0: the host is not known."""
        return self.device.host_nbytes - self.host_need if self.device.host_nbytes else 0

    @property
    def needs_more_host(self) -> bool:
        """Whether the job does not fit because the host has too little memory."""
        return self.host_left < 0

    @property
    def left(self) -> int:
        """Bytes of :attr:`room` that are never reserved without a limit; negative if some are missing."""
        room = self.room or self.device.nbytes - self.runtime[1]
        return room - self.unlimited.reserved

    @property
    def exact(self) -> dict[str, int]:
        """Bytes at the peak of each group of ``EXACT``."""
        groups = self.peak.by_group()
        return {group: groups.get(group, 0) for group in EXACT}

    @property
    def traced(self) -> dict[str, int]:
        """Bytes at the peak of each other group."""
        return {group: nbytes for group, nbytes in self.peak.by_group().items() if group not in EXACT}

    @property
    def fits(self) -> bool:
        """Whether it fits, also if only barely."""
        return self.answer != "no"

    @property
    def status(self) -> int:
        """The exit status of a process that asks: 0, or 3 if it does not fit."""
        return 0 if self.fits else 3

    def __str__(self) -> str:
        """Return the lines that ``shardwright plan`` prints below the model's."""
        usage, peak = self.usage, self.peak
        least, most = (in_gib(each) for each in self.runtime)
        missing = "" if self.left >= 0 else f"; {in_gib(-self.left)} GiB are missing"
        if self.needs_more_host:
            missing += f"; {in_gib(-self.host_left)} GiB of the host's memory are missing"
        shared = f" for {self.ranks} ranks" if self.device.kind == "cpu" else ""
        runs = "Python and PyTorch" if self.device.kind == "cpu" else "CUDA context and NCCL"
        rows = [
            ("fits?", _ANSWERS[self.answer] + missing),
            (
                "",
                f"{in_gib(usage.reserved)} GiB reserved of {in_gib(self.room)}; "
                f"{self.device.name} has {in_gib(self.device.nbytes)}{shared}, the runtime takes {most}",
            ),
            *([("", _retries_in_words(self))] if self.retries or self.retries_each_step else []),
            ("exact", _sum(self.exact)),
            ("traced", _sum(self.traced)),
            (
                "cache",
                f"{in_gib(self.cached):>7}  reserved and not live when most is reserved: PyTorch's allocator",
            ),
            ("runtime", f"{most:>7}  {runs}, between {least} and {most}; not measured here"),
            ("peak", peak_in_words(peak)),
        ]
        if len(self.parts) > 1:
            words = ", ".join(f"{name} {in_gib(device)}" for name, (device, _) in self.parts.items())
            rows.append(("phases", f"{words} GiB live at most"))
        if self.host:
            rows.append(("host", f"{_sum(self.host)}; memory of the host for each rank"))
            if self.device.kind == "cuda":
                rows.append(("", self._host_in_words()))
        if self.speed is not None:
            rows += self.speed.lines()
        return "\n".join(f"{head:8} {text}" for head, text in rows)

    def _host_in_words(self) -> str:
        """Return whether the memory of a host suffices for all ranks of its node."""
        count = self.device.ranks_of_node(self.ranks)
        ranks = "the rank" if count == 1 else f"the {count} ranks"
        need = f"{in_gib(self.host_need)} GiB for {ranks} of a node, with {in_gib(PROCESS)} for each process"
        if not self.device.host_nbytes:
            return f"{need}; how much the host has is not known (host_gib of the device's file)"
        return f"{need}; the host has {in_gib(self.device.host_nbytes)}"


_ANSWERS = {
    "yes": "YES",
    "barely": f"BARELY: less room is left than the {MARGIN:.0%} by which the plan may be off",
    "no": "NO",
}


def _retries_in_words(verdict: Verdict) -> str:
    """Return the number of times that the allocator empties its cache, and their cost."""
    each, first = verdict.retries_each_step, verdict.retries
    times = f"{each} times in each step" if each > 1 else "once in each step" if each else ""
    if not times:
        times = f"{first} times, and not in later steps" if first > 1 else "once, and not in later steps"
    return f"PyTorch's allocator empties its cache {times}; the host waits for the GPU each time"


def peak_in_words(peak: Peak) -> str:
    """Return the moment of a peak, in a line."""
    owner = peak.owner
    if not owner.what:  # a tensor that has a name
        return f"{peak.phase}: {owner.group}, {owner.unit}"
    moment = f"{peak.phase} of {owner.unit}" if owner.unit else peak.phase
    return f"{moment}: {owner.what}" + (f", {owner.line}" if owner.line else "")


def in_gib(nbytes: float) -> str:
    return f"{nbytes / GIB:.2f}"


def _sum(groups: Mapping[str, int]) -> str:
    shown = [(name, nbytes) for name, nbytes in groups.items() if round(nbytes / GIB, 2) > 0]
    parts = ", ".join(f"{name} {in_gib(nbytes)}" for name, nbytes in shown)
    return f"{in_gib(sum(groups.values())):>7}  {parts or 'less than 0.01 GiB each'}"


def runtime_of(ranks: int, kind: str = "cuda") -> tuple[int, int]:
    """Return the least and the most bytes of a device that CUDA and NCCL take, or Python and PyTorch on a CPU."""
    least, most = CONTEXT
    return (least + NCCL[0], most + NCCL[1]) if ranks > 1 and kind == "cuda" else (least, most)


def room_of(device: Device, runtime: tuple[int, int], ranks: int) -> int:
    """Return the bytes of a device for PyTorch's allocator; 0 if the runtime takes all. Ranks share the memory of a
    CPU."""
    nbytes = device.nbytes // ranks if device.kind == "cpu" else device.nbytes
    return max(0, nbytes - runtime[1])


@without_collections()
def judge(
    program: Program, device: Device, ranks: int, rules: Rules | None = None, speed: Speed | None = None
) -> Verdict:
    """Return the verdict on a program that each of ``ranks`` processes runs on a device of its own.

    ``speed``: of the program, which takes longer to find.
    """
    rules = rules or Rules()
    starts = [i for i, name in program.phase_starts() if name == "forward"]
    peak = program.peak(starts[0] if starts else 0)
    runtime = runtime_of(ranks, device.kind)
    allowed = int(rules.fraction * device.nbytes) if rules.fraction < 1 else None
    room = min(room_of(device, runtime, ranks), device.nbytes if allowed is None else allowed)
    unlimited = _in_later_steps(program, rules)
    answer: Answer = "yes"
    if room - unlimited.peak.reserved < MARGIN * unlimited.peak.reserved:
        answer = "barely"
    allocator, first, each = unlimited, 0, 0
    if answer == "barely" or (allowed is not None and rules.collect_above):
        try:
            allocator, first, each = _in_room(program, rules, room, allowed)
        except OutOfMemoryError:
            answer = "no"
    cached = allocator.peak.reserved - allocator.live_at_peak
    verdict = Verdict(
        answer,
        device,
        ranks,
        peak,
        allocator.peak,
        unlimited.peak,
        cached,
        first,
        each,
        runtime,
        room,
        *_of_parts_and_host(program),
        speed,
    )
    return replace(verdict, answer=_with_host(verdict))


def _with_host(verdict: Verdict) -> Answer:
    """Return the answer on the device's memory, or a worse one on that of the host.

    Ranks on a CPU have no other host.
    """
    if not verdict.host or not verdict.device.host_nbytes or verdict.device.kind == "cpu":
        return verdict.answer
    if verdict.needs_more_host:
        return "no"
    is_tight = verdict.host_left < MARGIN * verdict.host_need
    return "barely" if is_tight and verdict.answer == "yes" else verdict.answer


def _in_later_steps(program: Program, rules: Rules) -> CachingAllocator:
    """Return the allocator without a limit after the program with further steps.

    A later step finds other holes in the cache than the first two, and may need more. If one further step does not,
    no other ones are made.
    """
    for count in (1, FURTHER_STEPS):
        allocator = CachingAllocator(rules)
        reserved: list[int] = []
        for events in program.with_further_steps(count):
            run(allocator, events)
            reserved.append(allocator.peak.reserved)
        if reserved[1] == reserved[-2]:  # after the steps of the program, and after the further ones
            break
    return allocator


def _in_room(
    program: Program, rules: Rules, room: int, allowed: int | None
) -> tuple[CachingAllocator, int, int]:
    """Return the allocator after the program with further steps in so much room, and how often it has emptied its
    cache: in the events of the program, and in the last further step.

    Raises:
        OutOfMemoryError: an allocation does not fit.
    """
    allocator = CachingAllocator(rules, room, allowed)
    counts: list[int] = []
    for events in program.with_further_steps(FURTHER_STEPS):
        before = allocator.retries
        run(allocator, events)
        counts.append(allocator.retries - before)
    first, last, *further, rest = counts
    return allocator, first + last + rest, further[-1] if further else last


def _of_parts_and_host(program: Program) -> tuple[dict[str, tuple[int, int]], dict[str, int]]:
    """Return :attr:`Verdict.parts` and :attr:`Verdict.host`."""
    parts = program.peaks()
    if not any(host for _, host in parts.values()):
        return parts, {}
    groups = program.peak(on_host=True).by_group()
    if staging := groups.get("staging"):
        groups["staging"] = staging + -staging % STAGING_STEP
        parts[SAVE] = parts[SAVE][0], parts[SAVE][1] + -staging % STAGING_STEP
    return parts, groups
