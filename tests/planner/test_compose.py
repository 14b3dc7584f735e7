"""Programs of many layers from programs of few, on programs that random rules make for any number of layers."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from shardwright.planner import Alloc, Crossing, Free, Kernel, Owner, Phase, Program, compose
from shardwright.planner.program import Event, HostWait, Mark, Wait

EDGE = 10_000
LEAST = 6  #: layers of the shortest program
WANTED = 17
STREAMS = "compute", "gather", "reduce"


@dataclass
class Part:
    """A part of a step: what it does for each layer, in the order of the layers or against it."""

    name: str
    reverse: bool
    items: list[tuple[Any, ...]]
    at_end: list[tuple[Any, ...]]


@dataclass
class Rules:
    """A step, for any number of layers."""

    parts: list[Part]
    grows: int = 0  #: bytes for each layer of an allocation at the end of some parts
    odd: int = 0  #: layers from this one on are different; 0: none is
    constant: bool = False  #: whether that allocation is a constant


@dataclass
class Writer:
    """Writes the program of some number of layers."""

    layers: int
    events: list[Event] = field(default_factory=list)
    owners: dict[Owner, int] = field(default_factory=dict)
    blocks: dict[tuple[Any, ...], int] = field(default_factory=dict)
    marks: dict[tuple[Any, ...], int] = field(default_factory=dict)
    constants: set[int] = field(default_factory=set)
    count: int = 0

    def owner(self, unit: str, what: str) -> int:
        return self.owners.setdefault(Owner("other", unit, what, "model.py:7"), len(self.owners))

    def alloc(self, key: tuple[Any, ...], nbytes: int, stream: str, unit: str, what: str) -> None:
        self.blocks[key] = len(self.events)
        self.events.append(Alloc(len(self.events), nbytes, stream, self.owner(unit, what)))

    def free(self, key: tuple[Any, ...]) -> None:
        if (block := self.blocks.pop(key, None)) is not None:
            self.events.append(Free(block))

    def mark(self, key: tuple[Any, ...], stream: str) -> None:
        self.count += 1
        self.marks[key] = self.count
        self.events.append(Mark(self.count, stream))

    def wait(self, key: tuple[Any, ...], stream: str | None) -> None:
        if (mark := self.marks.get(key)) is not None:
            self.events.append(HostWait(mark) if stream is None else Wait(stream, mark))


def random_rules(seed: int) -> Rules:
    """Parts with allocations, of which some are freed there or in later parts, in this layer or one beside."""
    choose = random.Random(seed)
    slots: list[tuple[int, int]] = []  # allocations that nothing frees yet: part, slot
    marks: list[tuple[int, int]] = []
    parts: list[Part] = []
    for number in range(choose.randint(1, 5)):
        items: list[tuple[Any, ...]] = []
        for slot in range(choose.randint(1, 9)):
            kind = choose.choice(["alloc", "alloc", "kernel", "mark", "free", "free", "wait"])
            size = choose.choice([512, 700, 512 * slot + 1])
            beside = choose.choice([-2, -1, 0, 0, 0, 1])
            if kind == "alloc":
                items.append(("alloc", slot, size, choose.choice(STREAMS), choose.random() < 0.5))
                slots.append((number, slot))
            elif kind == "kernel":
                items.append(("kernel", f"mm{choose.randint(0, 2)}", choose.choice(STREAMS), size))
            elif kind == "mark":
                items.append(("mark", slot, choose.choice(STREAMS)))
                marks.append((number, slot))
            elif kind == "free" and slots:
                items.append(("free", *slots.pop(choose.randrange(len(slots))), beside))
            elif kind == "wait" and marks:
                items.append(("wait", *choose.choice(marks), beside, choose.choice([*STREAMS, None])))
        ends: list[tuple[Any, ...]] = [("kernel", f"end{number}", "compute", 64)]
        if choose.random() < 0.5:
            ends.append(("grow", number))
        parts.append(Part(f"part {number}", choose.random() < 0.4, items, ends))
    return Rules(parts, grows=choose.choice([4, 36]))


def written(rules: Rules, layers: int) -> Program:
    to = Writer(layers)
    for step in range(2):
        for number, part in enumerate(rules.parts):
            to.events.append(Phase(part.name))
            order = range(layers)
            for layer in reversed(order) if part.reverse else order:
                for item in part.items:
                    _write(to, rules, step, number, layer, item)
            for item in part.at_end:
                _write(to, rules, step, number, layers - 1, item)
    return Program(to.events, list(to.owners), constants=to.constants)


def _write(to: Writer, rules: Rules, step: int, number: int, layer: int, item: tuple[Any, ...]) -> None:
    match item:
        case "alloc", slot, size, stream, named:
            unit = f"layers.{layer}.w{slot}" if named else ""
            size += 512 if rules.odd and layer >= rules.odd else 0
            to.alloc((step, number, slot, layer), size, stream, unit, f"mm [8, {size}]")
        case "kernel", name, stream, size:
            to.events.append(Kernel(name, stream, size, ((size, 2), ()), "float32"))
        case "mark", slot, stream:
            to.mark((step, number, slot, layer), stream)
        case "free", part, slot, beside:
            to.free((step, part, slot, layer + beside))
        case "wait", part, slot, beside, stream:
            to.wait((step, part, slot, layer + beside), stream)
        case "grow", number:
            size = rules.grows * to.layers
            to.alloc((step, number, "grow"), size, "compute", "", f"stack [{to.layers}]")
            if rules.constant:
                to.constants.add(to.blocks[step, number, "grow"])
            to.events.append(Kernel("stack", "compute", 2 * size, ((to.layers,),), "float32"))
            to.free((step, number, "grow"))


def composed(rules: Rules, layers: int = WANTED) -> Program | None:
    return compose((written(rules, LEAST), written(rules, LEAST + 1)), LEAST, layers, EDGE)


def plain(program: Program) -> list[Any]:
    """The events, with the owners themselves."""
    return [
        (each._replace(owner=0), program.owners[each.owner]) if isinstance(each, Alloc) else each
        for each in program.events
    ]


def check(seeds: range, least: float) -> None:
    """A composed program is equal. At least this part of the random rules have one."""
    count = 0
    for seed in seeds:
        rules = random_rules(seed)
        program = composed(rules)
        if program is not None:
            count += 1
            assert plain(program) == plain(written(rules, WANTED)), f"seed {seed}"
    assert count >= least * len(seeds)


def test_composed_programs_are_equal() -> None:
    check(range(40), 0.7)


@pytest.mark.extensive("many seeds")
def test_composed_programs_are_equal_for_many_rules() -> None:
    check(range(100, 2_000), 0.7)


SIMPLE = Rules(
    [
        Part("forward", False, [("kernel", "mm", "compute", 64), ("alloc", 0, 512, "compute", True)], []),
        Part("backward", True, [("free", 0, 0, 0), ("kernel", "mm", "compute", 65)], [("grow", 1)]),
    ],
    grows=36,
)


def test_backward_frees_what_forward_took_in_the_other_order() -> None:
    program = composed(SIMPLE)
    assert program is not None and plain(program) == plain(written(SIMPLE, WANTED))
    assert not program.live()


@pytest.mark.parametrize("odd", [1, 2, 3, LEAST - 1, LEAST])
def test_layers_that_differ_give_an_equal_program_or_none(odd: int) -> None:
    rules = Rules(SIMPLE.parts, grows=36, odd=odd)
    program = composed(rules)
    if odd == LEAST:
        assert program is None
    elif program is not None:
        assert plain(program) == plain(written(rules, WANTED))


@pytest.mark.parametrize("constant", [False, True])
def test_a_constant_whose_size_crosses_the_edge_needs_longer_programs(constant: bool) -> None:
    rules, crossed = replace(SIMPLE, constant=constant), EDGE // 36 + 1
    below = composed(rules, crossed - 1)
    assert below is not None
    assert below.constants == written(rules, crossed - 1).constants
    if not constant:
        assert composed(rules, crossed) is not None
        return
    for wanted in (crossed, crossed + 5, 3 * crossed):
        with pytest.raises(Crossing) as found:
            composed(rules, wanted)
        assert found.value.layers == crossed


PERIOD = Rules(
    [
        Part("forward", False, [("alloc", 0, 512, "compute", True), ("alloc", 1, 700, "gather", True)], []),
        Part("backward", True, [("free", 0, 1, 0), ("free", 0, 0, -1), ("kernel", "mm", "compute", 65)], []),
    ]
)


@pytest.mark.parametrize("first", [2, 3])
def test_a_piece_that_is_there_once_is_repeated(first: int) -> None:
    """All of few layers but one may be beside an end, and differ: the first frees nothing of a layer before it."""
    programs = written(PERIOD, first), written(PERIOD, first + 1)
    program = compose(programs, first, WANTED, EDGE)
    assert program is not None and plain(program) == plain(written(PERIOD, WANTED))


@pytest.mark.parametrize("rule", ["a line", "a square"])
def test_repetitions_that_differ_by_no_line_give_no_program(rule: str) -> None:
    """With squares the layers before and behind the added one say different laws. A line has one."""

    def numbered(layers: int) -> Program:
        """Its units have a second number."""
        program = written(SIMPLE, layers)
        for i, owner in enumerate(program.owners):
            if found := re.fullmatch(r"layers\.(\d+)\.w0", owner.unit):
                n = int(found[1])
                number = 5 * n if rule == "a line" else n * n
                program.owners[i] = owner._replace(unit=f"layers.{n}.w{number}")
        return program

    composed = compose((numbered(LEAST), numbered(LEAST + 1)), LEAST, WANTED, EDGE)
    if rule == "a line":
        assert composed is not None and plain(composed) == plain(numbered(WANTED))
    else:
        assert composed is None


def test_programs_without_layers_give_no_program() -> None:
    program = written(SIMPLE, LEAST)
    assert compose((program, program), LEAST, WANTED, EDGE) is None


def test_pieces_of_alike_events_are_told_from_sizes_that_grow() -> None:
    """Weights are drawn layer by layer, the others follow, and some of each layer are drawn again. All of these events
    are alike except for their sizes."""

    def drawn(layers: int) -> Program:
        again = [5] * layers
        sizes = [*[7, 5, 3] * layers, 11, 13, *again, 17]
        kernels = [Kernel("normal_", "compute", size, ((size,),), "float32") for size in sizes]
        return Program([Phase("build"), *kernels, Phase("forward")])

    composed = compose((drawn(LEAST), drawn(LEAST + 1)), LEAST, WANTED, EDGE)
    assert composed is not None and composed.events == drawn(WANTED).events


def test_collectives_keep_their_groups() -> None:
    """Two collectives that differ in their group alone."""

    def gathering(layers: int) -> Program:
        pair = [Kernel("c10d.gather", "gather", 8, ((8,),), "float32", group) for group in ((2, 1), (4, 2))]
        return Program([Phase("forward"), *pair * layers, Phase("backward")])

    composed = compose((gathering(LEAST), gathering(LEAST + 1)), LEAST, WANTED, EDGE)
    assert composed is not None and composed.events == gathering(WANTED).events
