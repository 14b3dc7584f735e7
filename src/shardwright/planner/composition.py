"""The program of a model of many layers, from the programs of the same model with few.

Layers of a kind make the same events. So a longer model repeats pieces of the events of a shorter one, a piece for each
layer: one in forward, one in backward, one in each step. :func:`compose` finds these pieces in two programs, which
differ in one layer, and repeats them. A third program checks the result. This module knows events alone: no engine,
model or optimizer.

The numbers of an event (bytes, shapes, layers in names, and the event that a ``Free`` or a ``Wait`` refers to) follow
the number of layers and of the repetition by a law, ``constant + a * repetition + b * layers``. A law of a piece is
made from the repetition that is added and from those before and behind it, which must agree. If anything differs there
is no composed program.

The same holds for other parts of a job that are alike, such as micro-batches. They are called layers here.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardwright.planner.cycles import without_collections
from shardwright.planner.program import (
    Alloc,
    Event,
    Free,
    HostWait,
    Kernel,
    Mark,
    Owner,
    Program,
    Wait,
    numbering,
)

NO_EVENT = -1
_DIGITS = re.compile(r"\d+")

Values = tuple[int, ...]


class Crossing(Exception):
    """Raised if a constant whose size grows with the layers becomes larger than ``edge`` bytes.

    Attributes:
        layers: a number of layers with which it has crossed it.
    """

    def __init__(self, layers: int) -> None:
        super().__init__(layers)
        self.layers = layers


@without_collections()
def compose(programs: Sequence[Program], layers: int, wanted: int, edge: int) -> Program | None:
    """Return the program of ``wanted`` layers, from programs of ``layers``, ``layers + 1`` and, as a check of sizes
    that grow with the layers, ``layers + 2``.

    ``edge``: the trace treats constants of more bytes differently. None: the programs have no common structure.

    Raises:
        Crossing: programs of more layers are needed.
    """
    words = numbering()
    short, long, *more = (_Read(program, words) for program in programs)
    runs = _runs(short, long)
    if not runs:
        return None
    shape = _Shape(len(short.events), layers, runs)
    laws = _Laws(shape, [short, long, *more])
    if not laws.hold():
        return None
    return _Writer(shape, laws, short, wanted, edge, programs[0].constants).program()


# -- reading


class _Read:
    """A program, with the parts of its events that repeat.

    Attributes:
        exact: for each event a number that is equal for events that differ in the layer alone.
        kinds: the same, for events that differ in sizes, too.
        values: the numbers in each event: bytes, shapes, layers in names.
        refers: the index of the event that a ``Free`` or a wait refers to, or ``NO_EVENT``.
    """

    def __init__(self, program: Program, words: dict[Hashable, int]) -> None:
        self.events = program.events
        self.owners = program.owners
        self.exact: list[int] = []
        self.kinds: list[int] = []
        self.values: list[Values] = []
        self.refers: list[int] = []
        born: dict[int, int] = {}
        marked: dict[int, int] = {}
        owners = [self._owner(each) for each in program.owners]
        #: The exact number, the kind and the values of an event, by the event without its number.
        known: dict[Hashable, tuple[int, int, Values]] = {}
        for i, event in enumerate(program.events):
            refers = NO_EVENT
            key: Hashable = event
            if isinstance(event, Alloc):
                born[event.block] = i
                key = 0, event.nbytes, event.stream, event.owner
            elif isinstance(event, Free):
                refers = born[event.block]
                key = 1, self.exact[refers]
            elif isinstance(event, Mark):
                marked[event.number] = i
                key = 3, event.stream
            elif isinstance(event, Wait):
                refers = marked[event.mark]
                key = 4, event.stream, self.kinds[refers]
            elif isinstance(event, HostWait):
                refers = marked[event.mark]
                key = 5, self.kinds[refers]
            if (found := known.get(key)) is None:
                found = known[key] = self._described(event, key, refers, owners, words)
            exact, kind, values = found
            self.exact.append(exact)
            self.kinds.append(kind)
            self.values.append(values)
            self.refers.append(refers)

    def _described(
        self,
        event: Event,
        key: Hashable,
        refers: int,
        owners: list[tuple[Hashable, Hashable, Values]],
        words: dict[Hashable, int],
    ) -> tuple[int, int, Values]:
        """Return an event's exact number, its kind and its values."""
        if isinstance(event, Alloc):
            exact_owner, kind_owner, of_owner = owners[event.owner]
            exact = words[0, event.nbytes, event.stream, exact_owner]
            return exact, words[0, event.stream, kind_owner], (event.nbytes, *of_owner)
        if isinstance(event, Free):
            return words[key], words[1, self.kinds[refers]], ()
        if isinstance(event, Kernel):
            kind = words[2, event.name, event.stream, event.dtype, event.group, tuple(map(len, event.shapes))]
            return words[key], kind, (event.nbytes, *(size for shape in event.shapes for size in shape))
        return words[key], words[key], ()

    @staticmethod
    def _owner(owner: Owner) -> tuple[Hashable, Hashable, Values]:
        unit, what, shape = (_DIGITS.sub("#", text) for text in (owner.unit, owner.what, owner.shape))
        values = tuple(map(int, _DIGITS.findall(f"{owner.unit} {owner.what} {owner.shape}")))
        return (
            (owner.group, unit, owner.what, owner.line, owner.shape),
            (owner.group, unit, what, owner.line, shape),
            values,
        )


