"""The files that each rank compares with their digests."""

from __future__ import annotations

from shardwright.checkpoint.load.checkpoints import share


def test_files_are_shared_evenly_among_ranks() -> None:
    sizes = {f"__{number}_0.distcp": size for number, size in enumerate((7, 5, 4, 4, 3, 1, 0, 0))}
    for ranks in (1, 2, 3, 20):
        shares = [share(sizes, rank, ranks) for rank in range(ranks)]
        assert sorted(name for each in shares for name in each) == sorted(sizes)
        loads = [sum(sizes[name] for name in each) for each in shares]
        assert max(loads) - min(loads) <= max(sizes.values())
