"""Checkpoints of torch's wrappers load here, and ours load there: FSDP2, FSDP1, DDP, plain and compiled models."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import shardwright as sw
from tests.checkpoint.kit.resharding import assert_equal, step_with_equal_gradients, whole
from tests.support import multirank, world_mesh


class Net(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(7, 6)
        self.up, self.down = nn.Linear(6, 5), nn.Linear(5, 6)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight
        self.few = nn.Parameter(torch.randn(2, 6))
        self.register_buffer("count", torch.tensor([float(seed), 2.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        return self.head(h + self.down(torch.tanh(self.up(h))) + self.few.sum(0))


KINDS = ["ours", "ours ragged", "ours ddp", "fsdp2", "fsdp1", "ddp", "compiled", "compiled ours"]


def made(kind: str, seed: int) -> tuple[Any, Any]:
    model: Any = Net(seed)
    mesh = world_mesh(dist.get_world_size())
    if kind == "fsdp2":
        for each in (model.up, model.down, model):
            fully_shard(each, mesh=mesh)
    elif kind == "fsdp1":
        model = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    elif kind == "ddp":
        model = DistributedDataParallel(model)
    elif "ours" in kind:
        for each in (model.up, model.down, model):
            strategy = "ddp" if "ddp" in kind else "zero3"
            sw.fully_shard(
                each, mesh=mesh, strategy=strategy, layout="ragged" if "ragged" in kind else "per_parameter"
            )
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.1)
    if "compiled" in kind:
        model = torch.compile(model, backend="eager")
    return model, sw.fully_shard_optimizer(optimizer) if "ours" in kind else optimizer


def step(model: Any, optimizer: Any, number: int) -> None:
    batch = torch.randint(
        0, 7, (3, 4), generator=torch.Generator().manual_seed(10 * number + dist.get_rank())
    )
    nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()


def full_state(model: Any, optimizer: Any) -> dict[str, Any]:
    """Whole tensors on the first rank; elsewhere nothing."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    values, moments = get_state_dict(model, optimizer, options=options)
    return {"model": dict(values), "optimizer": moments.get("state", {})}


