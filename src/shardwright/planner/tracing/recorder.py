"""Writes a program while code runs: blocks of memory with their owners, kernels, marks and waits."""

from __future__ import annotations

import functools
import inspect
import os
import sys
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from shardwright.common.package import FOLDER
from shardwright.engine.compat import in_backward, number_of_next_node, number_of_running_node, watch_reads
from shardwright.planner.program import (
    AFTER_OPTIMIZER,
    GRAPH,
    HOST,
    Alloc,
    Event,
    Free,
    HostWait,
    Kernel,
    Mark,
    Owner,
    Phase,
    Program,
    Wait,
)

COMPUTE = "compute"  #: the computation's stream
#: Groups that :meth:`ProgramRecorder.program` finds from the time for which a block lives.
BY_LIFE = ""
#: The same, of blocks that the engine takes.
OF_ENGINE = "engine"
SLABS = "slabs"  #: the group of blocks that the engine leases
OTHER = "other"  #: the group of blocks of which nothing else is known


class Contents:
    """The content of blocks, as far as a trace computes it.

    Attributes:
        constants: small blocks whose content was computed, also those that were freed.
    """

    def __init__(self, block_of: Callable[[torch.Tensor], int | None]) -> None:
        """Begin an empty program. ``block_of`` returns the block of a tensor, or None if it has none."""
        self.constants: set[int] = set()
        self._unknown: set[int] = set()
        self._computed: set[int] = set()
        self._block_of = block_of

    def note_unknown(self, tensor: torch.Tensor) -> None:
        """Note that the content of a tensor is not what the program would compute."""
        _add(self._unknown, self._block_of(tensor))

    def is_unknown(self, tensor: torch.Tensor) -> bool:
        return self._block_of(tensor) in self._unknown

    def note_computed(self, tensor: torch.Tensor) -> None:
        """Note that a large tensor has the content that the program would compute."""
        _add(self._computed, self._block_of(tensor))

    def is_computed(self, tensor: torch.Tensor) -> bool:
        return self._block_of(tensor) in self._computed

    def note_constant(self, tensor: torch.Tensor) -> None:
        """Note that a tensor has the content that the program would compute, because it is small."""
        _add(self.constants, self._block_of(tensor))

    def forget(self, block: int) -> None:
        """Forget the content of a block that is freed."""
        self._unknown.discard(block)
        self._computed.discard(block)


def _add(blocks: set[int], block: int | None) -> None:
    if block is not None:
        blocks.add(block)


