"""The order in which a run visits its samples: a function of (seed, index) and nothing else.

No state may live here. Because of that a position in the data is one integer, and a run that resumes, on any
number of ranks, goes on with the very same sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

_ROUNDS = 4  # Four rounds of a Feistel network give a pseudorandom permutation (Luby and Rackoff, 1988).


@dataclass(frozen=True)
class SampleOrder:
    """An endless sequence of window numbers that visits each of `windows` windows once per epoch.

    Each epoch has an order of its own: a Feistel network keyed by (seed, epoch) permutes the next power of
    four, and walks on from results that lie outside ("cycle walking", Black and Rogaway, 2002), in constant
    memory.
    """

    windows: int
    seed: int

    def __post_init__(self) -> None:
        if self.windows < 1:
            raise ValueError(f"windows: expected at least 1, found {self.windows}")

    def __getitem__(self, index: int) -> int:
        """The window at `index`, counted from the start of the run: 0 <= result < windows."""
        if index < 0:
            raise IndexError(f"index: expected at least 0, found {index}")
        epoch, position = divmod(index, self.windows)
        key = f"{self.seed}/{epoch}".encode()
        half_bits = max(1, ((self.windows - 1).bit_length() + 1) // 2)
        while True:
            position = _feistel(position, half_bits, key)
            if position < self.windows:
                return position


def _feistel(value: int, half_bits: int, key: bytes) -> int:
    """A permutation of the numbers of 2 x half_bits bits."""
    mask = (1 << half_bits) - 1
    left, right = value >> half_bits, value & mask
    for turn in range(_ROUNDS):
        left, right = right, left ^ (_round(key, turn, right) & mask)
    return left << half_bits | right


# An epoch of n windows has 4 n rounds, and only 8 sqrt(n) different ones at most. Kept results take 15 MB at most.
@lru_cache(maxsize=1 << 16)
def _round(key: bytes, turn: int, right: int) -> int:
    """A pseudorandom number of 64 bits."""
    digest = blake2b(turn.to_bytes(1) + right.to_bytes(8, "little"), key=key, digest_size=8).digest()
    return int.from_bytes(digest, "little")
