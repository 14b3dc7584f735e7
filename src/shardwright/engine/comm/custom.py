"""Communicators that gather or reduce-scatter with a user's collective, or gather encoded weights.

The user's collectives are objects of torch's classes for FSDP2 (``AllGather`` and ``ReduceScatter``). ``allocate``
returns the memory that the collective reads and writes. A call runs it.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from shardwright.engine.comm.coding import copy_rows
from shardwright.engine.comm.collectives import Communicator, Pending, in_turn
from shardwright.engine.comm.division import Division
from shardwright.engine.compat.collectives import all_gather_of
from shardwright.engine.compat.tensors import foreach_copy_


def _copy_of(comm: Communicator, kind: type[Communicator]) -> Any:
    made = copy.copy(comm)
    made.__class__ = kind
    return made


class FlatGathers(Communicator):
    """Gathers with one flat collective: a user's collective, or the group's own over encoded weights.

    Attributes:
        custom: the user's collective, or None.
        encode: makes the flat uint8 tensors to send of the inputs. None: the inputs are sent.
        decode: fills the outputs from uint8 [ranks, bytes]. None: they are copied.
    """

    custom: Any
    encode: Callable[[list[torch.Tensor]], list[torch.Tensor]] | None
    decode: Callable[[torch.Tensor, list[torch.Tensor]], None] | None

    def all_gather(
        self,
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
        casts: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], []),
        on_done: Callable[[], None] | None = None,
        announce: Callable[[], None] | None = None,
    ) -> Pending:
        assert self.group is not None
        with self.streams.fork("gather"):
            if casts[0]:
                foreach_copy_(*casts)
            coded = inputs if self.encode is None else self.encode(inputs)
            numel = sum(t.numel() for t in coded)
            flat, gathered = self._memory(numel), self._memory(self.world_size * numel)
            torch.cat(coded, out=flat)
            work = self.begin(announce, self._collective(gathered, flat))

            def finish() -> None:
                (self.decode or copy_rows)(gathered.view(self.world_size, -1), outputs)

            keep = flat, gathered
            if self.streams.asynchronous:
                both = functools.partial(in_turn, finish, on_done)
                return Pending(self.streams, work, None, keep=keep, finish=both)
            finish()
        return Pending(self.streams, work, self.streams.mark("gather"), keep=keep, finish=on_done)

    def _collective(self, gathered: torch.Tensor, flat: torch.Tensor) -> Callable[[], Any]:
        if self.custom is not None:
            asynchronous = self.streams.asynchronous
            return functools.partial(self.custom, gathered, flat, self.group, async_op=asynchronous)
        assert self.group is not None
        return functools.partial(all_gather_of(self.group), gathered, flat, self._gather_options)

    def _memory(self, numel: int) -> torch.Tensor:
        if self.custom is None:
            return torch.empty(numel, dtype=torch.uint8, device=self.device)
        memory: torch.Tensor = self.custom.allocate((numel,), dtype=torch.uint8, device=self.device)
        return memory


def with_gathers(
    comm: Communicator,
    custom: Any = None,
    encode: Callable[[list[torch.Tensor]], list[torch.Tensor]] | None = None,
    decode: Callable[[torch.Tensor, list[torch.Tensor]], None] | None = None,
) -> Communicator:
    """A communicator of the same ranks that gathers with ``custom``, or encodes inputs and decodes outputs."""
    if custom is None and encode is None and decode is None:
        return comm
    made: FlatGathers = _copy_of(comm, FlatGathers)
    made.custom, made.encode, made.decode = custom, encode, decode
    return made


class CustomScatters(Communicator):
    """Reduce-scatters with a user's collective, over one flat tensor in rank order."""

    custom: Any

    def reduce_scatter(
        self,
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
        division: Division,
        announce: Callable[[], None] | None = None,
        after: Pending | None = None,
    ) -> Pending:
        streams, n = self.streams, self.world_size
        with streams.fork("reduce") if after is None else streams.beside("reduce", after.mark):
            numel, dtype = sum(t.numel() for t in outputs), outputs[0].dtype
            buffer = self.custom.allocate((n * numel,), dtype=dtype, device=self.device)
            taken = self.custom.allocate((numel,), dtype=dtype, device=self.device)
            torch.cat([t.view(n, -1) for t in inputs], 1, out=buffer.view(n, -1))
            if division.before != 1.0:
                buffer.div_(division.before)
            op = dist.ReduceOp.AVG if division.average else dist.ReduceOp.SUM
            scatter = functools.partial(
                self.custom, taken, buffer, self.group, op, async_op=streams.asynchronous
            )
            work = self.begin(announce, scatter)

            def finish() -> None:
                if division.after != 1.0:
                    taken.div_(division.after)
                foreach_copy_(outputs, list(taken.split([t.numel() for t in outputs])))

            if streams.asynchronous:
                return Pending(streams, work, None, keep=(buffer, taken), finish=finish)
            finish()
        return Pending(streams, work, streams.mark("reduce"), keep=(inputs, outputs, buffer, taken))


def with_scatters(comm: Communicator, custom: Any) -> Communicator:
    """A communicator of the same ranks that reduce-scatters with ``custom``."""
    if comm.group is None:
        return comm
    made: CustomScatters = _copy_of(comm, CustomScatters)
    made.custom = custom
    return made