# -- finding


class _Run(NamedTuple):
    """A piece of ``period`` events that repeats ``repeats`` times in the shortest program, from event ``start``."""

    start: int
    period: int
    repeats: int

    @property
    def before(self) -> int:
        """Repetitions before those that are added."""
        return (self.repeats + 1) // 2

    @property
    def middle(self) -> int:
        """The event before which repetitions are added."""
        return self.start + self.before * self.period


def _runs(short: _Read, long: _Read) -> list[_Run] | None:
    """Return the runs of a program, of which another one has one more repetition each.

    None: they differ otherwise, too.
    """
    runs: list[_Run] = []
    a, b = short.exact, long.exact
    i = j = behind = 0
    while i < len(a) or j < len(b):
        if i < len(a) and j < len(b) and a[i] == b[j]:
            i, j = i + 1, j + 1
            continue
        # Either a size grows at this event, or a piece is there once more. The right one goes on for longer. If both go
        # on for as long, it is the one behind which more events are equal.
        alike = _common(short.kinds, long.kinds, i, j)
        period, further = _period(short, long, i, j)
        if period and (
            further > alike
            or (further == alike and _common(a, b, i, j + period) > _common(a, b, i + 1, j + 1))
        ):
            count = _repetitions(a, b[j : j + period], behind, i)
            if not count:
                return None
            runs.append(_Run(i - count * period, period, count))
            j, behind = j + period, i
        elif alike:
            i, j = i + 1, j + 1
        else:
            return None
    return runs


def _period(short: _Read, long: _Read, i: int, j: int) -> tuple[int, int]:
    """Return the length of a piece of ``long`` from ``j`` that repeats the piece before it, and after which ``long``
    goes on as ``short`` from ``i``; and for how many events it does so. 0: there is none."""
    a, b, exact = short.kinds, long.kinds, long.exact
    best, longest = 0, -1
    for period in range(1, min(j, (len(b) - j) - (len(a) - i)) + 1):
        if i < len(a) and b[j + period] != a[i]:
            continue
        if exact[j - 1] != exact[j + period - 1] or exact[j - period : j] != exact[j : j + period]:
            continue
        length = _common(a, b, i, j + period) if i < len(a) else int(j + period == len(b))
        if length > longest:
            best, longest = period, length
    return best, longest


def _common(a: list[int], b: list[int], i: int, j: int) -> int:
    """Return the number of equal items from ``i`` and ``j`` on."""
    most = min(len(a) - i, len(b) - j)
    n, step = 0, 256
    while n + step <= most and a[i + n : i + n + step] == b[j + n : j + n + step]:
        n += step
    while n < most and a[i + n] == b[j + n]:
        n += 1
    return n


def _repetitions(a: list[int], piece: list[int], first: int, stop: int) -> int:
    count = 0
    while stop - len(piece) >= first and a[stop - len(piece) : stop] == piece:
        stop -= len(piece)
        count += 1
    return count


# -- places


class _Place(NamedTuple):
    """The place of an event in programs of any number of layers: event ``offset`` of the shortest program, or of a
    repetition of a run, unless ``run`` is ``NO_EVENT``."""

    run: int
    offset: int
    repetition: int


