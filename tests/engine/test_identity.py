"""Sharded modules are what torch, its composable registry and other frameworks take for modules of FSDP2."""

from __future__ import annotations

import copy
import importlib
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as torchs
from torch.distributed._composable import replicate
from torch.distributed._composable.contract import _get_registry
from torch.distributed.device_mesh import DeviceMesh

import shardwright as sw
from tests.engine.kit.models import full
from tests.support import multirank, world_mesh


def plain(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


def sharded(mesh: DeviceMesh, **options: Any) -> nn.Sequential:
    model = plain()
    sw.fully_shard(model[0], mesh=mesh, **options)
    return sw.fully_shard(model, mesh=mesh, **options)


def inputs(rank: int) -> torch.Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(rank))


def expected_gradients(world_size: int) -> list[torch.Tensor]:
    """The gradients of the sum over the ranks."""
    model = plain()
    for rank in range(world_size):
        model(inputs(rank)).sum().backward()
    return [p.grad for p in model.parameters()]


@multirank(2)
def test_is_recognised(rank: int, world_size: int) -> None:
    composable = importlib.import_module("torch.distributed._composable.fsdp")
    table = importlib.import_module("torch.distributed.fsdp._fully_shard._fully_shard")
    for layout in ("per_parameter", "ragged"):
        model = sharded(world_mesh(world_size), layout=layout)
        copied = copy.deepcopy(model)
        for each in (model, copied):
            assert isinstance(each, torchs.FSDPModule) and isinstance(each, composable.FSDPModule)
            assert isinstance(each[0], torchs.FSDPModule) and not isinstance(each[2], torchs.FSDPModule)
            assert not isinstance(each[:2], torchs.FSDPModule)  # a container cut out is a plain one
            assert [type(m).__name__ for m in (each, each[0], each[2])] == [
                "FSDPSequential",
                "FSDPLinear",
                "Linear",
            ]
            assert "fully_shard" in (_get_registry(each) or {}) and not _get_registry(each[2])
            assert all(m._is_fsdp_managed_module for m in each.modules())
            for module in (each, each[0]):
                original = type(module).__mro__[2]  # where torch.compile looks for it
                assert original in (nn.Sequential, nn.Linear) and original in table.get_cls_to_fsdp_cls()
                state = torchs.fully_shard.state(module)
                assert state is sw.fully_shard.state(module) is module._get_fsdp_state()
        assert torchs.fully_shard.state(copied) is not torchs.fully_shard.state(model)
        assert torchs.fully_shard.state(model[2]) is None
    assert issubclass(sw.FSDPModule, torchs.FSDPModule)
    theirs = torchs.fully_shard(nn.Linear(2, 2), mesh=world_mesh(world_size))  # torch still makes its own
    assert not isinstance(theirs, sw.FSDPModule) and sw.fully_shard.state(theirs) is None
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(model)
    missing = [n for n in vars(torchs.FSDPModule) if not n.startswith("__") and n not in vars(sw.FSDPModule)]
    assert missing == ["_orig_cls_mro_index"]


@multirank(2)
def test_copies_of_parts_are_plain(rank: int, world_size: int) -> None:
    model = plain()
    sw.fully_shard([model[0], model[2]], mesh=world_mesh(world_size))
    assert torchs.fully_shard.state(model[0]) is torchs.fully_shard.state(model[2])
    part = copy.deepcopy(model[0])
    assert type(part) is nn.Linear and not _get_registry(part) and torchs.fully_shard.state(part) is None


@multirank(2)
def test_loops_over_torchs_class(rank: int, world_size: int) -> None:
    """The divide factor as torchtitan sets it, no communication as Lightning switches it off."""
    expected = expected_gradients(world_size)
    for layout in ("per_parameter", "ragged"):
        model = sharded(world_mesh(world_size), layout=layout)
        for module in model.modules():
            if isinstance(module, torchs.FSDPModule):
                module.set_gradient_divide_factor(1.0)
        model(inputs(rank)).sum().backward()
        for p, g in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(full(p.grad), g)
        model.zero_grad()
        for sync in (False, True):
            for module in model.modules():
                if isinstance(module, torchs.FSDPModule):
                    module.set_requires_gradient_sync(sync, recurse=False)
            model(inputs(rank)).sum().backward()
            assert all((p.grad is not None) == sync for p in model.parameters())
        for p, g in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(full(p.grad), 2 * g)


