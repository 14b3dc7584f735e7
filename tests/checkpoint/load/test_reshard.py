"""A checkpoint of any ranks, strategy, layout, memory, precision and units loads into any other: bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoint.kit.resharding import COMMON, RUN, Run, excluded, load, pairs, save
from tests.support import CaseFailed, WorkerPools
from tests.support.matrix import everything, generate

#: Runs with each pair of settings, each with another run; with SHARDWRIGHT_MATRIX=all also many triples of settings.
PAIRS = pairs(generate(RUN | COMMON, excluded, 2, more=200 if everything() else 0, tries=2))


def name_of(run: Run) -> str:
    return "-".join(str(value) for name, value in run._asdict().items() if value not in ("", False))


@pytest.mark.multirank
@pytest.mark.parametrize(("saves", "loads"), PAIRS, ids=name_of)
def test_values_are_equal_in_another_setting(
    worker_pools: WorkerPools, saves: Run, loads: Run, tmp_path: Path
) -> None:
    # Sums over other ranks are in another order; in bfloat16 gradients differ by the rounding of activations.
    bound = 3e-3 if "bf16" in (saves.precision, loads.precision) else 1e-4
    try:
        worker_pools.run(save, saves.place.ranks, run=saves, folder=tmp_path)
        worker_pools.run(load, loads.place.ranks, run=loads, folder=tmp_path, bound=bound)
    except CaseFailed as failure:
        pytest.fail(str(failure), pytrace=False)
