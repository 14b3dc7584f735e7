"""Bytes of the tensors that are alive in a process, and what a ZeRO stage needs by arithmetic.

Every operation that passes torch's dispatcher is looked at from before the model is built, so tensors that only C++
holds (buckets of DDP, saved activations) count, by address and until they are freed by whatever thread. What an
operator allocates and frees within one call and what gloo allocates inside do not count.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from benchmarks.peers.shapes import Shape, loss_of
from benchmarks.peers.step import Step
from tests.support.storages import Storages, _union

STEPS = 4
"""Planned memory is recorded in the first step and used from the second on; the last one is looked at."""


class _Watched(Storages):
    """Looks at all storages only where there could be more bytes than ever: each look takes milliseconds."""

    def __init__(self) -> None:
        super().__init__(lambda frame: "")
        self._bound = 0  #: bytes at the last look and all that were made since
        self._new = 0  #: storages made since then; ``made`` also counts those that became larger

    def know(self, storage: torch.UntypedStorage, label: str | None = None) -> bool:
        new = super().know(storage, label)
        if new:
            self._new += 1
            self._bound += storage.nbytes()
        return new

    def sample(self) -> None:
        if self._watching and (self._bound > self.peak.nbytes or self.made[""] != self._new):
            self._bound = _union([each for _, each in self._alive()])
            self._new = self.made[""]
            self.peak.nbytes = max(self.peak.nbytes, self._bound)

    def alive(self) -> int:
        self._bound = sys.maxsize  # look
        self.begin()
        return self.peak.nbytes


def of_a_step(build: Callable[[], Step], tokens: Callable[[int], torch.Tensor]) -> tuple[int, int]:
    """Bytes between steps, and the most within one."""
    batches = [tokens(number) for number in range(STEPS)]
    storages = _Watched()
    with storages:
        step = build()
        for batch in batches[:-1]:
            step(batch, 1.0)
        storages.alive()
        step(batches[-1], 1.0)
        peak = storages.peak.nbytes
        return storages.alive(), peak


def activations(shape: Shape) -> int:
    """Bytes that the plain model's forward leaves for its backward."""
    tokens = shape.tokens(0, 0, 1)
    storages = _Watched()
    with storages:
        model = shape.model()
        before = storages.alive()
        loss = loss_of(model, tokens)
        after = storages.alive()
        del loss
    return after - before


def elements(shape: Shape) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in shape.model().parameters())


def least(stage: int, elements: int, activations: int, ranks: int) -> tuple[int, int]:
    """Bytes between steps and within one, in float32: what the stage shards is cut by the ranks.

    Between steps: parameters and the two moments of AdamW. Within a step, without recomputation: that, and the larger
    of all activations (at the end of forward) and all gradients (at the end of backward).
    """
    moments, gradients, parameters = (elements / (ranks if stage >= first else 1) for first in (1, 2, 3))
    rest = 4 * (parameters + 2 * moments)
    return round(rest), round(rest + max(activations, 4 * gradients))
