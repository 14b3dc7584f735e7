"""The data of one rank's steps: micro-batches from the run's position on, made ahead of time.

Global batches without a trained token have no step; they are counted here. Nothing here knows a model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardwright.engine import heartbeat
from shardwright.train.config import TrainConfig
from shardwright.train.data.samples.batch import Batch
from shardwright.train.data.samples.loader import Loader, Share, StepBatches
from shardwright.train.data.samples.stream import Stream
from shardwright.train.parallel.world import World
from shardwright.train.run.position import Position


class Untrained(NamedTuple):
    """Global batches without a trained token, one after another: their samples from `first` to before `stop`."""

    batches: int
    first: int
    stop: int


class Feed:
    """The batches of the steps of one rank, in the order of the run: all that `train.steps` needs."""

    def __init__(self, train: TrainConfig, workers: int, seed: int, world: World, stream: Stream) -> None:
        """`workers`: threads that read samples. `seed`: of the numbers that forward draws."""
        self._train, self._workers, self._seed = train, workers, seed
        self._world, self._stream = world, stream
        self._share = Share(train.global_batch, train.micro_batch, world.data_rank, world.data_size)
        self._loader: Loader | None = None  # from a position on, until `close`

    def next(self, position: Position) -> tuple[StepBatches, Untrained | None]:
        """Return the data of the next step, and the global batches before it that have no trained token.

        Ranks need not agree on them: each knows the number of trained tokens of the whole global batch.
        """
        if self._loader is None:
            train = self._train
            self._loader = Loader(
                self._stream,
                self._share,
                first=position.samples,
                stop=position.samples + (train.steps - position.step) * train.global_batch,
                workers=self._workers,
                pin=self._world.device.type == "cuda",
            )
        batches = 0
        while not (data := next(self._loader)).trained:
            heartbeat.at(heartbeat.DATA)
            batches += 1
        return data, Untrained(batches, position.samples, data.first) if batches else None

    def samples(self, position: Position, number: int) -> Tensor:
        """Numbers of the samples of micro-batch `number`: int64 [B], on the rank's device."""
        samples = self._share.samples(position.samples, number)
        return torch.arange(samples.start, samples.stop, device=self._world.device)

    def seed(self, position: Position, number: int) -> int:
        """Return the seed of what forward draws for micro-batch `number`: a function of its first sample, so also after
        a resume."""
        text = f"{self._seed} {self._share.samples(position.samples, number).start}"
        if (split := self._world.context) is not None:  # other tokens of the same samples
            text += f" {split.rank}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1

    def close(self) -> None:
        """End the threads that prepare batches. The next call of `next` begins at its position."""
        if self._loader is not None:
            self._loader.close()
            self._loader = None


def tensors_of(batches: Sequence[Batch]) -> list[Tensor]:
    """Return the tensors of batches in one row: a graph of a step has nothing but tensors for arguments."""
    return [
        each
        for batch in batches
        for each in (batch.inputs, batch.targets, batch.documents, batch.positions, batch.edges)
        if each is not None
    ]


def batches_of(tensors: Sequence[Tensor], separate: bool) -> list[Batch]:
    """Return the batches of :func:`tensors_of`, whose documents are numbered if `separate`."""
    if not separate:
        return [Batch(tensors[i], tensors[i + 1], None, None) for i in range(0, len(tensors), 2)]
    return [Batch(*tensors[i : i + 5]) for i in range(0, len(tensors), 5)]
