"""Runs code on hollow tensors, as on a device that is not there."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch

from shardwright._torch import absent_ranks, watch_reads, watch_resizes
from shardwright.comm.streams import use_streams
from shardwright.memory import Slab, observe
from shardwright.tracing.hollow import Hollow
from shardwright.tracing.kernels import draws_one_piece, kernels_of_cuda
from shardwright.tracing.recorder import Recorder
from shardwright.tracing.streams import RecordedStreams, memory_of_host, streams_of_torch

CPU = torch.device("cpu")


class _Slabs:
    """Says of blocks that they are slabs."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def leased(self, slab: Slab) -> None:
        if slab.nbytes:
            self._recorder.claim("slabs", [(f"{slab.kind} of {slab.unit}", slab.byte_view(0, slab.nbytes))])

    def releases(self, slab: Slab) -> None:
        return None

    def resizes(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        return None

    def resized(self, storage: torch.UntypedStorage) -> None:
        return None


@contextmanager
def trace(
    ranks: int, kind: Literal["cpu", "cuda"] = "cuda", value: float | None = None
) -> Iterator[Recorder]:
    """Inside the context code runs as rank 0 of so many ranks, on hollow tensors on the CPU.

    ``kind``: with "cuda" the engine queues work on streams, and functions run the kernels of a GPU. ``value``: as for
    :class:`Hollow`.
    """
    recorder = Recorder()
    with ExitStack() as stack:
        stack.enter_context(_without_collections())
        stack.enter_context(draws_one_piece())
        stack.enter_context(absent_ranks(ranks))
        stack.enter_context(_without_accelerator())
        if kind == "cuda":
            stack.enter_context(use_streams(CPU, RecordedStreams(recorder)))
            stack.enter_context(streams_of_torch(recorder))
            stack.enter_context(memory_of_host(recorder))
            stack.enter_context(kernels_of_cuda())
        stack.enter_context(watch_resizes(recorder.resized))
        stack.enter_context(observe(_Slabs(recorder)))
        hollow = Hollow(recorder, value)
        stack.enter_context(watch_reads(hollow.check_read))
        stack.enter_context(hollow)
        yield recorder


@contextmanager
def _without_collections() -> Iterator[None]:
    """Inside the context Python does not look for cycles: a collection would free their blocks at a random event."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def _without_accelerator() -> Iterator[None]:
    """Inside the context a mesh without a named device is one of the CPU, also on a machine with GPUs. Autocast of a
    GPU, which would do nothing to tensors of the CPU, is refused."""
    plain, plain_autocast = torch.accelerator.is_available, torch.autocast.__init__

    def autocast(
        self: Any, device_type: str, dtype: Any = None, enabled: bool = True, *rest: Any, **more: Any
    ) -> None:
        if enabled and device_type != "cpu":
            raise ValueError(
                f"a plan runs on the CPU in place of the GPU: found autocast for {device_type!r}, which would change "
                "nothing there. Use the mp_policy of fully_shard, or autocast for 'cpu'"
            )
        plain_autocast(self, device_type, dtype, enabled, *rest, **more)

    torch.accelerator.is_available = lambda: False  # type: ignore[assignment]
    torch.autocast.__init__ = autocast  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.accelerator.is_available = plain
        torch.autocast.__init__ = plain_autocast  # type: ignore[method-assign]
