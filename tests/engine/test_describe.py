"""``sw.describe``: the line that says which engine sharded a model."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as fsdp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import shardwright as sw
from tests.support import multirank, world_mesh


def build() -> Any:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def shard(engine: Any, **options: Any) -> Any:
    model = build()
    engine.fully_shard(model[0], **options)
    return engine.fully_shard(model, **options)


@multirank(4)
def test_each_engine_is_named(rank: int, world_size: int) -> None:
    line, square = world_mesh(4), world_mesh(2, 2, names=("replicate", "shard"))
    plain = build()
    cases: list[tuple[Any, dict[str, Any]]] = [
        (plain, {"engine": "none"}),
        (shard(sw, mesh=line), {"engine": "shardwright", "strategy": "zero3", "mesh": "4", "units": 2}),
        (shard(sw, mesh=line, layout="ragged"), {"layout": 'Ragged("row")'}),
        (shard(sw, mesh=line, strategy="zero1"), {"strategy": "zero1", "memory": "dynamic"}),
        (shard(sw, mesh=square), {"strategy": "hsdp", "mesh": "replicate 2 x shard 2"}),
        (shard(fsdp, mesh=line), {"engine": "FSDP2", "strategy": "zero3", "mesh": "4", "units": 2}),
        (shard(fsdp, mesh=square), {"engine": "FSDP2", "strategy": "hsdp"}),
        (DistributedDataParallel(build()), {"engine": "DDP", "mesh": "4"}),
    ]
    for model, expected in cases:
        found = dataclasses.asdict(sw.describe(model))
        assert {key: found[key] for key in expected} == expected, f"{sw.describe(model)}"
        wrapped = nn.ModuleDict({"inside": model})
        assert sw.describe(wrapped) == sw.describe(model)
    with_memory = copy.deepcopy(plain)
    sw.fully_shard(with_memory[0], mesh=line)
    sw.fully_shard(with_memory, mesh=line, memory="arena")
    for _ in range(2):
        text = str(sw.describe(with_memory))
        assert (
            text
            == f"sharded by shardwright {sw.__version__}: zero3 over 4 ranks, 2 units, layout per_parameter, "
            "memory arena"
        )
        with_memory(torch.ones(1, 4)).sum().backward()
    assert str(sw.describe(plain)).startswith("not sharded")
    mixed = nn.Sequential(build(), build())
    sw.fully_shard(mixed[0], mesh=line)
    fsdp.fully_shard(mixed[1], mesh=line)
    assert [each.engine for each in sw.describe(mixed).others] == ["FSDP2"]
    assert "1 unit, layout per_parameter, memory dynamic; also sharded by torch's FSDP2: zero3 over 4" in str(
        sw.describe(mixed)
    )
    with pytest.raises(TypeError, match=r"describe: expected a torch\.nn\.Module, found NoneType"):
        sw.describe(None)  # type: ignore[arg-type]
