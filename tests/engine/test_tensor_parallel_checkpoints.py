"""Checkpoints and state dicts of models with tensor parallelism: between meshes, from and to torch's FSDP2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard as fsdp2

import shardwright as sw
from tests.engine.kit.models import Model, build, full, loss_of
from tests.engine.kit.tensor_parallel import LAYOUTS, Shape, data_rank, mesh_of, parallelize, shard, tokens
from tests.support import multirank


def trained(model: Model, mesh: DeviceMesh, seed: int) -> tuple[Model, torch.optim.Optimizer]:
    """After one step, so that there is optimizer state."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if isinstance(model, sw.FSDPModule):
        optimizer = sw.fully_shard_optimizer(optimizer)
    batch = tokens(seed, 0, data_rank(mesh))
    loss_of(model(batch), batch).backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def whole_states(model: Model, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Every parameter and every state of it, whole, by name."""
    found = {}
    for name, p in model.named_parameters():
        found[name] = full(p).detach()
        for key, value in optimizer.state[p].items():
            found[f"{name}/{key}"] = full(value)
    return found


#: From torch's FSDP2 or ours, on a mesh and in a layout, to another.
_MOVES = [
    (("fsdp2", (2, 2), None), ("sw", (1, 4), "per_parameter")),
    (("fsdp2", (2, 2), None), ("sw", (2, 1, 2), "element")),
    (("sw", (2, 2), "per_parameter"), ("fsdp2", (4, 1), None)),
    (("sw", (1, 4), "row"), ("fsdp2", (2, 1, 2), None)),
    (("sw", (2, 2), "element"), ("sw", (4, 1), "row")),
    (("sw", (4, 1), "row"), ("sw", (1, 2, 2), "per_parameter")),
]


@pytest.mark.extensive("each pair of meshes")
@multirank(4)
@pytest.mark.parametrize(("one", "other"), _MOVES, ids=lambda m: "-".join(map(str, m)))
def test_checkpoints_move(rank: int, world_size: int, one: Any, other: Any, tmp_path: Path) -> None:
    """Model and optimizer, by torch.distributed.checkpoint."""

    def make(kind: str, shape: Shape, layout: str | None, seed: int) -> tuple[Model, torch.optim.Optimizer]:
        mesh = mesh_of(shape)
        model = parallelize(build(seed), mesh, "sequence")
        if kind == "fsdp2":
            return trained(shard(model, mesh, fsdp2), mesh, seed)
        return trained(shard(model, mesh, layout=LAYOUTS[str(layout)]), mesh, seed)

    source, target = make(*one, seed=1), make(*other, seed=2)
    wanted = whole_states(*source)
    weights, state = get_state_dict(*source)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=tmp_path)
    weights, state = get_state_dict(*target)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=tmp_path)
    set_state_dict(*target, model_state_dict=weights, optim_state_dict=state)
    found = whole_states(*target)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


@multirank(4)
@pytest.mark.parametrize("layout", ["per_parameter", "element"])
@pytest.mark.parametrize("shape", [(2, 2), (1, 4)], ids=str)
def test_whole_state_dicts(rank: int, world_size: int, shape: Shape, layout: str) -> None:
    mesh = mesh_of(shape)
    plain = build(3)
    wanted = plain.state_dict()
    model = shard(parallelize(build(3), mesh, "tensor"), mesh, layout=LAYOUTS[layout])
    options = StateDictOptions(full_state_dict=True)
    gathered = get_model_state_dict(model, options=options)
    assert all(torch.equal(gathered[name], value) for name, value in wanted.items())
    other = build(4).state_dict()
    model.load_state_dict(other)  # whole tensors
    assert all(torch.equal(full(value), other[name]) for name, value in model.state_dict().items())
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, dict(wanted) if rank == 0 else {}, options=options)
    assert all(torch.equal(full(value), wanted[name]) for name, value in model.state_dict().items())
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    batch = tokens(0, 0, data_rank(mesh))
    assert torch.allclose(model(batch), plain(batch), atol=1e-5)


@multirank(4)
def test_pretrained_files(rank: int, world_size: int, tmp_path: Path) -> None:
    mesh = mesh_of((2, 2))
    model = shard(parallelize(build(5), mesh, "sequence"), mesh, layout="ragged")
    sw.save_pretrained(model, tmp_path / "one")
    other = shard(parallelize(build(6), mesh, "tensor"), mesh)
    sw.load_pretrained(other, tmp_path / "one")
    for (name, p), q in zip(other.named_parameters(), build(5).parameters(), strict=True):
        assert torch.equal(full(p), q), name
