"""Writes into shards that no version counter shows: in the checked mode they are an error that names the unit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.engine.kit.models import full, shard_layers, three_layers
from tests.support import multirank


def by_numpy(local: torch.Tensor) -> None:
    local.detach().numpy()[...] += 0.01


def by_dlpack(local: torch.Tensor) -> None:
    torch.from_dlpack(local.detach()).add_(0.01)  # type: ignore[attr-defined]


def by_memoryview(local: torch.Tensor) -> None:
    memoryview(local.detach().numpy().reshape(-1).view("uint8"))[2] ^= 64


def by_storage(local: torch.Tensor) -> None:
    local.untyped_storage()[2] ^= 64


WRITES: dict[str, Callable[[torch.Tensor], None]] = {
    "numpy": by_numpy,
    "dlpack": by_dlpack,
    "memoryview": by_memoryview,
    "storage": by_storage,
}


@multirank(2)
@pytest.mark.parametrize("layout", ["per_parameter", "ragged"])
@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_writes_that_no_counter_shows(rank: int, world_size: int, strategy: str, layout: str) -> None:
    x = torch.ones(2, 6)
    for name, write in WRITES.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SHARDWRIGHT_POISON", "1")
            model: Any = shard_layers(three_layers(), strategy=strategy, layout=layout)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(2):  # steps, forwards and edits that counters show are none of it
            model(x).sum().backward()
            optimizer.step()
            model(x)
            with torch.no_grad():
                model[0].weight.mul_(0.9)
        before = model(x)
        write(model[0].weight.to_local().detach())
        if strategy == "zero3":  # it gathers again
            assert not torch.equal(model(x), before), name
        else:
            with pytest.raises(
                RuntimeError, match=r"The shard of unit '0' was changed by a write that no version"
            ):
                model(x)
            model.reshard()
            model[0].reshard()
            assert not torch.equal(model(x), before), name
        plain = three_layers()
        plain.load_state_dict({key: full(value).clone() for key, value in model.state_dict().items()})
        assert torch.allclose(model(x), plain(x), atol=1e-5), name
