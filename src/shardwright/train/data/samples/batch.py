"""Samples as tensors: what a model reads and what the loss compares with. Which samples these are, others decide."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardwright.train.data.samples.packing import Pieces, SamplePacking
from shardwright.train.data.tokens.tokens import Tokens

IGNORED = -100
"""The target of a position that the loss does not count, as `torch.nn.functional.cross_entropy` has it."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Samples of S positions: B rows."""

    inputs: Tensor
    """int64 [B, S]; 0 where there is padding."""
    targets: Tensor
    """int64 [B, S]; IGNORED where the loss does not count the position."""
    documents: Tensor | None
    """int32 [B, S]: a number per document of the row, from 0; padding has the number after the last. None: the row is
    one text, and a position sees all before it."""
    positions: Tensor | None
    """int64 [B, S]: from 0 at the start of each document of the row. None as for `documents`."""
    edges: Tensor | None = None
    """int32 [documents of all rows + 1]: where each document begins among all B * S positions, then B * S. They are
    made on the host, so that no forward waits for a device to count them. None as for `documents`."""

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        """Return the batch on a device. `non_blocking` as for `Tensor.to`; it needs pinned memory to have an effect."""
        return Batch(*(t if t is None else t.to(device, non_blocking=non_blocking) for t in self._tensors()))  # type: ignore[arg-type]

    def pinned(self) -> Batch:
        """Return the batch in page-locked memory, from which a GPU copies while the host goes on."""
        return Batch(*(t if t is None else t.pin_memory() for t in self._tensors()))  # type: ignore[arg-type]

    def _tensors(self) -> tuple[Tensor | None, ...]:
        return self.inputs, self.targets, self.documents, self.positions, self.edges


class Rows:
    """B rows of S positions that are filled source by source, in any order, each row once."""

    def __init__(self, rows: int, seq_len: int, *, separate: bool) -> None:
        self._inputs = np.zeros((rows, seq_len), np.int64)
        self._targets = np.full((rows, seq_len), IGNORED, np.int64)
        self._documents = np.zeros((rows, seq_len), np.int32) if separate else None
        self._positions = np.zeros((rows, seq_len), np.int64) if separate else None

    def fill(
        self, rows: NDArray[np.int64], tokens: Tokens, packing: SamplePacking, samples: NDArray[np.int64]
    ) -> None:
        """Row rows[k] becomes sample samples[k]; int64 [k] each."""
        pieces = packing.pieces(samples)
        ids, trained = _plain(tokens.ids), None if tokens.trained is None else _plain(tokens.trained)
        columns = _columns(pieces)
        # Slices, not an index per token: most pieces are long, and a slice of a memory map is one copy.
        for row, column, start, inputs, targets in zip(
            rows[pieces.rows].tolist(), columns.tolist(), *(c.tolist() for c in pieces[1:]), strict=True
        ):
            self._inputs[row, column : column + inputs] = ids[start : start + inputs]
            target = ids[start + 1 : start + 1 + targets]
            if trained is None:
                self._targets[row, column : column + targets] = target
            else:
                counted = trained[start + 1 : start + 1 + targets] != 0
                np.copyto(self._targets[row, column : column + targets], target, where=counted)
        if self._documents is not None and self._positions is not None:
            numbers, positions = _places(pieces, columns, len(rows), packing.seq_len)
            self._documents[rows], self._positions[rows] = numbers, positions

    def batch(self) -> Batch:
        """Return the rows as tensors, without a copy."""
        return Batch(
            torch.from_numpy(self._inputs),
            torch.from_numpy(self._targets),
            None if self._documents is None else torch.from_numpy(self._documents),
            None if self._positions is None else torch.from_numpy(self._positions),
            None if self._documents is None else torch.from_numpy(_edges(self._documents)),
        )


def _edges(documents: NDArray[np.int32]) -> NDArray[np.int32]:
    """Where each document begins among the positions of all rows, and their number: int32."""
    begins = np.ones(documents.shape, bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return np.append(np.flatnonzero(begins), documents.size).astype(np.int32)


def _plain(row: Any) -> Any:
    """Return a memory map as an array of the base class, whose slices cost less."""
    return np.asarray(row) if isinstance(row, np.ndarray) else row


def _columns(pieces: Pieces) -> NDArray[np.int64]:
    """Return the column at which each piece starts in its row."""
    ends = np.cumsum(pieces.inputs)
    begins = ends - pieces.inputs
    first = np.searchsorted(pieces.rows, pieces.rows, side="left")  # the row's first piece
    return begins - begins[first]


def _places(
    pieces: Pieces, columns: NDArray[np.int64], rows: int, seq_len: int
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Numbers of documents, int32 [rows, seq_len], and positions in them, int64 [rows, seq_len]. Padding counts as a
    document after the others."""
    begins = np.zeros((rows, seq_len), np.int32)
    begins[pieces.rows, columns] = 1
    filled = np.zeros(rows, np.int64)
    np.add.at(filled, pieces.rows, pieces.inputs)
    padded = np.flatnonzero(filled < seq_len)
    begins[padded, filled[padded]] = 1
    numbers = np.cumsum(begins, axis=1, dtype=np.int32) - 1
    places = np.arange(seq_len)
    starts = np.maximum.accumulate(np.where(begins != 0, places, 0), axis=1)
    return numbers, places - starts
