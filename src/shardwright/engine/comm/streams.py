"""Streams and events: the only place where an accelerator differs from the CPU.

The engine calls *fork* (queue work beside the computation, after everything that it has queued so far), *mark*, and
*join* (the computation waits for the mark). On the CPU fork does nothing, and a collective's ``Work`` makes it
asynchronous. This file does not know which work is queued.

The memory rule makes ``record_stream`` unnecessary: every buffer is leased and released on the computation's stream.
A fork orders the side stream after the lease. A buffer is released only after a join with its last use. If the
computation has several streams, *rejoin* orders all of them after the releases.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch

from shardwright.engine.compat.autograd import override_stale_capture_streams
from shardwright.engine.compat.modes import NOTHING


class Streams(Protocol):
    #: Whether collectives are asked for an asynchronous ``Work`` (CPU) or queued on the forked stream.
    asynchronous: bool
    #: Whether :meth:`capture` works.
    captures: bool

    @property
    def capturing(self) -> bool:
        """Whether a graph captures the computation, so that no value can be read."""

    def fork(self, name: str) -> AbstractContextManager[None]:
        """Queue the work inside the context on the side stream ``name``.

        Streams are "gather", "reduce" and "all_reduce"; offload has "upload" and "download". Activations go to the host
        on "store" and come back on "fetch".
        """

    def beside(self, name: str, after: Any = None) -> AbstractContextManager[None]:
        """Queue the work inside the context on the side stream, after only the mark and that stream's own work."""

    def note_current(self) -> None:
        """Remember the current stream as one of the computation's, as :meth:`fork` does."""

    def rejoin(self) -> None:
        """Let all streams of the computation since the last call, and the current one, wait for each other.

        Backward runs on the streams of its forward, and ends on the stream of its caller. There the engine releases
        memory that it has leased on the others. Their later work may get this memory. A forward may lease memory that
        an earlier forward has released on another stream.
        """

    def side(self, name: str) -> Any:
        """The device's own object of side stream ``name``; None on the CPU."""

    def current(self) -> Any:
        """The device's own object of the current stream; None on the CPU."""

    def mark(self, name: str) -> Any:
        """A mark after everything that has been queued on side stream ``name``."""

    def join(self, mark: Any) -> None:
        """Let the computation wait for ``mark``, if there is one; the host does not wait."""

    def host_wait(self, mark: Any) -> None:
        """Let the host wait for ``mark``, if there is one."""

    def is_over(self, mark: Any) -> bool:
        """Whether all work before ``mark`` has run. Then the host may use its results."""

    def gather_after(self, event: Any) -> None:
        """Let gathers wait for a user's event."""

    def mark_of_events(self) -> Any:
        """A mark after all events of :meth:`gather_after`. None: there were none, so nobody has to wait."""

    def warm_up(self, function: Callable[[], Any]) -> Any:
        """Run ``function`` on the stream of a later :meth:`capture`. The computation waits for it."""

    def capture(self, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Capture the work that ``function`` and our side streams queue in a graph, without running it.

        Returns a function that runs the graph on the current stream, after all work of the side streams and before
        their later work, and the result of ``function``.
        """


class HostStreams:
    """CPU: a collective returns a ``Work`` at once. Waiting for this ``Work`` is the only order."""

    asynchronous = True
    captures = capturing = False

    def fork(self, name: str) -> AbstractContextManager[None]:
        return NOTHING

    def beside(self, name: str, after: Any = None) -> AbstractContextManager[None]:
        return NOTHING

    def note_current(self) -> None:
        return None

    def rejoin(self) -> None:
        return None

    def side(self, name: str) -> Any:
        return None

    def current(self) -> Any:
        return None

    def mark(self, name: str) -> Any:
        return None

    def join(self, mark: Any) -> None:
        return None

    def host_wait(self, mark: Any) -> None:
        return None

    def is_over(self, mark: Any) -> bool:
        return True

    def gather_after(self, event: Any) -> None:
        return None

    def mark_of_events(self) -> None:
        return None

    def warm_up(self, function: Callable[[], Any]) -> Any:
        return function()

    def capture(self, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        raise NotImplementedError("the CPU has no graphs")


class _SideStreams(dict[str, Any]):
    """Side streams by name. One without a name in ``names`` is made at its first use."""

    def __init__(self, make: Callable[[], Any], names: Iterable[str]) -> None:
        super().__init__()
        self._make = make
        self.numbers: set[int] = set()  #: of all side streams
        for name in names:
            self[name]

    def __missing__(self, name: str) -> Any:
        stream = self[name] = self._make()
        self.numbers.add(stream.stream_id)
        return stream


class DeviceStreams:
    """CUDA and similar devices: high-priority streams for each kind of collective and copy, ordered by events.

    Collectives are issued without ``async_op``, so c10d queues them on the stream that is current: ours.
    """

    asynchronous = False

    def __init__(self, device: torch.device) -> None:
        self._api = torch.get_device_module(device)
        self._device = device
        self.captures = hasattr(self._api, "CUDAGraph")
        names = ("gather", "reduce", "all_reduce", "upload", "download")
        self._side = _SideStreams(lambda: self._api.Stream(device=device, priority=-1), names)
        self._has_events = False  #: whether gathers had to wait for a user's event
        self._computations: dict[int, Any] = {}  #: streams of the computation since the last rejoin

    @contextmanager
    def fork(self, name: str) -> Iterator[None]:
        side, current = self._side[name], self._api.current_stream(self._device)
        self._note(current)
        side.wait_stream(current)
        with self._api.stream(side):
            yield

    def note_current(self) -> None:
        self._note(self._api.current_stream(self._device))

    def _note(self, stream: Any) -> None:
        """Note a stream of the computation. A side stream is none, though hooks may fork from it."""
        if stream.stream_id not in self._side.numbers:
            self._computations[stream.stream_id] = stream

    def rejoin(self) -> None:
        current = self._api.current_stream(self._device)
        streams, self._computations = self._computations, {}  # another thread may add to it
        streams.pop(current.stream_id, None)
        for stream in streams.values():
            current.wait_stream(stream)
            stream.wait_stream(current)

    @contextmanager
    def beside(self, name: str, after: Any = None) -> Iterator[None]:
        if after is not None:
            self._side[name].wait_event(after)
        with self._api.stream(self._side[name]):
            yield

    def side(self, name: str) -> Any:
        return self._side[name]

    def current(self) -> Any:
        return self._api.current_stream(self._device)

    def mark(self, name: str) -> Any:
        return self._side[name].record_event()

    def join(self, mark: Any) -> None:
        if mark is not None:
            self._api.current_stream(self._device).wait_event(mark)

    def host_wait(self, mark: Any) -> None:
        if mark is not None:
            mark.synchronize()

    def is_over(self, mark: Any) -> bool:
        return mark is None or mark.query()  # type: ignore[no-any-return]

    def gather_after(self, event: Any) -> None:
        self._side["gather"].wait_event(event)
        self._has_events = True

    def mark_of_events(self) -> Any:
        return self.mark("gather") if self._has_events else None

    @property
    def capturing(self) -> bool:
        return self.captures and self._api.is_current_stream_capturing()

    @functools.cached_property
    def _capture_stream(self) -> Any:
        return self._api.Stream(device=self._device)

    def warm_up(self, function: Callable[[], Any]) -> Any:
        stream, current = self._capture_stream, self._api.current_stream(self._device)
        stream.wait_stream(current)
        with self._api.stream(stream):
            result = function()
        current.wait_stream(stream)
        return result

    def capture(self, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        override_stale_capture_streams()
        graph = self._api.CUDAGraph()
        self._computations = {}  # the capture begins when their work is over, and must not wait for them
        current = torch.accelerator.current_stream(self._device)
        try:
            # NCCL's watchdog queries its events from another thread, which the mode "global" forbids.
            with self._api.graph(graph, stream=self._capture_stream, capture_error_mode="thread_local"):
                for side in self._side.values():
                    side.wait_stream(self._capture_stream)
                result = function()
                for side in self._side.values():
                    self._capture_stream.wait_stream(side)
        finally:
            # torch ends the capture before it restores the stream, and does not restore it if the end raises.
            torch.accelerator.set_stream(current)
        self._computations = {}

        def replay() -> None:
            # The graph has streams of its own: it does what the side streams do in a step that runs without it.
            current = self._api.current_stream(self._device)
            self.rejoin()
            for side in self._side.values():
                current.wait_stream(side)
            graph.replay()
            self.note_current()
            for side in self._side.values():
                side.wait_stream(current)

        return replay, result


#: By device, the streams that :func:`use_streams` has set.
_set: dict[torch.device, Streams] = {}


def streams_for(device: torch.device) -> Streams:
    """One set of streams for each device, so that work on a side stream stays in order for all process groups."""
    device = _exact(device)
    return _set.get(device) or _own_streams(device)


def _exact(device: torch.device) -> torch.device:
    """The device with its index. The CPU has none."""
    if device.type == "cpu":
        return torch.device("cpu")
    if device.index is None:
        return torch.device(device.type, torch.get_device_module(device).current_device())
    return device


@functools.cache
def _own_streams(device: torch.device) -> Streams:
    return HostStreams() if device.type == "cpu" else DeviceStreams(device)


@contextmanager
def use_streams(device: torch.device, streams: Streams) -> Iterator[None]:
    """Models that are sharded on ``device`` inside the context use these streams: for simulations and plans."""
    device = _exact(device)
    before = _set.get(device)
    _set[device] = streams
    try:
        yield
    finally:
        if before is None:
            del _set[device]
        else:
            _set[device] = before


class Tell(Protocol):
    """A function that hears of a change of the order of streams, after it."""

    def __call__(self, what: str, name: str, stream: Any) -> None:
        """``what``: "fork", "beside", "mark", "join", "host wait" or "rejoin". ``name``: of the side stream; empty if
        it is not known. ``stream``: the device's object whose order has changed; None on the CPU, and for the host.
        """


@contextmanager
def watched(streams: Streams, tell: Tell) -> Iterator[None]:
    """Inside the context ``tell`` hears of each fork, mark and wait.

    The methods of this one object are replaced for so long. Outside the context nothing is slower.
    """
    fork, beside, mark, join, host_wait, rejoin = (getattr(streams, name) for name in _WATCHED)
    names: dict[int, tuple[Any, str]] = {}  #: of marks, which live as long

    def name_of(mark: Any) -> str:
        return "" if mark is None else names.get(id(mark), (None, ""))[1]

    def counts(mark: Any) -> bool:
        """Whether a wait orders anything. On the CPU, which has no marks, each wait is for a collective."""
        return mark is not None or streams.asynchronous

    @contextmanager
    def noted_fork(name: str) -> Iterator[None]:
        with fork(name):
            tell("fork", name, streams.side(name))
            yield

    @contextmanager
    def noted_beside(name: str, after: Any = None) -> Iterator[None]:
        with beside(name, after):
            tell("beside", name, streams.side(name))
            yield

    def noted_mark(name: str) -> Any:
        made = mark(name)
        if made is not None:
            names[id(made)] = made, name
        tell("mark", name, streams.side(name))
        return made

    def noted_join(mark: Any) -> None:
        join(mark)
        if counts(mark):
            tell("join", name_of(mark), streams.current())

    def noted_host_wait(mark: Any) -> None:
        host_wait(mark)
        if counts(mark):
            tell("host wait", name_of(mark), None)

    def noted_rejoin() -> None:
        rejoin()
        tell("rejoin", "", streams.current())

    own = vars(streams)
    made = noted_fork, noted_beside, noted_mark, noted_join, noted_host_wait, noted_rejoin
    own.update(zip(_WATCHED, made, strict=True))
    try:
        yield
    finally:
        for name in _WATCHED:
            del own[name]


_WATCHED = ("fork", "beside", "mark", "join", "host_wait", "rejoin")
