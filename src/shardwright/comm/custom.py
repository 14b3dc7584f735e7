"""Communicators that gather or reduce-scatter with a user's collective, or gather encoded weights.

The user's collectives are objects of torch's classes for FSDP2 (``AllGather`` and ``ReduceScatter``). ``allocate``
returns the memory that the collective reads and writes. A call runs it.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardwright._torch import foreach_copy_
from shardwright.comm.codecs import Codec
from shardwright.comm.collectives import Communicator, Pending
from shardwright.comm.division import Division


def _copy_of(comm: Communicator, kind: type[Communicator]) -> Any:
    made = copy.copy(comm)
    made.__class__ = kind
    return made


class FlatGathers(Communicator):
    """Gathers with one flat collective: a user's collective, or the group's own over encoded weights.

    Attributes:
        custom: the user's collective, or None.
        codec, dtypes: the codec, and the dtype of each input. Inputs with dtype None, or beyond ``dtypes``, are not
            encoded.
    """

    custom: Any
    codec: Codec | None
    dtypes: Sequence[torch.dtype]

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
            kinds = [*self.dtypes, *[None] * (len(inputs) - len(self.dtypes))]
            coded = [self._encoded(t, kind) for t, kind in zip(inputs, kinds, strict=True)]
            numel = sum(t.numel() for t in coded)
            flat, gathered = self._memory(numel), self._memory(self.world_size * numel)
            torch.cat(coded, out=flat)
            gather = (
                functools.partial(self.group._allgather_base, gathered, flat, self._gather_options)
                if self.custom is None
                else functools.partial(
                    self.custom, gathered, flat, self.group, async_op=self.streams.asynchronous
                )
            )
            work = self.begin(announce, gather)

            def decode() -> None:
                rows = gathered.view(self.world_size, -1).split([t.numel() for t in coded], dim=1)
                for output, row, kind in zip(outputs, rows, kinds, strict=True):
                    self._decode(row, output.view(self.world_size, -1), kind)

            if self.streams.asynchronous:

                def finish() -> None:
                    decode()
                    if on_done is not None:
                        on_done()

                return Pending(self.streams, work, None, keep=(flat, gathered), finish=finish)
            decode()
        return Pending(self.streams, work, self.streams.mark("gather"), keep=(flat, gathered), finish=on_done)

    def _memory(self, numel: int) -> torch.Tensor:
        if self.custom is None:
            return torch.empty(numel, dtype=torch.uint8, device=self.device)
        memory: torch.Tensor = self.custom.allocate((numel,), dtype=torch.uint8, device=self.device)
        return memory

    def _is_coded(self, nbytes: int, dtype: torch.dtype | None) -> bool:
        """Whether the codec makes the input smaller."""
        if self.codec is None or dtype is None or not dtype.is_floating_point:
            return False
        return self.codec.nbytes(nbytes // dtype.itemsize) < nbytes

    def _encoded(self, piece: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        if not self._is_coded(piece.numel(), dtype):
            return piece
        assert self.codec is not None and dtype is not None
        return self.codec.encode(piece.view(dtype).unsqueeze(0))[0]

    def _decode(self, rows: torch.Tensor, output: torch.Tensor, dtype: torch.dtype | None) -> None:
        if not self._is_coded(output.shape[1], dtype):
            output.copy_(rows)
            return
        assert self.codec is not None and dtype is not None
        typed = output.view(dtype)
        typed.copy_(self.codec.decode(rows, typed.shape[1]))


def with_gathers(
    comm: Communicator, custom: Any = None, codec: Codec | None = None, dtypes: Sequence[torch.dtype] = ()
) -> Communicator:
    """A communicator of the same ranks that gathers with ``custom``, or encodes with ``codec``."""
    if comm.group is None or (custom is None and codec is None):
        return comm
    made: FlatGathers = _copy_of(comm, FlatGathers)
    made.custom, made.codec, made.dtypes = custom, codec, dtypes
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
