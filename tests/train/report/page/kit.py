"""Small programs whose pages are looked at, and the data of a page read back."""

from __future__ import annotations

import html.parser
import json
from typing import Any

from shardwright.planner import (
    OPTIMIZER,
    STEP,
    Alloc,
    Free,
    Kernel,
    Owner,
    Phase,
    Program,
    Verdict,
    judge,
    known_devices,
    speed_of,
)
from shardwright.planner.program import AFTER_OPTIMIZER, Event, Mark, Wait

H100 = known_devices()["h100"]
HOSTILE = "</script><script>alert(1)</script><!--<img src=x onerror=alert(2)>&lt;\u2028"
MIB = 1 << 20


def small_program(layers: int = 4, unit: str = "layers", steps: int = 2) -> Program:
    """Steps of a model whose layers are gathered on a stream of their own, with activations until backward."""
    owners = [Owner("parameters", "w", "", ""), Owner("optimizer", "w", "", "")]
    owners += [Owner("slabs", f"parameters of {unit}.{i}", "", "") for i in range(layers)]
    owners += [
        Owner("activations", f"{unit}.{i}", "mm bfloat16 [4096, 1024]", "model.py:3") for i in range(layers)
    ]
    owners += [Owner("temporary", f"{unit}.{i}", "add float32 [1024]", "") for i in range(layers)]
    product = Kernel("mm", "compute", 3 * 8 * MIB, ((4096, 4096), (4096, 1024), (4096, 1024)), "bfloat16")
    gather = Kernel("c10d.allgather_into_tensor_", "gather", 64 * MIB, ((1 << 25,),), "bfloat16", (8, 1))
    update = Kernel("_fused_adamw_", "compute", 64 * MIB, ((1 << 22,),), "float32")
    events: list[Event] = [Phase("build"), Alloc(0, 16 * MIB, "compute", 0), Alloc(1, 32 * MIB, "compute", 1)]
    block = mark = 2

    def layer(i: int, saved: dict[int, int], forward: bool) -> None:
        nonlocal block, mark
        slab, other, block, mark = block, block + 1, block + 2, mark + 1
        events.extend(
            [Alloc(slab, 12 * MIB, "compute", 2 + i), gather, Mark(mark, "gather"), Wait("compute", mark)]
        )
        events.extend([Alloc(other, MIB * (1 + i), "compute", 2 + 2 * layers + i), product])
        if forward:
            saved[i], block = block, block + 1
            events.append(Alloc(saved[i], 8 * MIB, "compute", 2 + layers + i))
        events.extend([Free(other), Free(slab)])
        if not forward:
            events.append(Free(saved.pop(i)))

    for _ in range(steps):
        saved: dict[int, int] = {}
        events += [Phase(STEP), Phase("forward")]
        for i in range(layers):
            layer(i, saved, True)
        events.append(Phase("backward"))
        for i in reversed(range(layers)):
            layer(i, saved, False)
        events += [Phase(OPTIMIZER), update, Phase(AFTER_OPTIMIZER)]
    return Program(events, owners, 4096.0, 1e12)


def judged(program: Program, ranks: int = 8) -> Verdict:
    """The verdict on it on H100s."""
    return judge(program, H100, ranks, None, speed_of(program, H100, ranks))


def totals(picture: dict[str, Any]) -> list[int]:
    """The live bytes at each moment of a picture, as its script finds them."""
    sizes = [each[4] for each in picture["kinds"]]
    changes = [0] * (len(picture["taken"]) + 1)
    now = sum(sizes[kind] for kind, _ in picture["held"])
    for kind, end in picture["held"]:
        if end >= 0:
            changes[end] -= sizes[kind]
    small, found = 0, []
    for i, kind in enumerate(picture["taken"]):
        if kind >= 0:
            now += sizes[kind]
            if picture["lives"][i]:
                changes[i + picture["lives"][i]] -= sizes[kind]
        now += changes[i]
        small += sum(each[i] for each in picture["small"])
        found.append(now + small)
    return found


def noted() -> dict[str, Any]:
    """Notes of a step with two units. One block is there from the start, and one stays."""
    names = [
        "",
        "layers.0",
        "layers.1",
        "parameters",
        "reduction",
        "all-gather",
        "forward",
        "backward",
        "norm",
    ]
    lease, release, begin, wait, end, phase = range(6)
    return {
        "step": 3, "rank": 0, "left_out": 0, "names": names,
        "kinds": ["lease", "release", "begin", "wait", "end", "phase"],
        "notes": [
            [0, phase, 1, 6, 0], [1, lease, 1, 3, 100], [2, begin, 1, 5, 100], [7, end, 0, 0, 0],
            [10, lease, 2, 3, 200], [11, begin, 2, 5, 200], [21, end, 0, 0, 0], [25, release, 8, 3, 50],
            [30, wait, 1, 5, 100], [31, end, 0, 0, 0], [35, phase, 2, 6, 0], [36, release, 1, 3, 100],
            [50, phase, 2, 7, 0], [51, lease, 2, 4, 400], [60, release, 2, 3, 200],
        ],
    }  # fmt: skip


class _Reader(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and data.strip():
            tag, attributes = self.tags[-1]
            name = str(attributes.get("id", tag))
            self.texts[name] = self.texts.get(name, "") + data


def read_page(text: str) -> tuple[list[tuple[str, dict[str, str | None]]], dict[str, str], dict[str, Any]]:
    """The tags of a page with their attributes, the texts by the id or the name of their tag, and the data."""
    reader = _Reader()
    reader.feed(text)
    reader.close()
    return reader.tags, reader.texts, json.loads(reader.texts["data"])
