"""The course of one step for a picture: blocks of memory by owner, kernels by stream, on one axis of time.

Times are whole numbers of a small unit, and texts are in tables, so that the picture of a large model is small. Nothing
here knows how it is drawn.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from shardwright.planner import (
    COMPUTE,
    OPTIMIZER,
    Alloc,
    Figures,
    Free,
    Interval,
    Kernel,
    Peak,
    Phase,
    Program,
    Rates,
    Recording,
    Step,
    Work,
    record,
)

PARTS = 1_000_000  #: units of time in a step
FREED = 2_000  #: a free counts as a moment if the next one comes later than this part of a step
MOST = 60_000  #: blocks, and spans, of a picture
GROUPS = ("parameters", "optimizer", "gradients", "slabs", "activations", "temporary", "other")
TENSORS = 300  #: owners of a peak that have a row


class Table:
    """Values by number, in the order in which they came."""

    def __init__(self) -> None:
        self.numbers: dict[Hashable, int] = {}

    def __call__(self, value: Hashable) -> int:
        return self.numbers.setdefault(value, len(self.numbers))

    @property
    def values(self) -> list[Any]:
        return list(self.numbers)


def step_picture(program: Program, figures: Figures | None, ranks: int, most: int = MOST) -> dict[str, Any]:
    """Return the last step of a program.

    Args:
        program: of one rank.
        figures: of the device; None: its speed is not known, so the axis counts allocations and frees.
        ranks: of the job.
        most: blocks and spans. If there are more, small blocks are drawn as one, and kernels beside each other, too.
    """
    first, stop = program.last_step()
    if first == stop:
        first, stop = (
            next((i for i, name in program.phase_starts() if name == "forward"), 0),
            len(program.events),
        )
    step, recording = _recorded(program, first, stop, figures, ranks)
    end = max([each.end for each in recording.spans] + [at for _, at in recording.moments] or [0.0]) or 1.0
    unit = end / PARTS
    picture = {
        "unit_seconds": unit if recording.spans else None,
        "length": PARTS,
        "has_graph": program.has_graph,
        "phases": [[name, round(at / unit)] for name, at in _phases(recording)],
        **_memory(program, program.live(first), recording, unit, most),
    }
    if step is not None:
        picture |= _streams(step.kernels, recording.spans, unit, most)
    return picture


def _recorded(
    program: Program, first: int, stop: int, figures: Figures | None, ranks: int
) -> tuple[Step | None, Recording]:
    try:
        step = Step.of(program, with_memory=True)
    except ValueError:  # it makes one step
        step = None
    if step is None or figures is None or (step.offloads and not figures.knows_host):
        memory = (each for each in program.events[first:stop] if isinstance(each, (Alloc, Free, Phase)))
        return None, Recording([], [(each, float(number)) for number, each in enumerate(memory)])
    return step, record(step, Rates.of(figures, ranks))


def _phases(recording: Recording) -> Iterator[tuple[str, float]]:
    """Yield the names of phases and their begins. A program calls all that follows backward forward, also clipping."""
    phases = [(event.name, at) for event, at in recording.moments if isinstance(event, Phase)]
    following = [name for name, _ in phases[1:]] + [""]
    for (name, at), after in zip(phases, following, strict=True):
        yield f"before the {OPTIMIZER}" if (name, after) == ("forward", OPTIMIZER) else name, at


def _memory(
    program: Program, before: Iterable[Alloc], recording: Recording, unit: float, most: int
) -> dict[str, Any]:
    """Return the blocks. Each moment is an allocation, or the last of some frees.

    Keys: ``kinds`` has group, unit, operation and line, as numbers of ``groups`` and ``texts``, and bytes. ``held``:
    kind of a block that the step finds, and the moment at which it is gone, -1 for none. ``taken``: for each moment the
    kind of its block, -1 for none. ``lives``: after how many moments it is gone, 0 for never. ``times``: units since
    the moment before. ``small``: by group the bytes of blocks that are not drawn alone: at each moment, less those at
    the moment before.
    """
    sizes = sorted((each.nbytes for each, _ in recording.moments if isinstance(each, Alloc)), reverse=True)
    least = sizes[most] + 1 if len(sizes) > most else 0
    texts, kinds = Table(), Table()

    def group_of(alloc: Alloc) -> int:
        name = program.owners[alloc.owner].group
        return GROUPS.index(name) if name in GROUPS else len(GROUPS) - 1

    def kind_of(alloc: Alloc) -> int:
        owner = program.owners[alloc.owner]
        what = texts(owner.what or owner.shape)
        return kinds((group_of(alloc), texts(owner.unit), what, texts(owner.line), alloc.nbytes))

    held = {each.block: [kind_of(each), -1] for each in before if not each.on_host}
    taken: list[int] = []
    lives: list[int] = []
    times: list[int] = []
    small: list[tuple[int, ...]] = []
    begun: dict[int, int] = {}
    unseen: dict[int, Alloc] = {}
    unseen_bytes = [0] * len(GROUPS)
    freed_at = -1.0
    for event, at in recording.moments:
        if freed_at >= 0 and at - freed_at > unit * PARTS / FREED:
            taken.append(-1)
            lives.append(0)
            times.append(round(freed_at / unit))
            small.append((*unseen_bytes,))
            freed_at = -1.0
        if isinstance(event, Alloc) and not event.on_host:
            if event.nbytes < least:
                unseen[event.block] = event
                unseen_bytes[group_of(event)] += event.nbytes
                continue
            begun[event.block] = len(taken)
            taken.append(kind_of(event))
            lives.append(0)
            times.append(round(at / unit))
            small.append((*unseen_bytes,))
            freed_at = -1.0
        elif isinstance(event, Free):
            freed_at = at
            if (moment := begun.pop(event.block, None)) is not None:
                lives[moment] = len(taken) - moment
            elif event.block in held:
                held[event.block][1] = len(taken)
            elif (alloc := unseen.pop(event.block, None)) is not None:
                unseen_bytes[group_of(alloc)] -= alloc.nbytes
    return {
        "groups": list(GROUPS),
        "texts": texts.values,
        "kinds": [list(each) for each in kinds.values],
        "held": list(held.values()),
        "taken": taken,
        "lives": lives,
        "times": differences(times),
        "small": [differences(each) for each in zip(*small, strict=True)] if least else [],
        "small_bytes": least,
    }


def differences(values: Sequence[int]) -> list[int]:
    """Return the first value, and then what each one is more than the one before."""
    return [later - earlier for earlier, later in itertools.pairwise([0, *values])]


def _streams(
    kernels: Sequence[tuple[Kernel, Work]], spans: Sequence[Interval], unit: float, most: int
) -> dict[str, Any]:
    """Return the kernels of each stream. ``kernels``: a name and the kind of work. Of each stream for every span the
    kernel, the units since the span before, and those that it takes. A negative kernel -1 - k is several, the longest
    k."""
    by_stream: dict[str, list[Interval]] = {COMPUTE: []}
    for span in spans:
        by_stream.setdefault(span.stream, []).append(span)
    names = Table()
    streams = []
    for name, own in ((name, own) for name, own in by_stream.items() if own):
        share = max(1, most * len(own) // len(spans))
        shown = _joined(own, unit, share)
        gaps, lengths, numbers, last = [], [], [], 0
        for number, count, start, end in shown:
            kernel, work = kernels[number]
            index = names((_in_words(kernel), work.kind))
            numbers.append(index if count == 1 else -1 - index)
            begin, stop = round(start / unit), round(end / unit)
            gaps.append(begin - last)
            lengths.append(stop - begin)
            last = stop
        streams.append({"name": name, "kernels": numbers, "gaps": gaps, "lengths": lengths})
    return {"streams": streams, "kernels": [list(each) for each in names.values]}


def _joined(spans: Sequence[Interval], unit: float, most: int) -> list[tuple[int, int, float, float]]:
    """Kernel, number of kernels, start and end. Short ones that follow each other closely are joined until there are
    few enough."""
    shown = [(each.number, 1, each.start, each.end) for each in spans]
    limit = unit
    while len(shown) > most:
        joined = shown[:1]
        longest = shown[0][3] - shown[0][2]
        for number, count, start, end in shown[1:]:
            before, counted, begin, _ = joined[-1]
            if end - begin < limit:
                is_longer = end - start > longest
                longest = max(longest, end - start)
                joined[-1] = (number if is_longer else before, counted + count, begin, end)
            else:
                joined.append((number, count, start, end))
                longest = end - start
        shown = joined
        limit *= 2
    return shown


def _in_words(kernel: Kernel) -> str:
    """Such as "mm bfloat16 [4096, 4096] [4096, 1024]", or "all-gather of 8 ranks, 1,182,007,440 bytes"."""
    if kernel.name.startswith("c10d."):
        name = kernel.name.removeprefix("c10d.").strip("_")
        return f"{name} of {kernel.group[0]} ranks, {kernel.nbytes:,} bytes"
    shapes = " ".join(str(list(shape)) for shape in kernel.shapes[:2])
    more = f" and {len(kernel.shapes) - 2} more" if len(kernel.shapes) > 2 else ""
    return f"{kernel.name} {kernel.dtype} {shapes}{more}"


def tensors_of(peak: Peak) -> list[Mapping[str, Any]]:
    """Return the owners of a peak, the largest first. The last row is all others together, if there are more."""
    owners = sorted(peak.by_owner.items(), key=lambda each: -each[1])
    rows: list[Mapping[str, Any]] = [
        {
            "group": owner.group,
            "unit": owner.unit,
            "what": owner.what or owner.shape,
            "line": owner.line,
            "bytes": nbytes,
        }
        for owner, nbytes in owners[:TENSORS]
    ]
    if rest := owners[TENSORS:]:
        nbytes = sum(each for _, each in rest)
        rows.append(
            {"group": "other", "unit": f"{len(rest):,} more owners", "what": "", "line": "", "bytes": nbytes}
        )
    return rows