class _Shape:
    """The order of events of a program of some number of layers.

    Attributes:
        events: of the shortest program.
        layers: of the shortest program.
        runs: its runs.
    """

    def __init__(self, events: int, layers: int, runs: list[_Run]) -> None:
        self.events, self.layers, self.runs = events, layers, runs

    def stretches(self, layers: int) -> list[tuple[int, int, int]]:
        """Events of a program in their order: for each stretch its first event, the one after its last, and a number
        (even: of the shortest program; odd: repetitions that are added to a run, as many as events by the period)."""
        more = layers - self.layers
        stretches, at, number = [], 0, 0
        for run in self.runs:
            stretches.append((at, run.middle, 2 * number))
            stretches.append((0, more * run.period, 2 * number + 1))
            at, number = run.middle, number + 1
        stretches.append((at, self.events, 2 * number))
        return stretches

    def length(self, layers: int) -> int:
        return self.events + (layers - self.layers) * sum(run.period for run in self.runs)

    def places(self, layers: int) -> list[_Place]:
        """Return the place of each event, as a target of references.

        Events beside a run count as of one more repetition. So the first and the last repetition, which refer to them,
        follow the same law as the others.
        """
        more = layers - self.layers
        places: list[_Place] = []
        at = 0
        for number, run in enumerate(self.runs):
            end = run.start + run.repeats * run.period
            after = self.runs[number + 1].start if number + 1 < len(self.runs) else self.events
            first, stop = max(at, run.start - run.period), min(after, end + run.period)
            places.extend(_Place(NO_EVENT, i, 0) for i in range(at, first))
            places.extend(
                _Place(number, i % run.period, i // run.period)
                for i in range(first - run.start, stop - run.start + more * run.period)
            )
            at = stop
        places.extend(_Place(NO_EVENT, i, 0) for i in range(at, self.events))
        return places

    def runs_of_events(self, layers: int) -> list[int]:
        """Return the number of the run that each event is in, or ``NO_EVENT``."""
        more = layers - self.layers
        numbers: list[int] = []
        at = 0
        for number, run in enumerate(self.runs):
            numbers += [NO_EVENT] * (run.start - at) + [number] * ((run.repeats + more) * run.period)
            at = run.start + run.repeats * run.period
        return numbers + [NO_EVENT] * (self.events - at)

    def starts(self, layers: int) -> list[int]:
        """Return the index of the first event of each run."""
        more, added = layers - self.layers, 0
        starts = []
        for run in self.runs:
            starts.append(run.start + added)
            added += more * run.period
        return starts


# -- laws


class _Law(NamedTuple):
    """The values ``constant + by_repetition * repetition + by_layers * layers`` of an event, and where it refers to:
    the last value is then the repetition there. Factors that are all zero are empty."""

    run: int
    offset: int
    constant: Values
    by_repetition: Values
    by_layers: Values

    def of_layers(self, layers: int) -> Values:
        """Return the values in repetition 0."""
        return _added(self.constant, self.by_layers, layers)

    def values(self, repetition: int, layers: int) -> Values:
        return _added(self.of_layers(layers), self.by_repetition, repetition)


def _added(values: Values, factors: Values, times: int) -> Values:
    return tuple([v + f * times for v, f in zip(values, factors, strict=True)]) if factors else values


def _difference(one: Values, two: Values) -> Values:
    """Return the differences of two lists of values; empty if there are none."""
    return tuple([b - a for a, b in zip(one, two, strict=True)]) if one != two else ()


class _Sample(NamedTuple):
    """An event as it is in a program."""

    kind: int
    run: int
    offset: int
    values: Values


@dataclass
class _Of:
    """Samples of a program.

    Attributes:
        outside: of the events of the shortest program.
        added: by run, of the events that are added.
    """

    outside: list[_Sample]
    added: list[list[_Sample]]


class _Laws:
    """The law of each event.

    Attributes:
        outside: of the events of the shortest program.
        added: by run, of the events of a repetition.
    """

    def __init__(self, shape: _Shape, reads: Sequence[_Read]) -> None:
        self._shape = shape
        self._reads = reads
        self.outside: list[_Law] = []
        self.added: list[list[_Law]] = []

    def hold(self) -> bool:
        """Find the laws, and return whether they hold in all programs."""
        shape = self._shape
        layers = range(shape.layers, shape.layers + len(self._reads))
        if any(shape.length(n) != len(read.events) for n, read in zip(layers, self._reads, strict=True)):
            return False
        ways = [
            [self._samples(read, n, own) for n, read in zip(layers, self._reads, strict=True)]
            for own in (False, True)
        ]
        for i in range(shape.events):
            laws = (self._fitted([each.outside[i] for each in of]) for of in ways)
            if (law := next(filter(None, laws), None)) is None:
                return False
            self.outside.append(law)
        for number, run in enumerate(shape.runs):
            found: list[_Law] = []
            for offset in range(run.period):
                laws = (self._law_of_run(of[0], of[1], number, run, offset) for of in ways)
                if (law := next(filter(None, laws), None)) is None:
                    return False
                found.append(law)
            self.added.append(found)
        return True

    def _fitted(self, samples: Sequence[_Sample]) -> _Law | None:
        """Return the law of an event outside of added repetitions."""
        one, two, *more = samples
        if any(each[:3] != one[:3] for each in samples):
            return None
        by_layers = _difference(one.values, two.values)
        if any(each.values != _added(two.values, by_layers, i) for i, each in enumerate(more, 1)):
            return None
        constant = _added(one.values, by_layers, -self._shape.layers)
        return _Law(one.run, one.offset, constant, (), by_layers)

    def _law_of_run(self, short: _Of, long: _Of, number: int, run: _Run, offset: int) -> _Law | None:
        """Return the law of an event of a repetition, by the one that is added, the one before it and the one behind
        it, if there is one."""
        added, at = long.added[number][offset], run.before
        beside = [run.middle - run.period + offset, run.middle + offset][: run.repeats - at + 1]
        found: list[_Law] = []
        for event in beside:
            one, two = short.outside[event], long.outside[event]
            if not one[:3] == two[:3] == added[:3]:
                continue
            if event < run.middle:  # the same repetition in both programs, and the one before the added one
                by_layers = _difference(one.values, two.values)
                by_repetition = _difference(two.values, added.values)
            else:  # behind the added one, which has its place of the shorter program
                by_layers = _difference(one.values, added.values)
                by_repetition = _difference(added.values, two.values)
            constant = _added(_added(added.values, by_repetition, -at), by_layers, -self._shape.layers - 1)
            found.append(_Law(added.run, added.offset, constant, by_repetition, by_layers))
        return found[0] if len(set(found)) == 1 else None

    def _samples(self, read: _Read, layers: int, prefer_own: bool) -> _Of:
        """Samples of a program. An event between two runs is beside both. ``prefer_own``: an event of a run that refers
        to it refers to a place beside its own run, if it can."""
        places, runs = self._shape.places(layers), self._shape.runs
        starts, more = self._shape.starts(layers), layers - self._shape.layers
        own = self._shape.runs_of_events(layers)
        samples: list[_Sample] = []
        for kind, values, refers, number in zip(read.kinds, read.values, read.refers, own, strict=True):
            if refers == NO_EVENT:
                samples.append(_Sample(kind, NO_EVENT, NO_EVENT, values))
                continue
            place = places[refers]
            if prefer_own and number not in (NO_EVENT, place.run):
                run = runs[number]
                repetition, offset = divmod(refers - starts[number], run.period)
                if -1 <= repetition <= run.repeats + more:
                    place = _Place(number, offset, repetition)
            samples.append(_Sample(kind, place.run, place.offset, (*values, place.repetition)))
        outside: list[_Sample] = []
        added: list[list[_Sample]] = []
        at = 0
        for first, stop, number in self._shape.stretches(layers):
            piece = samples[at : at + stop - first]
            at += stop - first
            if number % 2:
                added.append(piece)
            else:
                outside.extend(piece)
        return _Of(outside, added)


# -- writing


class _Impossible(Exception):
    """Raised if the laws give events that no program can have."""


class _Writer:
    """Writes the events of a program of ``layers`` layers."""

    def __init__(
        self, shape: _Shape, laws: _Laws, short: _Read, layers: int, edge: int, constants: set[int]
    ) -> None:
        self._shape, self._laws, self._short = shape, laws, short
        self._layers, self._edge, self._like = layers, edge, constants
        self._constants: set[int] = set()
        self._starts = shape.starts(layers)
        self._events: list[Event] = []
        self._owners: dict[Owner, int] = {}
        #: By the number of an owner in the shortest program, and its numbers.
        self._filled: dict[tuple[int, Values], int] = {}
        self._live: set[int] = set()
        self._marks: dict[int, int] = {}
        self._kernels: dict[Hashable, Kernel] = {}

    def program(self) -> Program | None:
        try:
            for first, stop, number in self._shape.stretches(self._layers):
                if number % 2:
                    self._add(number // 2, stop)
                else:
                    for event, law in zip(
                        self._short.events[first:stop], self._laws.outside[first:stop], strict=True
                    ):
                        self._write(event, law, law.of_layers(self._layers))
        except _Impossible:
            return None
        return Program(self._events, list(self._owners), constants=self._constants)

    def _add(self, number: int, stop: int) -> None:
        run, laws = self._shape.runs[number], self._laws.added[number]
        like = self._short.events[run.middle - run.period : run.middle]
        piece = [(event, law, law.of_layers(self._layers)) for event, law in zip(like, laws, strict=True)]
        for repetition in range(run.before, run.before + stop // run.period):
            for event, law, values in piece:
                factors = law.by_repetition
                self._write(event, law, _added(values, factors, repetition) if factors else values)

    def _write(self, event: Event, law: _Law, values: Values) -> None:
        """Write an event like one of the shortest program, but with the values of a law."""
        events = self._events
        at = len(events)
        if isinstance(event, Kernel):
            events.append(self._kernel(event, values))
        elif isinstance(event, Alloc):
            nbytes = values[0]
            if min(values) < 0:
                raise _Impossible
            if event.block in self._like:
                if nbytes > self._edge >= event.nbytes:
                    further = self._layers - self._shape.layers
                    left = (self._edge - event.nbytes) * further // (nbytes - event.nbytes)
                    raise Crossing(self._shape.layers + left + 1)
                if nbytes <= self._edge < event.nbytes:
                    raise _Impossible
                self._constants.add(at)
            self._live.add(at)
            events.append(Alloc(at, nbytes, event.stream, self._owner(event.owner, values[1:])))
        elif isinstance(event, Free):
            block = self._place(law, values[-1])
            if block not in self._live:
                raise _Impossible
            self._live.remove(block)
            events.append(Free(block))
        elif isinstance(event, Mark):
            self._marks[at] = len(self._marks) + 1
            events.append(Mark(self._marks[at], event.stream))
        elif isinstance(event, Wait):
            events.append(Wait(event.stream, self._mark(law, values[-1])))
        elif isinstance(event, HostWait):
            events.append(HostWait(self._mark(law, values[-1])))
        else:
            events.append(event)

    def _kernel(self, event: Kernel, values: Values) -> Kernel:
        key = event.name, event.stream, event.dtype, event.group, tuple(map(len, event.shapes)), values
        if (kernel := self._kernels.get(key)) is None:
            nbytes, *sizes = values
            if min(values) < 0:
                raise _Impossible
            rest = iter(sizes)
            shapes = tuple(tuple(next(rest) for _ in shape) for shape in event.shapes)
            kernel = self._kernels[key] = event._replace(nbytes=nbytes, shapes=shapes)
        return kernel

    def _owner(self, like: int, numbers: Values) -> int:
        key = like, numbers
        if (index := self._filled.get(key)) is None:
            owner, rest = self._short.owners[like], iter(numbers)
            texts = (owner.unit, owner.what, owner.shape)
            unit, what, shape = (_DIGITS.sub(lambda _: str(next(rest)), text) for text in texts)
            made = Owner(owner.group, unit, what, owner.line, shape)
            index = self._owners.setdefault(made, len(self._owners))
            self._filled[key] = index
        return index

    def _place(self, law: _Law, repetition: int) -> int:
        """Return the index of the event to which a law refers."""
        if law.run == NO_EVENT:
            more = self._layers - self._shape.layers
            return law.offset + sum(more * run.period for run in self._shape.runs if run.start <= law.offset)
        run = self._shape.runs[law.run]
        if not -1 <= repetition <= run.repeats + self._layers - self._shape.layers:
            raise _Impossible
        return self._starts[law.run] + repetition * run.period + law.offset

    def _mark(self, law: _Law, repetition: int) -> int:
        place = self._place(law, repetition)
        if place not in self._marks:
            raise _Impossible
        return self._marks[place]