@multirank(2)
def test_replicate_leaves_sharded_modules_alone(rank: int, world_size: int) -> None:
    """torch's DDP on the rest of a model, and its replicate on FSDP2's engine."""
    fsdp2 = importlib.import_module("torch.distributed._composable.replicate_with_fsdp").replicate
    mesh = world_mesh(world_size)
    expected = [g / world_size for g in expected_gradients(world_size)]
    for around in (replicate, lambda m: fsdp2(m, mesh=mesh)):
        model = plain()
        sw.fully_shard(model[0], mesh=mesh)
        around(model)
        model(inputs(rank)).sum().backward()
        for p, g in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(full(p.grad), g)
    with pytest.raises(RuntimeError, match="already managed by `fully_shard`"):
        replicate(sharded(mesh))


@multirank(2)
def test_engines_do_not_mix(rank: int, world_size: int) -> None:
    mesh = world_mesh(world_size)
    model = plain()
    torchs.fully_shard(model[0], mesh=mesh)
    with pytest.raises(ValueError, match=r"'0' \(FSDPLinear\)\. torch's fully_shard was applied to it"):
        sw.fully_shard(model, mesh=mesh)
    torchs.fully_shard(model, mesh=mesh)
    with pytest.raises(ValueError, match="found 'itself' "):
        sw.fully_shard(model, mesh=mesh)
    model = plain()
    replicate(model[0])
    with pytest.raises(ValueError, match="torch's replicate was applied to it"):
        sw.fully_shard(model, mesh=mesh)
    sw.fully_shard(model, mesh=mesh, ignored_modules=[model[0]])
    model = plain()
    sw.fully_shard(model[0], mesh=mesh)
    with pytest.raises(ValueError, match="FSDPLinear inside that shardwright sharded"):
        torchs.fully_shard(model, mesh=mesh)
    with pytest.raises(AssertionError, match="only be applied to a module once"):
        torchs.fully_shard(sharded(mesh), mesh=mesh)


@multirank(2)
def test_torchs_functions_take_it(rank: int, world_size: int) -> None:
    mesh = world_mesh(world_size)
    reference = plain()
    model, other = sharded(mesh), sharded(mesh)
    torchs.share_comm_ctx([model, other])

    def head(x: torch.Tensor, fail: bool = False) -> torch.Tensor:
        if fail:
            raise KeyError("on purpose")
        return model[2](model[1](model[0](x)))

    model.head = head
    torchs.register_fsdp_forward_method(model, "head")
    for _ in range(2):
        out = model.head(inputs(rank))
        torch.testing.assert_close(out, reference(inputs(rank)))
        with pytest.raises(KeyError, match="on purpose"):
            model.head(inputs(rank), fail=True)  # and nothing of it is left
    out.sum().backward()
    model(inputs(rank)).sum().backward()
    for p, g in zip(model.parameters(), expected_gradients(world_size), strict=True):
        torch.testing.assert_close(full(p.grad), 2 * g / world_size)
    dist.barrier()


@multirank(2)
def test_the_state_has_what_torchs_callers_read(rank: int, world_size: int) -> None:
    """As ``torch.distributed.pipelining`` ends the backwards of a step."""
    model = sharded(world_mesh(world_size))
    state = torchs.fully_shard.state(model)
    assert state._is_root is None and state._state_ctx.all_states == []
    state._lazy_init()
    model.set_is_last_backward(False)
    assert state._is_root and not state._state_ctx.is_last_backward
    assert state._state_ctx.all_states == [state, torchs.fully_shard.state(model[0])]
    group = state._fsdp_param_group
    assert [p.sharded_param for p in group.fsdp_params] == list(model[2].parameters())
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(False)
    for _ in range(2):
        model(inputs(rank)).sum().backward()
    model.set_is_last_backward(True)
    model.set_reshard_after_backward(True)
    model.set_requires_gradient_sync(True)
    for each in state._state_ctx.all_states:
        for group in each._fsdp_param_groups:
            group.post_backward()
    state._root_post_backward_final_callback()
    for p, g in zip(model.parameters(), expected_gradients(world_size), strict=True):
        torch.testing.assert_close(full(p.grad), 2 * g / world_size)
    assert not any(u.weights.gathered for u in model._fsdp_units(recurse=True))
    for part in (state, group, state._state_ctx, group.fsdp_params[0]):
        with pytest.raises(AttributeError, match="but shardwright sharded this module"):
            part.post_forward_mesh_info = None  # type: ignore[attr-defined]
        with pytest.raises(AttributeError, match=r"torch's FSDP.* has 'nonsense'"):
            part.nonsense  # noqa: B018
