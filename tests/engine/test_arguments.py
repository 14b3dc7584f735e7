"""Arguments that ``fully_shard`` refuses, and its errors."""

from __future__ import annotations

import inspect
import io
import pickle
import re

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule as TorchModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard as torch_fully_shard,
)
from torch.distributed.tensor import Replicate, Shard

import shardwright as sw
from tests.engine.kit.models import build, shard
from tests.support import multirank, world_mesh


def test_signature_and_defaults_are_those_of_torch() -> None:
    ours = inspect.signature(sw.fully_shard).parameters
    theirs = inspect.signature(torch_fully_shard).parameters
    for name, parameter in theirs.items():
        assert ours[name].kind == parameter.kind, name
        assert ours[name].default == parameter.default, name
    own = {"strategy", "layout", "memory", "prefetch", "strict", "sync_module_states", "check_module_states"}
    own.add("ignored_modules")
    assert set(ours) - set(theirs) - own <= {"dp_mesh_dims"}  # which torch has from 2.12 on


def test_a_program_without_a_launcher_is_told_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(RuntimeError, match=r"found no RANK in the environment\. Start it with `torchrun"):
        sw.fully_shard(nn.Linear(2, 2))


def test_every_public_method_of_torch_is_there() -> None:
    methods = {n for n, f in vars(TorchModule).items() if inspect.isfunction(f) and not n.startswith("_")}
    assert methods <= set(dir(sw.FSDPModule))


def test_policies_are_torchs_own() -> None:
    assert sw.MixedPrecisionPolicy is MixedPrecisionPolicy and sw.OffloadPolicy is OffloadPolicy
    assert sw.CPUOffloadPolicy is CPUOffloadPolicy


@multirank(1)
def test_policies_of_another_kind_are_refused(rank: int, world_size: int) -> None:
    for option in ({"mp_policy": None}, {"mp_policy": torch.bfloat16}, {"offload_policy": "cpu"}):
        with pytest.raises(ValueError, match=f"{next(iter(option))} must be a torch.distributed.fsdp"):
            sw.fully_shard(nn.Linear(2, 2), **option)


def test_every_public_name_is_there() -> None:
    for name in sw.__all__:
        assert getattr(sw, name) is not None
    with pytest.raises(AttributeError, match=r"has no attribute 'no_such_name'"):
        _ = sw.no_such_name


def refused(match: str, error: type[Exception], module: object, **options: object) -> None:
    with pytest.raises(error, match=match):
        sw.fully_shard(module, **options)


@multirank(2)
def test_modules_that_cannot_be_sharded(rank: int, world_size: int) -> None:
    linear = nn.Linear(2, 2)
    refused("has no forward", ValueError, nn.ModuleList([linear]))
    refused("empty list", ValueError, [])
    refused("expects nn.Module, got int", ValueError, 3)
    refused("pass only the outer module", ValueError, [nn.Sequential(linear), linear])
    sharded = sw.fully_shard(nn.Linear(2, 2))
    refused("already applied to this Linear", ValueError, sharded)


@multirank(2)
def test_parameters_that_cannot_be_sharded(rank: int, world_size: int) -> None:
    refused("sparse=False", ValueError, nn.Embedding(3, 4, sparse=True))
    refused("not initialised", ValueError, nn.LazyLinear(3))


@multirank(2)
def test_placements_that_cannot_be(rank: int, world_size: int) -> None:
    refused("has 1 dimensions", ValueError, nn.LayerNorm(4), shard_placement_fn=lambda p: Shard(1))
    refused(
        "must return Shard, ShardPlacementResult or None",
        ValueError,
        nn.LayerNorm(4),
        shard_placement_fn=lambda p: Replicate(),
    )


@multirank(4)
def test_meshes_that_cannot_be(rank: int, world_size: int) -> None:
    two_d = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    three_d = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("a", "b", "c"))
    refused(r"got 3 dimensions of shape \(2, 1, 2\)", ValueError, nn.Linear(2, 2), mesh=three_d)
    refused("must be a DeviceMesh, got int", ValueError, nn.Linear(2, 2), mesh=2)
    sw.fully_shard(nn.Linear(2, 2), mesh=two_d["b"])


@multirank(1)
def test_pickling_is_refused(rank: int, world_size: int) -> None:
    model = shard(build(), mesh=world_mesh(1))
    for dump in (pickle.dumps, lambda m: torch.save(m, io.BytesIO())):
        with pytest.raises(TypeError, match=r"sharded Model cannot be pickled.*Save its state_dict"):
            dump(model)


@multirank(1)
def test_slices_of_a_sharded_container_are_plain(rank: int, world_size: int) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.ReLU())
    sw.fully_shard(model)
    assert type(model[1:]) is nn.Sequential and re.match("FSDPSequential", repr(model))


@multirank(1)
def test_a_list_unit_is_no_root(rank: int, world_size: int) -> None:
    outer = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    inner = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    sw.fully_shard(inner[0])
    sw.fully_shard([inner, outer[0]])
    with pytest.raises(RuntimeError, match="unit of 2 modules, which cannot be the root"):
        inner(torch.randn(1, 2))
