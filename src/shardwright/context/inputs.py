"""Positions and masks that the ranks of a context give to a model, compared before any of them attends.

One rank alone must not raise an error, since the others would wait for it in the attention's collectives. So every
rank states what it got in a few integers, all ranks get the integers of all, and each comes to the same verdict.
Nothing here knows a layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwright.context.split import Split
from shardwright.engine import ranks_in_words
from shardwright.engine.comm import noted, streams_for
from shardwright.engine.compat import all_gather_single

POSITIONS, MASK = "position_ids", "attention_mask"  #: arguments of transformers' models
_VERDICT = "positions"  #: the side stream on which statements go to the host


class Stated(NamedTuple):
    """The positions and the mask that a rank got, as integers.

    Attributes:
        given: whether there are positions, 1 or 0.
        rows: samples in them.
        length: tokens in them.
        first: the first position of the first row.
        jumps: places in a row at which the next position is not one more.
        offsets: the sum over rows of the first position minus the one that it has in a sample that begins with 0.
        weighted: the same sum with the number of the row as a factor, so that other offsets have other sums.
        padding: tokens that a mask of two dimensions leaves out; -1 if such a mask is not one of this rank's tokens.
    """

    given: int
    rows: int
    length: int
    first: int
    jumps: int
    offsets: int
    weighted: int
    padding: int


def is_of_transformers(module: nn.Module) -> bool:
    """Return whether transformers makes the masks of this module: it keeps documents apart where positions
    begin again."""
    return any(of.__module__ == "transformers.modeling_utils" for of in type(module).__mro__)


class ComparedInputs:
    """Raises the same error on all ranks of a split if their positions or masks are not those of parts of one sample.

    On a CPU a forward raises its own error. On an accelerator the first forward does, too. Later ones do not let the
    host wait for the device: the error of one forward is raised at the beginning of the next.
    """

    def __init__(self, split: Split, module: nn.Module) -> None:
        self._split, self._name = split, type(module).__name__
        self._masks = is_of_transformers(module)
        self._first = True
        self._pending: tuple[Tensor, Tensor, Any] | None = (
            None  #: statements that are on their way to the host
        )

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a deep copy, which has seen no forward."""
        return {**vars(self), "_first": True, "_pending": None}

    def compare(self, arguments: Mapping[str, Any], device: torch.device) -> None:
        """Compare the arguments of a forward. Every rank of the split calls it.

        Raises:
            RuntimeError: they do not fit each other, on every rank.
        """
        positions, mask = arguments.get(POSITIONS), arguments.get(MASK) if self._masks else None
        if any(isinstance(t, Tensor) and (type(t) is not Tensor or t.is_meta) for t in (positions, mask)):
            return  # without values, or with those of a subclass
        streams = streams_for(device)
        if streams.capturing:
            return
        stated = self._stated(positions, mask, device)
        gathered = stated.new_empty(self._split.ranks * len(Stated._fields))
        assert self._split.group is not None
        with noted("all-gather of positions", self._split.group):
            all_gather_single(gathered, stated, group=self._split.group)
        if device.type == "cpu" or self._first:
            self._first = False
            self._judge(gathered)
            return
        pending, self._pending = self._pending, None
        if pending is not None:
            streams.host_wait(pending[2])
            self._judge(pending[1])
        host = torch.empty_like(gathered, device="cpu", pin_memory=True)
        with streams.fork(_VERDICT):
            host.copy_(gathered, non_blocking=True)
        self._pending = gathered, host, streams.mark(_VERDICT)

    def _stated(self, positions: Tensor | None, mask: Tensor | None, device: torch.device) -> Tensor:
        zero = torch.zeros((), dtype=torch.int64, device=device)
        padding = zero
        if isinstance(mask, Tensor) and mask.ndim == 2:
            padding = (mask == 0).sum()
            if isinstance(positions, Tensor) and mask.shape[-1] != positions.shape[-1]:
                padding = zero - 1
        if not isinstance(positions, Tensor):
            return torch.stack([zero] * 7 + [padding.to(device)])
        values = positions if positions.ndim == 2 else positions.reshape(-1, positions.shape[-1])
        length = values.shape[-1]
        offsets = values[:, 0] - self._split.rank * length
        # Positions of several dimensions, as those of images, need not go on by one.
        jumps = (values.diff() != 1).sum() if positions.ndim <= 2 else zero
        numbers = torch.arange(1, len(values) + 1, device=values.device)
        sizes = [torch.full_like(zero, n) for n in (1, len(values), length)]
        parts = [values[0, 0], jumps, offsets.sum(), (offsets * numbers).sum(), padding]
        return torch.stack([*sizes, *(part.to(device, torch.int64) for part in parts)])

    def _judge(self, gathered: Tensor) -> None:
        ranks = [Stated(*row) for row in gathered.view(self._split.ranks, -1).tolist()]
        if problem := self._problem(ranks):
            raise RuntimeError(f"forward of {self._name} {problem}")

    def _problem(self, ranks: list[Stated]) -> str:
        """Return the mistake and the way out, or an empty text."""
        right = f"{POSITIONS}=sw.context.shard(torch.arange(length)[None], mesh)"
        missing = [rank for rank, each in enumerate(ranks) if not each.given]
        if missing:
            some = "" if len(missing) == len(ranks) else f" on {_of_context(missing)}"
            return f"was called without {POSITIONS}{some}, and would count this rank's tokens from 0; pass {right}"
        sizes = [(each.rows, each.length) for each in ranks]
        if len(set(sizes)) > 1:
            return (
                f"got {POSITIONS} of {sizes[0][0]} x {sizes[0][1]} tokens on rank 0 of the context, and others on "
                f"{_of_context([rank for rank, size in enumerate(sizes) if size != sizes[0]])}; each rank has an equal "
                "part of the same samples: sw.context.shard makes it"
            )
        if not self._masks:
            return ""
        padded = [rank for rank, each in enumerate(ranks) if each.padding]
        if padded:
            return (
                f"got an {MASK} that leaves tokens out on {_of_context(padded)}. sw.context_parallel knows no padding "
                f"in samples that ranks divide: leave {MASK} out where padding is at the end, since no token sees a "
                "later one, and give its targets no loss; or pack samples to one length"
            )
        inside = [rank for rank, each in enumerate(ranks) if each.jumps]
        others = [
            rank
            for rank, each in enumerate(ranks)
            if (each.offsets, each.weighted) != (ranks[0].offsets, ranks[0].weighted)
        ]
        if inside or others:
            where = (
                f"inside the part of {_of_context(inside)}"
                if inside
                else f"where {_of_context(others[:1])} begins"
            )
            found = "" if inside else f" ({ranks[others[0]].first} there)"
            return (
                f"got {POSITIONS} that do not go on by one {where}{found}. If each rank counts its own tokens, pass "
                f"{right}. If they begin again with each of several packed documents, sw.context_parallel does not "
                'keep these apart: the trainer does (model.kind = "hf", parallel.context), and sw.context.attention '
                "with documents= does; or give each sample one document"
            )
        return ""


def _of_context(ranks: list[int]) -> str:
    return f"{ranks_in_words(ranks)} of the context"
