"""Random generators while draws from them are only recorded.

After an entry draws from a generator, the generator's state is unknown. It then gets a *placeholder*: a unique seed
that is known here. If a constructor seeds, saves, restores or forks, the seed changes. If anyone draws from a
placeholder, its state changes. So both are noticed. This file knows no deferred tensors.
"""

from __future__ import annotations

import hashlib
import itertools
from typing import NamedTuple

import torch

from shardwright.engine.compat import generator_key
from shardwright.init.log import Draw, Entry
from shardwright.init.origin import mark_after, mark_of_state


class GeneratorStream:
    """One generator, and the recorded entries that draw from it."""

    _count = itertools.count()

    def __init__(self, generator: torch.Generator) -> None:
        self._name = next(self._count)
        self.generator = generator
        self.last: Entry | None = None  #: the last entry that draws from the generator
        self._placeholder: torch.Tensor | None = None  #: the placeholder of the state after ``last``
        self._entries: dict[int, Entry] = {}  #: seed of a placeholder -> its entry
        self._reached: dict[bytes, bytes] = {}  #: hash of a state -> hash of its place in the recorded stream
        self._number = 0
        self.first = self.place()  #: before anything was recorded

    def enter(self, entry: Entry) -> None:
        """``entry`` draws from this generator next."""
        origin = self.position()
        if isinstance(origin, Entry):
            entry.draws[self] = Draw(after=origin, mark=mark_after(origin, self))
            if origin is not self.last:  # several draws follow this state, so it is stored when it is known
                origin.ends.setdefault(self)
        else:
            mark = mark_of_state(origin)
            entry.draws[self] = Draw(state=origin, mark=self._reached.get(mark, mark))
        self.last = entry
        self._number += 1
        name = f"{self.generator.initial_seed()} {self._name} {self._number}".encode()
        # Depends on the user's seed, so draws from the placeholder also change with that seed.
        seed = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") >> 1
        self.generator.manual_seed(seed)
        self._placeholder = self.generator.get_state()
        self._entries[seed] = entry

    def knows(self, generator: torch.Generator | None = None) -> Entry | None:
        """Return the entry whose placeholder a generator (by default this one) has, perhaps after further draws."""
        return self._entries.get((generator or self.generator).initial_seed())

    def position(self) -> Entry | torch.Tensor:
        """Return the place of the generator: after an entry, or in a known state.

        Raises:
            RuntimeError: numbers were drawn that, without deferral, would have come after those of the model.
        """
        entry = self.knows()
        if entry is None:
            return self.generator.get_state()
        now = self.generator.get_state()
        if entry is self.last:
            untouched = torch.equal(now, self._placeholder)  # type: ignore[arg-type]
        else:  # a state that was saved earlier and restored
            fresh = torch.Generator(self.generator.device).manual_seed(self.generator.initial_seed())
            untouched = torch.equal(now, fresh.get_state())
        if not untouched:
            raise RuntimeError(
                f"The program drew numbers from the {self.generator.device.type} generator between deferred_init and "
                "materialize. In a plain build they would be other numbers, since the model's numbers come first. "
                "Call shardwright.materialize first, seed the generator again, or draw from a separate generator."
            )
        return entry

    def resume(self, state: torch.Tensor, after: Entry | None = None) -> None:
        """Set the generator to a state that is known again, after the entry ``after`` has run, if given."""
        if after is not None:  # other ranks, which read no value, may still not know it
            self._reached[mark_of_state(state)] = mark_after(after, self)
        self.generator.set_state(state)
        self.last = self._placeholder = None

    def place(self) -> StreamPosition:
        return StreamPosition(self, self.generator.get_state(), self.last, self._placeholder)

    def go_back(self, place: StreamPosition) -> None:
        self.generator.set_state(place.state)
        self.last, self._placeholder = place.last, place.placeholder

    def forget(self) -> None:
        if self.last is None:
            self._entries.clear()
            self._reached.clear()


class StreamPosition(NamedTuple):
    """A place in a stream, to return to later."""

    stream: GeneratorStream
    state: torch.Tensor
    last: Entry | None
    placeholder: torch.Tensor | None


class GeneratorStreams:
    """The generators from which recorded entries draw."""

    def __init__(self) -> None:
        self._streams: dict[int, GeneratorStream] = {}

    def of(self, generator: torch.Generator) -> GeneratorStream:
        key = generator_key(generator)
        stream = self._streams.get(key)
        if stream is None:
            stream = self._streams[key] = GeneratorStream(generator)
        return stream

    def places(self) -> list[StreamPosition]:
        self.defaults()
        return [stream.place() for stream in self._streams.values()]

    def go_back(self, places: list[StreamPosition]) -> None:
        """Reset the generators, because the records of a failed construction are dropped."""
        streams = {place.stream for place in places}
        places = [*places, *(stream.first for stream in self._streams.values() if stream not in streams)]
        for place in places:
            place.stream.go_back(place)

    def origin_of(self, stream: GeneratorStream) -> tuple[GeneratorStream, Entry] | None:
        """Return the other stream whose placeholder this generator got, and the placeholder's entry; else None."""
        if stream.knows():
            return None
        for other in self._streams.values():
            entry = other.knows(stream.generator)
            if entry is not None:
                return other, entry
        return None

    def forget(self) -> None:
        """Drop entries that no generator can continue from, and everything that they hold."""
        for stream in self._streams.values():
            stream.forget()

    def defaults(self) -> list[GeneratorStream]:
        """Return the streams of the CPU and, if it is in use, of the accelerator.

        The device decides which one is used.
        """
        streams = [self.of(torch.default_generator)]
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        if accelerator is not None:
            streams.append(self.of(default_generator(accelerator)))
        return streams

    def read_by(
        self, generator: torch.Generator | None, device: torch.device | None
    ) -> list[GeneratorStream]:
        """Return the streams from which an operation draws that got this generator, or none, on a known
        device or any."""
        if generator is None and device is None:
            return self.defaults()
        return [self.of(default_generator(device) if generator is None else generator)]  # type: ignore[arg-type]

    def waiting(self) -> list[GeneratorStream]:
        """Return the streams whose generators have a placeholder."""
        return [s for s in self._streams.values() if s.last is not None]


def default_generator(device: torch.device) -> torch.Generator:
    """Return the default generator of operations on ``device``."""
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device.type)
    if not module.is_initialized():
        module.init()
    index = device.index if device.index is not None else module.current_device()
    return module.default_generators[index]  # type: ignore[no-any-return]
