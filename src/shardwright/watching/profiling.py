"""Traces of torch's profiler with the names of units: `sw.profiler`, and the listener that gives the names.

The engine notes each collective in ``engine/heartbeat.py``, and a listener turns these notes into ranges of the trace.
So nothing here is called while no profiler runs. Nothing here measures a step or decides which steps are traced.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

from shardwright.engine import FSDPModule, heartbeat
from shardwright.engine.compat import is_profiling, synchronisation_events


class UnitNames:
    """A listener that opens a range of the profiler around each collective and each wait, with the unit's name.

    The ranges of a thread do not overlap: the begin of one ends the one before.
    """

    def __init__(self) -> None:
        self._threads = threading.local()

    def at(self, phase: int, unit: str) -> None:
        self._threads.unit = unit

    def enter(self, collective: str, group: str, nbytes: int, subject: str) -> None:
        # Backward and forward note their own unit first, so a gather of another one is ahead of its use.
        ahead = collective == "all-gather" and subject != getattr(self._threads, "unit", subject)
        self._open(f"prefetch: {_name(collective, subject)}" if ahead else _name(collective, subject))

    def await_result(self, collective: str, group: str, nbytes: int, subject: str) -> None:
        self._open(f"wait: {_name(collective, subject)}")

    def leave(self) -> None:
        self._close()

    def end_step(self) -> None:
        self._close()

    def _open(self, name: str) -> None:
        self._close()
        if is_profiling():
            self._threads.range = opened = torch.profiler.record_function(name)
            opened.__enter__()

    def _close(self) -> None:
        opened, self._threads.range = getattr(self._threads, "range", None), None
        if opened is not None:
            opened.__exit__(None, None, None)


def _name(collective: str, subject: str) -> str:
    return f"{collective} of {subject}" if subject else collective


@contextmanager
def unit_names() -> Iterator[None]:
    """Give traces of torch's profiler the names of units on collectives and waits, inside this context."""
    with heartbeat.listening(UnitNames()):
        yield


class Profiler:
    """See :func:`profiler`.

    Attributes:
        runs: whether this rank is profiled now, or will be in the context.
        files: the traces that this rank has written.
        failure: the reason why this rank stopped profiling; empty if it did not.
        torch: torch's profiler, for its other methods, such as ``key_averages``. None on ranks that are not profiled.
    """

    def __init__(
        self,
        device: torch.device,
        name_of_file: Callable[[int], Path],
        schedule: Callable[[int], Any] | None = None,
        options: dict[str, Any] | None = None,
        runs: bool = True,
        warn: Callable[[str], None] = warnings.warn,
    ) -> None:
        """``name_of_file``: from the number of a trace, from 0. ``runs``: False on a rank that is not profiled."""
        self._device, self._name_of_file = device, name_of_file
        self._schedule, self._options = schedule, options or {}
        self._warn = warn
        self._stack = ExitStack()
        self.runs = runs
        self.files: list[Path] = []
        self.failure = ""
        self.torch: Any = None

    def __enter__(self) -> Profiler:
        if self.runs:
            self._try(self._start)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def step(self) -> None:
        """A step has ended. A schedule of torch's profiler goes on.

        Raises:
            RuntimeError: the profiler was not entered.
        """
        if not self.runs:
            return
        if self.torch is None:
            raise RuntimeError("profiler: expected `with sw.profiler(model) as p:` before p.step()")
        self._try(self.torch.step)

    def stop(self) -> None:
        """End the trace and write it. A second call does nothing."""
        if self.runs:
            self._try(self.torch.stop)
        self.runs = False
        self._stack.close()

    def _start(self) -> None:
        if is_profiling():
            raise RuntimeError("another profiler of torch records already, and two at a time end the process")
        activities = [ProfilerActivity.CPU]
        options = {**self._options}
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
            options.setdefault("experimental_config", synchronisation_events())
        self.torch = profile(
            activities=activities, schedule=self._schedule, on_trace_ready=self._write, **options
        )
        self.torch.start()
        self._stack.enter_context(unit_names())

    def _write(self, trace: Any) -> None:
        path = self._name_of_file(len(self.files))
        path.parent.mkdir(parents=True, exist_ok=True)
        trace.export_chrome_trace(str(path))
        self.files.append(path)

    def _try(self, action: Callable[[], None]) -> None:
        """Call the profiler. An error of it ends the profile and not the training."""
        try:
            action()
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"
            self.runs = False
            self._stack.close()
            self._warn(f"the profiler of this rank has stopped, and training goes on: {self.failure}")


def profiler(
    model: nn.Module,
    folder: str | os.PathLike[str] = "profile",
    *,
    ranks: Collection[int] | None = (0,),
    schedule: Callable[[int], Any] | None = None,
    **options: Any,
) -> Profiler:
    """Return a context in which torch's profiler traces this rank, with the names of the model's units.

    Each gather, reduction, wait and prefetch is a range, such as ``all-gather of layers.3`` or
    ``wait: reduce-scatter of layers.3``. On a GPU the range also stands above the kernels that were queued in it. At
    the end of the context the rank writes ``FOLDER/rank-N.json.gz``, which ui.perfetto.dev and chrome://tracing open.
    An error of the profiler is a warning, and training goes on. docs/profiling.md shows what to look for.

    Args:
        model: a model that :func:`fully_shard` has sharded.
        folder: for the traces; it is made if it does not exist.
        ranks: the ranks that are profiled; None: all.
        schedule: of ``torch.profiler.schedule``. Call :meth:`Profiler.step` after each step. Each cycle has a file of
            its own, ``rank-N-cycle-C.json.gz``.
        options: of ``torch.profiler.profile``, such as ``record_shapes=True``.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: ``model`` has no sharded part.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"sw.profiler expects a model (torch.nn.Module), got {type(model).__name__}.")
    if not any(isinstance(each, FSDPModule) for each in model.modules()):
        raise ValueError(
            f"sw.profiler expects a model that fully_shard has sharded, got a {type(model).__name__} without a sharded "
            "part: a trace would have no names of units. Call it after fully_shard, or use torch.profiler."
        )
    rank = dist.get_rank() if dist.is_initialized() else 0
    device = next((p.device for p in model.parameters()), torch.device("cpu"))

    def name_of_file(number: int) -> Path:
        cycle = f"-cycle-{number}" if schedule is not None else ""
        return Path(folder) / f"rank-{rank}{cycle}.json.gz"

    return Profiler(device, name_of_file, schedule, options, ranks is None or rank in ranks)
