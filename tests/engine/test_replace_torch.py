"""``sw.replace_torch()``: torch's names of FSDP2 mean this engine."""

from __future__ import annotations

import importlib
import sys
import types
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

import shardwright as sw
from tests.engine.kit.models import full
from tests.support import multirank, world_mesh

HOMES = (
    "torch.distributed.fsdp",
    "torch.distributed.fsdp._fully_shard",
    "torch.distributed._composable.fsdp",
    "torch.distributed._composable.fsdp.fully_shard",
)
NAMES = ("FSDPModule", "UnshardHandle", "fully_shard", "register_fsdp_forward_method", "share_comm_ctx")


def exported() -> dict[tuple[str, str], object]:
    modules = {home: vars(sys.modules.get(home) or importlib.import_module(home)) for home in HOMES}
    return {(home, name): names[name] for home, names in modules.items() for name in NAMES if name in names}


def framework(name: str) -> types.ModuleType:
    """A module that imports torch's names as frameworks do."""
    module = types.ModuleType(name)
    source = "from torch.distributed.fsdp import fully_shard as shard, FSDPModule, MixedPrecisionPolicy"
    exec(source, module.__dict__)
    return module


def test_every_home_and_back() -> None:
    before = exported()
    assert sum(name == "fully_shard" for _, name in before) == 4
    with sw.replace_torch():
        inside = exported()
        assert inside.keys() == before.keys()
        assert all(value is getattr(sw, name) for (_, name), value in inside.items())
        with sw.replace_torch():
            assert exported() == inside
        assert exported() == inside
        assert framework("one").shard is sw.fully_shard
    assert exported() == before
    with pytest.raises(KeyError), sw.replace_torch():
        raise KeyError
    assert exported() == before


def test_modules_that_came_before_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    early, sharp = framework("early_framework"), types.ModuleType("sharp_eyed")
    exec("from torch.distributed.fsdp import FSDPModule", sharp.__dict__)
    monkeypatch.setitem(sys.modules, "early_framework", early)
    monkeypatch.setitem(sys.modules, "sharp_eyed", sharp)
    with pytest.warns(UserWarning, match=r"imported torch's fully_shard before .*early_framework") as caught:
        replaced = sw.replace_torch()
    with replaced:
        assert replaced.bound["early_framework"] == ["FSDPModule", "fully_shard"]
        assert replaced.bound["sharp_eyed"] == ["FSDPModule"]
        assert not any(name.startswith(("torch.", "shardwright")) for name in replaced.bound)
        assert "sharp_eyed" not in str(caught[0].message)
        monkeypatch.delitem(sys.modules, "early_framework")
        with warnings.catch_warnings(record=True) as others:  # of modules that other tests have loaded
            warnings.simplefilter("always")
            with sw.replace_torch() as again:
                assert "early_framework" not in again.bound
        assert "early_framework" not in "".join(str(each.message) for each in others)


@multirank(2)
def test_a_framework_that_comes_after_trains(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model, data = nn.Linear(4, 3), torch.full((2, 4), 1.0 + rank)
    expected = sum((1.0 + r) * 2 for r in range(world_size)) / world_size
    with sw.replace_torch():
        titan = framework("titan")
        titan.shard(model, mesh=world_mesh(world_size), mp_policy=titan.MixedPrecisionPolicy())
        assert isinstance(model, titan.FSDPModule)
    model(data).sum().backward()
    assert full(model.weight.grad).unique().tolist() == [expected]


@multirank(2)
def test_a_wrapper_of_torch_warns_once(rank: int, world_size: int) -> None:
    """As Accelerate does on the CPU, which takes DDP whatever its plugin says."""
    mesh = world_mesh(world_size)
    with sw.replace_torch(), sw.replace_torch():
        with pytest.warns(
            UserWarning, match=r"DistributedDataParallel wraps Linear.*fsdp_version=2"
        ) as caught:
            wrapped = nn.parallel.DistributedDataParallel(nn.Linear(4, 3))
        assert [each.filename for each in caught] == [__file__]
        assert sw.describe(wrapped).engine == "DDP"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            nn.parallel.DistributedDataParallel(nn.Linear(4, 3))
            nn.Sequential(nn.Linear(4, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nn.parallel.DistributedDataParallel(nn.Linear(4, 3))
    with sw.replace_torch(), pytest.warns(UserWarning, match="FullyShardedDataParallel wraps Linear"):
        FullyShardedDataParallel(
            nn.Linear(4, 3), process_group=mesh.get_group(), device_id=torch.device("cpu")
        )


@multirank(2)
def test_each_replacement_warns_unless_a_model_was_sharded_since(rank: int, world_size: int) -> None:
    with sw.replace_torch():  # the outer one, as of a program that calls it without a context
        for _ in range(2):
            with sw.replace_torch(), pytest.warns(UserWarning, match="DistributedDataParallel wraps Linear"):
                nn.parallel.DistributedDataParallel(nn.Linear(4, 3))
        for again in (False, True):
            with sw.replace_torch():
                model = sw.fully_shard(nn.Linear(4, 3), mesh=world_mesh(world_size))
                if again:
                    with sw.replace_torch(), pytest.warns(UserWarning, match="wraps Linear"):
                        nn.parallel.DistributedDataParallel(nn.Linear(4, 3))
                else:
                    with warnings.catch_warnings():
                        warnings.simplefilter("error")
                        nn.parallel.DistributedDataParallel(
                            nn.Linear(4, 3)
                        )  # a small model beside the sharded one
                assert isinstance(model, sw.FSDPModule)
