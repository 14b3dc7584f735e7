"""Runs code on hollow tensors, as on a device that is not there."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch import nn

from shardwright._torch import absent_ranks, local_of, watch_reads, watch_resizes
from shardwright.comm.streams import use_streams
from shardwright.memory import Slab, observe
from shardwright.tracing.hollow import Hollow
from shardwright.tracing.kernels import draws_one_piece, kernels_of_cuda
from shardwright.tracing.recorder import Recorder
from shardwright.tracing.streams import RecordedStreams

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
def trace(ranks: int, kind: Literal["cpu", "cuda"] = "cuda") -> Iterator[Recorder]:
    """Inside the context code runs as rank 0 of so many ranks, on hollow tensors on the CPU.

    ``kind``: with "cuda" the engine queues work on streams, and functions run the kernels of a GPU.
    """
    recorder = Recorder()
    with ExitStack() as stack:
        stack.enter_context(_without_collections())
        stack.enter_context(draws_one_piece())
        stack.enter_context(absent_ranks(ranks))
        if kind == "cuda":
            stack.enter_context(use_streams(CPU, RecordedStreams(recorder)))
            stack.enter_context(kernels_of_cuda())
        stack.enter_context(watch_resizes(recorder.resized))
        stack.enter_context(observe(_Slabs(recorder)))
        hollow = Hollow(recorder)
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


def claim_training(recorder: Recorder, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Say which blocks have the parameters and buffers of a model, and the state of its optimizer."""
    named = [*model.named_parameters(), *model.named_buffers()]
    recorder.claim("parameters", ((name, _local(tensor)) for name, tensor in named))
    names: dict[Any, str] = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, state in optimizer.state.items():
        recorder.claim("optimizer", ((names.get(parameter, ""), each) for each in _tensors(state)))


def claim_gradients(recorder: Recorder, model: nn.Module) -> None:
    """Say which blocks have the gradients of a model."""
    with_gradient = ((name, p.grad) for name, p in model.named_parameters() if p.grad is not None)
    recorder.claim("gradients", ((name, _local(gradient)) for name, gradient in with_gradient))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return local_of(tensor) if hasattr(tensor, "_local_tensor") else tensor


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield _local(value)
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)
