"""Runs code on fake tensors, as on a device that is not there."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch

from shardwright.engine import delivery, forget_zeros
from shardwright.engine.comm import use_streams
from shardwright.engine.compat import absent_ranks, watch_reads, watch_resizes
from shardwright.engine.memory import Slab, observe
from shardwright.init import draws_one_piece
from shardwright.planner.cycles import without_collections
from shardwright.planner.tracing.compiled import Graphs, graphs_of_fakes
from shardwright.planner.tracing.fakes import (
    SMALL,
    AbsentDeviceError,
    FakeMemory,
    UnknownValueError,
    unallocated,
)
from shardwright.planner.tracing.kernels import kernels_of_cuda, reads_no_numbers
from shardwright.planner.tracing.recorder import SLABS, ProgramRecorder, line_of, reader_of_value
from shardwright.planner.tracing.streams import RecordedStreams, memory_of_host, streams_of_torch

CPU = torch.device("cpu")


class _Slabs:
    """Says of blocks that they are slabs."""

    def __init__(self, recorder: ProgramRecorder) -> None:
        self._recorder = recorder

    def leased(self, slab: Slab) -> None:
        if slab.nbytes:
            self._recorder.claim(SLABS, [(f"{slab.kind} of {slab.unit}", slab.byte_view(0, slab.nbytes))])

    def releases(self, slab: Slab) -> None:
        return None

    def resizes(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        return None

    def resized(self, storage: torch.UntypedStorage) -> None:
        return None

    def exchanged(self, one: torch.UntypedStorage, two: torch.UntypedStorage) -> None:
        self._recorder.exchanged(one, two)


@contextmanager
def trace(
    ranks: int,
    kind: Literal["cpu", "cuda"] = "cuda",
    value: float | None = None,
    graphs: Graphs | None = None,
) -> Iterator[ProgramRecorder]:
    """Let code run as rank 0 of ``ranks`` ranks inside this context, on fake tensors on the CPU.

    ``kind``: with "cuda" the engine queues work on streams, and functions run the kernels of a GPU. ``value``: as for
    :class:`FakeMemory`. ``graphs``: of earlier traces of the same code, whose tensors had the same shapes.

    Raises:
        AbsentDeviceError: inside the context, code uses a GPU.
    """
    recorder = ProgramRecorder()
    forget_zeros()  # of an earlier trace, or this one would seem to need none
    with _naming_lines_that_use_gpus(), ExitStack() as stack:
        stack.enter_context(without_collections())  # one would free their blocks at a random event
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings(
            "ignore", "Using .torch.compile.module.. when there are global hooks"
        )  # of traces
        stack.enter_context(draws_one_piece())
        stack.enter_context(reads_no_numbers(SMALL))
        stack.enter_context(absent_ranks(ranks))
        stack.enter_context(_flags_of_this_rank())
        stack.enter_context(_without_accelerator())
        if kind == "cuda":
            stack.enter_context(use_streams(CPU, RecordedStreams(recorder)))
            stack.enter_context(streams_of_torch(recorder))
            stack.enter_context(memory_of_host(recorder))
            stack.enter_context(kernels_of_cuda())
        stack.enter_context(watch_resizes(recorder.resized, unallocated))
        stack.enter_context(observe(_Slabs(recorder)))
        fakes = FakeMemory(recorder, value, kind == "cuda")
        stack.enter_context(watch_reads(fakes.check_read))
        graphs = graphs or stack.enter_context(graphs_of_fakes(kind == "cpu"))
        graphs.events = recorder
        stack.enter_context(fakes)
        yield recorder


@contextmanager
def _flags_of_this_rank() -> Iterator[None]:
    """Inside the context ranks are taken to use the same parameters: flags that travel with gradients have no values.

    Read as zeros they would say that no parameter has a gradient, and a plan would lack gradients and states.
    """
    plain = delivery.read_flags
    delivery.read_flags = lambda flags, present: list(present)
    try:
        yield
    finally:
        delivery.read_flags = plain


@contextmanager
def _naming_lines_that_use_gpus() -> Iterator[None]:
    """Raise an AbsentDeviceError in place of an error of torch about a GPU that is not there."""
    try:
        yield
    except (AbsentDeviceError, UnknownValueError):
        raise
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None:
            line, of_gpu = line_of(cause)
            if of_gpu or (isinstance(cause, _OF_TORCH) and _ABOUT_GPUS.search(str(cause))):
                text = " ".join(str(cause).split())
                raise AbsentDeviceError(f"uses a GPU ({type(cause).__name__}: {text:.100})", line) from error
            cause = cause.__cause__
        raise


_OF_TORCH = (RuntimeError, AssertionError, TypeError)
_ABOUT_GPUS = re.compile("cuda|accelerator|pin_memory|be pinned", re.IGNORECASE)


@contextmanager
def _without_accelerator() -> Iterator[None]:
    """Inside the context a mesh without a named device is one of the CPU, also on a machine with GPUs. Autocast of a
    GPU, which would do nothing to tensors of the CPU, is refused."""
    plain, plain_autocast = torch.accelerator.is_available, torch.autocast.__init__

    def autocast(
        self: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None
    ) -> None:  # torch.compile reads the names
        if enabled and device_type != "cpu":
            raise AbsentDeviceError(
                f"uses autocast for {device_type!r}",
                reader_of_value(),
                "Use the mp_policy of fully_shard, or autocast for 'cpu'",
            )
        plain_autocast(self, device_type, dtype, enabled, cache_enabled)

    torch.accelerator.is_available = lambda: False  # type: ignore[assignment]
    torch.autocast.__init__ = autocast  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.accelerator.is_available = plain
        torch.autocast.__init__ = plain_autocast  # type: ignore[method-assign]