class ProgramRecorder:
    """The events so far.

    Attributes:
        stream: the stream that is current.
        now: live bytes.
        current_phase: the phase.
        modules: the names of the modules whose forward runs, the innermost last.
        line: of the model's code that operations come from, inside a graph; None: the one that runs.
        contents: of the blocks.
        parameters_of_units: in words, by the name of the unit.
    """

    def __init__(self) -> None:
        self.stream = COMPUTE
        self.now = 0
        self.current_phase = ""
        self.modules: list[str] = []
        self.line: str | None = None
        self._events: list[Event] = []
        self._owners: dict[Owner, int] = {}
        self._blocks: dict[int, int] = {}  #: the block of a storage, by the address of the storage's object
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._sizes: dict[int, int] = {}  #: of live blocks
        self._claims: dict[int, Owner] = {}
        self.contents = Contents(self.block_of)
        self.parameters_of_units: dict[str, str] = {}
        self._on_host: set[int] = set()  #: blocks in the host's memory
        self._put: set[int] = set()  #: those of which this was known later
        self._lifts = False  #: whether results of tensors on the host are on the device
        self._marks = 0
        self._pool = ""  #: before the streams of blocks
        self._captured: list[Event] | None = None  #: the work of a graph, which does not run yet
        #: The line and the module of forward, by autograd's sequence number.
        self._lines: dict[int, tuple[str, str]] = {}
        self._module = ""

    # -- memory

    def take(self, nbytes: int, what: str, group: str = BY_LIFE, line: str = "", module: str = "") -> int:
        """Return a new block; returns its number."""
        owner = Owner(group, module, what, line)
        index = self._owners.setdefault(owner, len(self._owners))
        block = len(self._events)
        stream = self.stream if self.stream == HOST else self._pool + self.stream
        self._events.append(Alloc(block, nbytes, stream, index))
        self._sizes[block] = nbytes
        self.now += nbytes
        if self.stream == HOST:
            self._on_host.add(block)
        return block

    def give_back(self, block: int) -> None:
        """Free a block. A block that has been freed stays so."""
        nbytes = self._sizes.pop(block, None)
        if nbytes is not None:
            self.now -= nbytes
            self.contents.forget(block)
            self._on_host.discard(block)
            self._events.append(Free(block))

    def know(self, tensor: torch.Tensor, what: str, line: str = "", group: str = BY_LIFE) -> None:
        """Take a block for the tensor's storage, unless it has one. It is freed with the storage."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._blocks or not storage.nbytes():
            return
        self._blocks[key] = self.take(storage.nbytes(), what, group, line, self._module)
        self._watch(storage)

    def _watch(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._alive:
            return

        def died(_: object) -> None:
            self._alive.pop(key, None)
            block = self._blocks.pop(key, None)
            if block is not None:
                self.give_back(block)

        self._alive[key] = weakref.ref(storage, died)

    def block_of(self, tensor: torch.Tensor) -> int | None:
        """Return the block of the tensor's storage, or None if it has none."""
        return self._blocks.get(tensor.untyped_storage()._cdata)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Free the block of a storage whose size has changed, and take a new one."""
        block = self._blocks.pop(storage._cdata, None)
        if block is not None:
            self.give_back(block)
        if storage.nbytes():
            self._blocks[storage._cdata] = self.take(storage.nbytes(), "resized storage")
            self._watch(storage)

    def exchanged(self, one: torch.UntypedStorage, two: torch.UntypedStorage) -> None:
        """Exchange the blocks of two storages that have exchanged their memory."""
        blocks = self._blocks.pop(one._cdata, None), self._blocks.pop(two._cdata, None)
        for storage, block in zip((two, one), blocks, strict=True):
            if block is not None:
                self._blocks[storage._cdata] = block
                self._watch(storage)

    @property
    def uses_host(self) -> bool:
        """Whether any tensor is in the host's memory."""
        return bool(self._on_host)

    def computes_on_host(self, tensors: Iterable[torch.Tensor], copies: bool) -> bool:
        """Return whether the host computes an operation on these tensors: they are in its memory.

        Tensors without dimensions may be on either. ``copies``: the operation may write from one memory into the other.
        """
        if self._lifts or self.stream == HOST:
            return False
        on_host = self._on_host_of(tensors)
        return any(on_host) and (all(on_host) or not copies)

    def are_in_both(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Return whether some tensors are in the host's memory and others in the device's."""
        on_host = self._on_host_of(tensors)
        return any(on_host) and not all(on_host)

    def _on_host_of(self, tensors: Iterable[torch.Tensor]) -> list[bool]:
        return [self.is_on_host(each) for each in tensors if each.ndim]

    def is_on_host(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is in the host's memory, and not in the device's."""
        return self.block_of(tensor) in self._on_host

    def put_on_host(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note that the blocks of these tensors have been in the host's memory since they were taken."""
        for each in tensors:
            if (block := self.block_of(each)) is not None:
                self._on_host.add(block)
                self._put.add(block)

    @contextmanager
    def lifting(self) -> Iterator[None]:
        """Put copies of tensors of the host on the device, inside this context."""
        self._lifts = True
        try:
            yield
        finally:
            self._lifts = False

    def claim(self, group: str, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Give the blocks of tensors their group and names."""
        for name, tensor in named:
            block = self.block_of(tensor)
            if block is not None:
                shape = (
                    ""
                    if group == SLABS
                    else f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
                )
                self._claims[block] = Owner(group, name, "", "", shape)

    def note_line(self) -> tuple[str, bool]:
        """Return the line of the model's code that runs now, and whether the engine runs inside it.

        In backward it is the line of forward whose gradient is computed. In forward the line is noted for that.
        """
        line, in_engine = caller() if self.line is None else (self.line, False)
        module = self.modules[-1] if self.modules else ""
        if torch.is_grad_enabled() and (number := number_of_next_node() - 1) >= 0:
            self._lines.setdefault(number, (line, module))
        if in_backward():
            of_forward = self._lines.get(number_of_running_node(), ("", ""))
            module = module or of_forward[1]
            if not torch.is_grad_enabled() and self.line is None:
                line = of_forward[0]
        self._module = module
        return line, in_engine

    # -- streams and kernels

    def kernel(
        self,
        name: str,
        nbytes: int,
        shapes: tuple[tuple[int, ...], ...],
        dtype: str,
        group: tuple[int, int] = (1, 1),
    ) -> None:
        self._work.append(Kernel(name, self.stream, nbytes, shapes, dtype, group))

    @property
    def _work(self) -> list[Event]:
        """The events to which work is added."""
        return self._events if self._captured is None else self._captured

    def mark(self, stream: str) -> int:
        if self._captured is not None:  # each run of the graph makes other marks
            number = -1 - len(self._captured)
        else:
            number = self._marks = self._marks + 1
        self._work.append(Mark(number, stream))
        return number

    def wait(self, stream: str, mark: int) -> None:
        if self._captured is not None or mark > 0:
            self._work.append(Wait(stream, mark))

    def host_wait(self, mark: int) -> None:
        self._events.append(HostWait(mark))

    @contextmanager
    def capturing(self, number: int) -> Iterator[list[Event]]:
        """Add work to a graph inside this context, in place of running it. Blocks are those of the graph."""
        self._pool, self._captured = f"{GRAPH}{number} ", []
        try:
            yield self._captured
        finally:
            self._pool, self._captured = "", None

    def run_graph(self, work: Iterable[Event]) -> None:
        """Queue the work of a graph, with new marks each time."""
        if self.current_phase == AFTER_OPTIMIZER:
            # If the graph contains the optimizer, nothing else marks the end of a step.
            self.phase(AFTER_OPTIMIZER)
        numbers: dict[int, int] = {}
        for event in work:
            if isinstance(event, Mark):
                numbers[event.number] = self.mark(event.stream)
            elif isinstance(event, Wait):
                self.wait(event.stream, numbers.get(event.mark, event.mark))
            else:
                self._events.append(event)

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        """Queue work on another stream inside this context."""
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    def phase(self, name: str) -> None:
        self.current_phase = name
        self._events.append(Phase(name))

    def look_at_backward(self) -> None:
        """Begin the phase ``backward`` or ``forward`` if autograd has begun or ended a backward since the last call.

        A backward that runs inside the forward of a module, as that of a loss in chunks, is a part of forward.
        """
        if in_backward() != (self.current_phase == "backward") and not (
            self.modules and self.current_phase != "backward"
        ):
            self.phase("backward" if self.current_phase != "backward" else "forward")

    # -- the result

    def program(self) -> Program:
        """Return the program so far. Each block gets its group: the claimed one, or one that follows from its life."""
        phases: list[str] = []
        name = ""
        ends: dict[int, int] = {}
        written = _ordered(self._events)
        for i, event in enumerate(written):
            if isinstance(event, Phase):
                name = event.name
            elif isinstance(event, Free):
                ends[event.block] = i
            phases.append(name)
        owners = list(self._owners)
        used: dict[Owner, int] = {}
        events: list[Event] = []
        for i, event in enumerate(written):
            if isinstance(event, Alloc):
                block, nbytes, stream, number = event
                owner = owners[number]
                if (claim := self._claims.get(block)) is not None:
                    owner = claim
                    if owner.group == SLABS:  # "parameters of layers.0"
                        owner = owner._replace(
                            shape=self.parameters_of_units.get(owner.unit.partition(" of ")[2], "")
                        )
                elif owner.group in (BY_LIFE, OF_ENGINE):
                    end = ends.get(block)
                    freed = None if end is None else phases[end]
                    owner = Owner(_group(owner.group, phases[i], freed), *owner[1:])
                stream = HOST if block in self._put else stream
                event = Alloc(block, nbytes, stream, used.setdefault(owner, len(used)))
            events.append(event)
        return Program(events, list(used), constants=self.contents.constants)


def _ordered(events: list[Event]) -> list[Event]:
    """Return the events, with the blocks that are freed one after another in the order of their numbers.

    Python frees what a set holds in an order that differs between processes.
    """
    ordered: list[Event] = []
    freed: list[Free] = []
    for event in events:
        if isinstance(event, Free):
            freed.append(event)
            continue
        if freed:
            ordered += sorted(freed) if len(freed) > 1 else freed
            freed = []
        ordered.append(event)
    return ordered + sorted(freed)


def _group(group: str, taken: str, freed: str | None) -> str:
    """Return the group of a block that nobody claims, from the phases in which it is taken and freed."""
    if group == OF_ENGINE and taken != freed:
        return "slabs"
    if taken == freed:
        return "temporary"
    if taken == "optimizer" and freed is None:
        return "optimizer"
    if taken == "forward":
        return "activations"
    return OTHER


_TORCH = os.path.dirname(torch.__file__) + os.sep
_OWN = FOLDER + os.sep
#: Files of the package that are a model's or a loop's code, not the engine's.
_SHOWN = tuple(_OWN + room + os.sep for room in ("train", "activations"))
#: It reads scales of weights in float8, where the trainer calls it.
_TORCHAO = os.path.join(os.path.dirname(os.path.dirname(torch.__file__)), "torchao") + os.sep
_TRACING = os.path.dirname(__file__) + os.sep
_PYTHON = os.path.dirname(os.__file__) + os.sep
_OF_GPUS = tuple(_TORCH + name + os.sep for name in ("cuda", "xpu", "accelerator"))
_READING = inspect.unwrap(watch_reads).__code__.co_filename  #: which watches reads


def reader_of_value() -> str:
    """Return the line of a program outside of this package that reads a value now.

    Empty: the trainer or the engine does.
    """
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_TORCH, _TORCHAO, _TRACING, _READING, "<")):
            return "" if name.startswith(_OWN) else f"{name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def line_of(error: BaseException) -> tuple[str, bool]:
    """Return the innermost line of an error outside of torch, Python and this package, empty without one; and whether
    it has called torch's code for GPUs, which has raised the error."""
    of_gpu = False
    for frame, number in reversed(list(traceback.walk_tb(error.__traceback__))):
        name = frame.f_code.co_filename
        of_gpu = of_gpu or name.startswith(_OF_GPUS)
        of_python = name.startswith(_PYTHON) and "site-packages" not in name
        if not of_python and not name.startswith((_TORCH, _OWN, "<")):
            return f"{name}:{number}", of_gpu
    return "", of_gpu


#: By file: whose code it has.
_whose: dict[str, int] = {}
_OF_TORCH, _OF_TRACING, _OF_ENGINE, _OF_MODEL, _OF_CALL = range(5)
_CALLS = os.path.join(_TORCH, "nn", "modules", "module.py")  #: which runs the forward of modules


def _owner_of(file: str) -> int:
    if file.startswith(_OWN) and not file.startswith(_SHOWN):
        whose = _OF_TRACING if file.startswith(_TRACING) else _OF_ENGINE
    elif file == _CALLS:
        whose = _OF_CALL
    else:
        whose = _OF_TORCH if file.startswith((_TORCH, "<")) else _OF_MODEL
    _whose[file] = whose
    return whose


def caller() -> tuple[str, bool]:
    """Return the innermost line that is neither torch's nor the engine's, as ``losses.py:118``; empty: there is none.

    And whether the engine runs inside it.
    """
    frame = sys._getframe(1)
    in_engine = in_module = False
    while frame is not None:
        file = frame.f_code.co_filename
        whose = _whose.get(file)
        if whose is None:
            whose = _owner_of(file)
        if whose == _OF_MODEL:
            return _line(file, frame.f_lineno), in_engine
        if whose == _OF_CALL:  # of a module of torch, which the engine calls if it is a unit itself
            in_module = True
        elif whose == _OF_ENGINE and not in_module:
            in_engine = True
        frame = frame.f_back  # type: ignore[assignment]
    return "", in_engine


@functools.lru_cache(4096)
def _line(file: str, number: int) -> str:
    return f"{os.path.basename(file)}:{number}"