@pytest.mark.extensive("each kind of torch's", but=("fsdp2-*", "*fsdp2*"))
@multirank(2)
@pytest.mark.parametrize("kind", KINDS)
def test_ours_load_into_every_kind_and_back(rank: int, world_size: int, kind: str, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of FSDP1 on the CPU and of its tensors
        model, optimizer = made("ours", 0)
        step(model, optimizer, 0)
        optimizer.param_groups[0]["lr"] = 0.03
        sw.save_checkpoint(tmp_path / "ours", model, optimizer)
        expected = full_state(model, optimizer)
        other, its = made(kind, 1)
        sw.load_checkpoint(tmp_path / "ours", other, its)
        assert its.param_groups[0]["lr"] == 0.03
        if kind != "fsdp1":  # whose full state torch cannot gather on the CPU
            assert_equal(full_state(other, its), expected)
        sw.save_checkpoint(tmp_path / "back", other, its)
        again, last = made("ours ragged", 2)
        step(again, last, 3)
        sw.load_checkpoint(tmp_path / "back", again, last)
        assert_equal(full_state(again, last), expected)


@multirank(2)
@pytest.mark.parametrize("flat", [False, True])
def test_folders_of_torch_load_into_every_layout(
    rank: int, world_size: int, flat: bool, tmp_path: Path
) -> None:
    model, optimizer = made("fsdp2", 0)
    step(model, optimizer, 0)
    optimizer.param_groups[0]["lr"] = 0.03
    expected = full_state(model, optimizer)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    values, moments = get_state_dict(model, optimizer, options=options)
    extra = {"t": torch.arange(3.0), "step": 7}
    dcp.save({"model": values, "optimizer": moments, "extra": extra}, checkpoint_id=str(tmp_path / "c"))
    for kind in ("ours", "ours ragged", "ours ddp"):
        for steps in (0, 1):
            other, its = made(kind, 1)
            for number in range(steps):
                step(other, its, 3 + number)
            result = sw.load_checkpoint(tmp_path / "c", other, its)
            assert its.param_groups[0]["lr"] == 0.03
            assert_equal(full_state(other, its), expected)
            assert_equal(result, extra)


@multirank(2)
def test_torch_reads_ours(rank: int, world_size: int, tmp_path: Path) -> None:
    """``dcp.load`` into FSDP2 and into plain tensors, and ``dcp_to_torch_save``; from a ragged layout."""
    model, optimizer = made("ours ragged", 0)
    step(model, optimizer, 0)
    optimizer.param_groups[0]["lr"] = 0.03
    sw.save_checkpoint(tmp_path / "c", model, optimizer, extra={"step": 3})
    expected, moments = whole(model, optimizer)["model"], whole(model, optimizer)["optimizer"]
    other, its = made("fsdp2", 1)
    values, state = get_state_dict(other, its)
    dcp.load({"model": values, "optimizer": state}, checkpoint_id=str(tmp_path / "c"))
    set_state_dict(other, its, model_state_dict=values, optim_state_dict=state)
    assert its.param_groups[0]["lr"] == 0.03
    assert_equal(whole(other, its), {"model": expected, "optimizer": moments})
    if rank == 0:
        plain = {"model": Net(1).state_dict()}
        dcp.load(plain, checkpoint_id=str(tmp_path / "c"), no_dist=True)
        assert_equal(plain["model"], expected)
        dcp_to_torch_save(str(tmp_path / "c"), str(tmp_path / "file"))
        read = torch.load(tmp_path / "file", weights_only=True)
        assert_equal(read["model"], expected)
        assert_equal(read["optimizer"]["state"], moments)
        assert read["optimizer"]["param_groups"][0]["lr"] == 0.03 and read["extra"] == {"step": 3}
    dist.barrier()


class Experts(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.outer = nn.Linear(5, 5)
        self.up, self.down = nn.Parameter(torch.randn(4, 5, 6)), nn.Parameter(torch.randn(4, 6, 5))


def with_experts(seed: int, ways: int, layout: str) -> tuple[Any, Any]:
    """Experts over ``ways`` ranks by expert parallelism, then over the ranks that have the same ones."""
    ranks = dist.get_world_size()
    model = Experts(seed)
    mesh = world_mesh(ranks // ways, ways, names=("edp", "ep"))
    experts = nn.Module()
    for name in ("up", "down"):
        value: Any = getattr(model, name).detach()
        delattr(model, name)
        if ways > 1:
            value = distribute_tensor(value, mesh["ep"], [Shard(0)])
        experts.register_parameter(name, nn.Parameter(value))
    model.experts = experts
    sw.fully_shard(experts, mesh=mesh["edp"] if ways > 1 else world_mesh(ranks), layout=layout)
    sw.fully_shard(model, mesh=world_mesh(ranks), layout=layout)
    return model, sw.fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))


@pytest.mark.extensive("each pair", but=("2-4-*",))
@multirank(4)
@pytest.mark.parametrize(("ways", "then"), [(1, 2), (2, 4), (4, 1), (2, 2)])
def test_experts_move_between_ranks(rank: int, world_size: int, ways: int, then: int, tmp_path: Path) -> None:
    model, optimizer = with_experts(0, ways, "per_parameter")
    step_with_equal_gradients(model, optimizer, 1)
    sw.save_checkpoint(tmp_path / "c", model, optimizer)
    other, its = with_experts(1, then, "ragged")
    sw.load_checkpoint(tmp_path / "c", other, its)
    assert_equal(whole(other, its), whole(model, optimizer))
    for each in ((model, optimizer), (other, its)):
        step_with_equal_gradients(*each, 2)
    assert_equal(whole(other, its), whole(model, optimizer))
