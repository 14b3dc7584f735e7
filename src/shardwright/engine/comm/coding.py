"""Encoded gathers: how the inputs of a gather become bytes, and how every rank's bytes become the outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from shardwright.engine.comm.block_codecs import BlockCodec
from shardwright.engine.comm.codecs import Codec
from shardwright.engine.layout.blocks import HeldPart, Holding


class RowCoding:
    """Encodes each input as one flat row, if the codec makes it smaller.

    Inputs beyond ``dtypes`` are bytes without a dtype, and are not encoded.
    """

    def __init__(self, codec: Codec, dtypes: Sequence[torch.dtype]) -> None:
        self._codec = codec
        self._dtypes = dtypes

    def encode(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """The bytes to send: flat uint8 tensors for flat uint8 ``inputs``."""
        coded = list(inputs)
        for i, dtype in enumerate(self._dtypes):
            if self._nbytes(inputs[i].numel(), dtype) is not None:
                coded[i] = self._codec.encode(inputs[i].view(dtype).unsqueeze(0))[0]
        return coded

    def decode(self, rows: torch.Tensor, outputs: list[torch.Tensor]) -> None:
        """Fill the flat uint8 ``outputs`` from uint8 [ranks, bytes]."""
        start = 0
        for i, output in enumerate(outputs):
            target = output.view(len(rows), -1)
            dtype = self._dtypes[i] if i < len(self._dtypes) else None
            nbytes = None if dtype is None else self._nbytes(target.shape[1], dtype)
            stop = start + (target.shape[1] if nbytes is None else nbytes)
            if dtype is None or nbytes is None:
                target.copy_(rows[:, start:stop])
            else:
                typed = target.view(dtype)
                typed.copy_(self._codec.decode(rows[:, start:stop], typed.shape[1]))
            start = stop

    def _nbytes(self, nbytes: int, dtype: torch.dtype) -> int | None:
        """Bytes of the encoded input. None: the codec does not make it smaller."""
        if not dtype.is_floating_point:
            return None
        encoded = self._codec.nbytes(nbytes // dtype.itemsize)
        return encoded if encoded < nbytes else None


class _EncodedPart(NamedTuple):
    """A part of a holding, and its bytes in the encoded chunks of a rank."""

    part: HeldPart
    start: int
    stop: int


class BlockCoding:
    """Encodes the matrices in the ranks' chunks, all pieces of a unit as one row of bytes for each rank.

    The first gather encodes and the last one decodes. Gathers between them move the bytes. So weights are rounded once,
    however many mesh axes cut them. Padding does not travel, except at the end of rows that are shorter than others.

    Args:
        codec: the codec.
        holdings: the parts of every rank.
        dtypes: the dtype of each piece. Later inputs are bytes, and are not encoded.
        rank: this rank's number among the ranks of ``holdings``.

    Attributes:
        nbytes: bytes that each rank sends for its pieces.
    """

    def __init__(
        self, codec: BlockCodec, holdings: Sequence[Holding], dtypes: Sequence[torch.dtype], rank: int
    ) -> None:
        self._codec = codec
        self._dtypes = dtypes
        self._rank_count = holdings[-1].stop
        self._holdings = [(h, self._places(h)) for h in holdings]
        self._own = next(places for h, places in self._holdings if h.first <= rank < h.stop)
        self.nbytes = max(places[-1].stop if places else 0 for _, places in self._holdings)

    def _places(self, holding: Holding) -> list[_EncodedPart]:
        places: list[_EncodedPart] = []
        end = 0
        for part in holding.parts:
            if part.coded:
                count, rows, columns = part.matrices
                nbytes = count * self._codec.nbytes(rows, columns)
            else:
                nbytes = part.numel * self._dtypes[part.piece].itemsize
            places.append(_EncodedPart(part, end, end := end + nbytes))
        return places

    def encode(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """The bytes to send: flat uint8 tensors for flat uint8 ``inputs``, the pieces first."""
        coded: list[torch.Tensor] = []
        for part, _, _ in self._own:
            piece = inputs[part.piece].view(self._dtypes[part.piece])
            own = piece[part.offset : part.offset + part.numel]
            if part.coded:
                matrices = own.view(part.shape).permute(part.inverse).reshape(part.matrices)
                coded.append(self._codec.encode(matrices).view(-1))
            else:
                coded.append(own.view(torch.uint8))
        end = self._own[-1].stop if self._own else 0
        padding = torch.zeros(self.nbytes - end, dtype=torch.uint8, device=inputs[0].device)
        return [*coded, padding, *inputs[len(self._dtypes) :]]

    def decode(self, rows: torch.Tensor, outputs: list[torch.Tensor]) -> None:
        """Fill the flat uint8 ``outputs`` from uint8 [ranks, bytes]."""
        width = self._rank_count // len(rows) * self.nbytes
        copy_rows(rows[:, width:], outputs[len(self._dtypes) :])
        encoded = rows[:, :width].reshape(self._rank_count, self.nbytes)
        for holding, places in self._holdings:
            held = encoded[holding.first : holding.stop]
            for part, start, stop in places:
                self._decode(part, held[:, start:stop], outputs, holding)

    def _decode(
        self, part: HeldPart, encoded: torch.Tensor, outputs: list[torch.Tensor], holding: Holding
    ) -> None:
        piece = outputs[part.piece].view(self._dtypes[part.piece]).view(self._rank_count, -1)
        target = piece[holding.first : holding.stop, part.offset : part.offset + part.numel]
        if not part.coded:
            target.view(torch.uint8).copy_(encoded)
            return
        count, rows, columns = part.matrices
        decoded = self._codec.decode(encoded.reshape(len(encoded) * count, -1), rows, columns)
        shaped = target.view(-1, *part.shape).permute(0, *(1 + d for d in part.inverse))
        shaped.copy_(decoded.view(-1, *part.own_shape))


def copy_rows(rows: torch.Tensor, outputs: list[torch.Tensor]) -> None:
    """Fill flat uint8 ``outputs``, in their order, from uint8 [ranks, bytes] without decoding."""
    start = 0
    for output in outputs:
        target = output.view(len(rows), -1)
        target.copy_(rows[:, start : start + target.shape[1]])
        start += target.shape[1]
