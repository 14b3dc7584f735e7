"""Small states whose values follow from their step, so that a checkpoint of any step can be compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwright.checkpoint import NestedState
from shardwright.checkpoint.load.checkpoints import checkpoint_at
from shardwright.checkpoint.load.collective_load import (
    check_same_description,
    identity_of,
    read_state,
    verify_together,
)
from shardwright.checkpoint.load.fit import check_tensors
from shardwright.checkpoint.save import plan
from shardwright.checkpoint.save.collective_save import write_state
from shardwright.checkpoint.storage.locations import Location
from shardwright.engine import RankGroup

ALONE = RankGroup(alone=True)


def state(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    return {
        "model": {
            "weight": torch.randn(3, 5, generator=generator),
            "none": torch.empty(0, 2),
            "norm": torch.randn((), generator=generator),
        },
        "extra": {"step": step, "deep": [step, {"text": "é"}]},
    }


def load_state(path: Location, state: Mapping[str, Any], ranks: RankGroup) -> dict[str, Any]:
    """Read a nested state in place in the three steps of a load. Returns its tensors and the stored values."""
    checkpoint, identities = ranks.run_and_share(lambda: checkpoint_at(path), identity_of)
    check_same_description(identities, ranks)
    tensors = NestedState.of(state).tensors
    ranks.run_on_all(lambda: check_tensors(checkpoint, tensors))
    verify_together(checkpoint, ranks)
    return read_state(checkpoint, state, ranks)


@contextmanager
def small_tensors_spread() -> Iterator[None]:
    """Every rank writes some of the tensors, which are so small that the first rank would write all of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "_is_first_ranks", lambda each, shared: False)
        yield


def step_of(path: Path) -> int | None:
    """The step of the checkpoint at ``path``, all of whose values are right; None if there is none."""
    try:
        checkpoint = checkpoint_at(path)
    except FileNotFoundError:
        return None
    checkpoint.verify()
    read = {
        "weight": torch.full((3, 5), -1.0),
        "none": torch.empty(0, 2),
        "norm": torch.tensor(-1.0),
    }
    values = load_state(path, {"model": read}, ALONE)
    step = values["extra"]["step"]
    expected = state(step)
    assert values["extra"] == expected["extra"]
    assert all(torch.equal(read[name], each) for name, each in expected["model"].items())
    return int(step)


def saves(path: Path, steps: int) -> list[Callable[[], Any]]:
    """Each replaces the checkpoint of the one before."""
    return [
        lambda step=step: write_state(path, state(step), ALONE, overwrite=True)  # type: ignore[misc]
        for step in range(1, steps + 1)
    ]


def bits(tensor: torch.Tensor) -> list[int]:
    """All bytes of a tensor, which are equal only for equal bits."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()
