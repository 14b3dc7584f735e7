"""The data of a job that is planned or measured: any number of samples of zeros. No file is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import ClassVar

import torch
from torch import Tensor

from shardwright.train.config import Config
from shardwright.train.data.samples.batch import Batch

#: Micro-batches of a validation on each rank. A second one shows the memory of two at a time, since the first is freed
#: only while the second one runs; further ones take no more.
ROUNDS = 2


@dataclass(frozen=True)
class AbsentStream:
    """A stream of samples of zeros, with the interface of a stream of real ones.

    Attributes:
        seq_len: tokens of a sample.
        separate: whether samples say which document each token is of.
        windows: the number of samples.
        declare: called with each new tensor of a batch, so that a trace knows it.
    """

    seq_len: int
    separate: bool
    windows: int = 1 << 40
    declare: Callable[[Tensor], object] = id

    def batch(self, first: int, count: int) -> Batch:
        def zeros(dtype: torch.dtype) -> Tensor:
            tensor = torch.zeros(count, self.seq_len, dtype=dtype)
            self.declare(tensor)
            return tensor

        documents = zeros(torch.int32) if self.separate else None
        positions = zeros(torch.int64) if self.separate else None
        return Batch(zeros(torch.int64), zeros(torch.int64), documents, positions)

    def samples_of(self, epochs: Fraction) -> Fraction:
        return epochs * self.windows

    def trained(self, first: int, count: int) -> int:
        return count * self.seq_len

    @property
    def sources(self) -> Sequence[AbsentStream]:
        return (self,)

    @property
    def samples(self) -> int:
        return self.windows


@dataclass(frozen=True)
class AbsentData:
    """The data of a run that is planned, in which each sample is one document."""

    train: AbsentStream
    vocab_size: int
    validation: AbsentStream | None = None
    #: One more validation takes no more memory.
    validation_sets: ClassVar[Mapping[str, AbsentStream]] = {}

    @classmethod
    def of(cls, config: Config, ranks: int, declare: Callable[[Tensor], object] = id) -> AbsentData:
        """Return the data of a run on `ranks` ranks."""
        stream = AbsentStream(config.train.seq_len, False, declare=declare)
        count = ROUNDS * config.parallel.dims(ranks).data * config.train.micro_batch
        validation = replace(stream, windows=count) if config.validation.every else None
        return cls(stream, config.model.shape().vocab_size, validation)

    @property
    def windows(self) -> int:
        return self.train.windows
