"""``AsyncCheckpoint``: each equals a synchronous checkpoint of its step, and failures reach every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shardwright as sw
from shardwright.checkpoint.loading import open_checkpoint, verify
from tests.support.pool import multirank, world_mesh

LAYOUTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "per_parameter": {},
    "row": {"layout": "ragged"},
    "element": {"layout": sw.Ragged("element")},
}


def trained(layout: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(50, 70), nn.BatchNorm1d(70), nn.Linear(70, 3))
    if layout == "plain":
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)
    for layer in (model[0], model[2], model):
        sw.fully_shard(layer, mesh=world_mesh(dist.get_world_size()), **LAYOUTS[layout])
    return model, sw.fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(4, 50)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def digests(path: Path) -> dict[str, str]:
    """Of all files, after they were compared with their digests."""
    checkpoint = open_checkpoint(path)
    verify(checkpoint)
    assert checkpoint.index is not None
    assert {each.name for each in path.iterdir()} == {*checkpoint.index.files, "index.json"}
    return {name: file.sha256 for name, file in checkpoint.index.files.items()}


@multirank(1, 2, 3)
def test_each_equals_the_synchronous_one_of_its_step(rank: int, world_size: int, tmp_path: Path) -> None:
    with sw.AsyncCheckpoint() as checkpoints:
        for layout in LAYOUTS:
            model, optimizer = trained(layout)
            for number in range(3):
                extra = {"step": number, "notes": [number, "a", ("a", "a")], "moment": torch.ones(2) * number}
                place = tmp_path / f"{layout}-{number}"
                sw.save_checkpoint(place.with_suffix(".sync"), model, optimizer, extra=extra)
                checkpoints.save(place, model, optimizer, extra=extra)
                extra["moment"].zero_()
                step(model, optimizer)
        checkpoints.wait()
        outcome = checkpoints.poll()
        assert outcome is not None and outcome.committed and outcome.error is None and outcome.path == place
        if rank == 0:
            for layout in LAYOUTS:
                places = [tmp_path / f"{layout}-{number}" for number in range(3)]
                each = [digests(place) for place in places]
                assert each == [digests(place.with_suffix(".sync")) for place in places]
                assert len({tuple(files.values()) for files in each}) == 3  # training went on between them
            assert len(list(tmp_path.iterdir())) == len(LAYOUTS) * 3 * 2
    dist.barrier()
