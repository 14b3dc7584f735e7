"""The notes of a step that has run, as a picture of the form that a planned step has (``step.py``).

Leases over time are above the phases and the collectives of the host, and the work of the engine's own streams.

The notes are those of step_notes.json in a run's folder. Nothing here knows how the picture is drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shardwright.train.report.page.step import Table, differences

MICROSECOND = 1e-6
STREAM = (
    "stream"  #: the kind of a note that is a mark of a stream; in the place of its bytes is the device's time
)
COLLECTIVES = ("gather", "reduce", "all_reduce")  #: streams; others copy
LARGEST = 1 << 53  #: of a number that the script of a page reads without loss


def notes_picture(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the picture of notes.

    Raises:
        ValueError: they are damaged.
    """
    try:
        names, kinds = [str(each) for each in content["names"]], list(content["kinds"])
        notes = [
            (int(at), kinds[kind], names[unit], names[name], int(nbytes))
            for at, kind, unit, name, nbytes in content["notes"]
        ]
        step, rank, left_out = (int(content[key]) for key in ("step", "rank", "left_out"))
        if any(abs(value) > LARGEST for at, _, _, _, nbytes in notes for value in (at, nbytes)):
            raise ValueError(f"a number above {LARGEST:,}")
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            f"expected the notes of a step, found others: {type(error).__name__}: {error}"
        ) from error
    # A device may be behind its host.
    length = (
        max((max(at, nbytes if what == STREAM else 0) for at, what, _, _, nbytes in notes), default=0) + 1
    )
    return {
        "step": step,
        "rank": rank,
        "left_out": left_out,
        "unit_seconds": MICROSECOND,
        "length": length,
        "has_graph": False,
        **_leases(notes),
        **_spans(notes, length),
    }


def _leases(notes: Sequence[tuple[int, str, str, str, int]]) -> dict[str, Any]:
    """Blocks, of which each lease and each release is a moment. A release without a lease is of a block that the step
    has found."""
    groups, texts, kinds = Table(), Table(), Table()
    live: dict[int, list[int]] = {}
    held: list[list[int]] = []
    taken: list[int] = []
    lives: list[int] = []
    times: list[int] = []
    for at, what, unit, name, nbytes in notes:
        if what not in ("lease", "release"):
            continue
        kind = kinds((groups(name), texts(unit), texts(""), texts(""), nbytes))
        moment = len(taken)
        if what == "lease":
            live.setdefault(kind, []).append(moment)
        elif own := live.get(kind):
            begun = own.pop(0)
            lives[begun] = moment - begun
        else:
            held.append([kind, moment])
        taken.append(kind if what == "lease" else -1)
        lives.append(0)
        times.append(at)
    return {
        "groups": groups.values,
        "texts": texts.values,
        "kinds": [list(each) for each in kinds.values],
        "held": held,
        "taken": taken,
        "lives": lives,
        "times": differences(times),
        "small": [],
        "small_bytes": 0,
    }


def _side_streams(
    notes: Sequence[tuple[int, str, str, str, int]], length: int
) -> dict[str, list[tuple[int, int, str, str]]]:
    """Return the work of each of the engine's streams, from its fork to its mark by the device's time. Without such
    times, from the host's fork to its wait for the mark."""
    begun: dict[str, tuple[int, str]] = {}
    queued: dict[str, list[tuple[int, str]]] = {}  # work whose end only a wait of the host shows
    spans: dict[str, list[tuple[int, int, str, str]]] = {}

    def add(stream: str, start: int, end: int, unit: str) -> None:
        own = spans.setdefault(stream, [])
        start = max(start, own[-1][1] if own else 0)
        words = f"{stream} of {unit}" if unit else stream
        own.append((start, max(start, end), words, "communication" if stream in COLLECTIVES else "copies"))

    for at, what, unit, name, on_device in notes:
        if what != STREAM:
            continue
        act, _, stream = name.rpartition(" ")
        if act in ("fork", "beside"):
            begun[stream] = (on_device if on_device >= 0 else at), unit
        elif act == "mark" and stream in begun:
            start, of_unit = begun.pop(stream)
            if on_device >= 0:
                add(stream, start, on_device, of_unit)
            else:
                queued.setdefault(stream, []).append((start, of_unit))
        elif act in ("join", "host wait") and (waiting := queued.get(stream)):
            place = next((i for i, (_, of_unit) in enumerate(waiting) if of_unit == unit), 0)
            add(stream, waiting[place][0], at, waiting.pop(place)[1])
    for stream, waiting in queued.items():
        for start, unit in waiting:
            add(stream, start, length, unit)
    return spans


def _spans(notes: Sequence[tuple[int, str, str, str, int]], length: int) -> dict[str, Any]:
    """Return the phases of the host, and its collectives: their begins, and the waits for them."""
    spans: dict[str, list[tuple[int, int, str, str]]] = {"phase": [], "begins": [], "waits": []}
    phases: list[list[Any]] = []
    phase: tuple[int, str] | None = None
    open_span: tuple[str, int, str] | None = None
    for at, what, unit, name, _ in [*notes, (length, "phase", "", "", 0)]:
        words = f"{name} of {unit}" if unit else name
        if what == "phase":
            if phase is not None:
                kind = next(
                    (each for each in ("forward", "backward") if phase[1].split(" of ")[0] == each), "host"
                )
                spans["phase"].append((phase[0], at, phase[1], kind))
            phase = at, words
            if name and (not phases or phases[-1][0] != name):
                phases.append([name, at])
        elif what in ("begin", "wait"):
            open_span = "begins" if what == "begin" else "waits", at, words
        elif what == "end" and open_span is not None:
            stream, start, words = open_span
            spans[stream].append((start, at, words, "communication" if stream == "begins" else "waiting"))
            open_span = None
    spans |= _side_streams(notes, length)
    names = Table()
    streams = []
    for stream, own in spans.items():
        ends = [0, *(end for _, end, _, _ in own)]
        streams.append(
            {
                "name": stream,
                "kernels": [names((words, kind)) for _, _, words, kind in own],
                "gaps": [start - before for (start, *_), before in zip(own, ends[:-1], strict=True)],
                "lengths": [end - start for start, end, *_ in own],
            }
        )
    return {"phases": phases, "streams": streams, "kernels": [list(each) for each in names.values]}
