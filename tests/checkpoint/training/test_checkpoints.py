"""``save_checkpoint`` and ``load_checkpoint``: what a checkpoint can hold, errors, and that training goes on."""

from __future__ import annotations

import math
import random
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import shardwright as sw
from shardwright.checkpoint import INDEX, Damaged, UnknownVersion, save_state
from shardwright.checkpoint.load.checkpoints import OwnCheckpoint, checkpoint_at
from shardwright.engine import RankGroup
from tests.checkpoint.kit.states import bits, load_state
from tests.support.pool import multirank, world_mesh


@pytest.mark.parametrize(
    "value", [object(), {1}, lambda: None, nn.Linear(1, 1), 1j], ids=lambda v: type(v).__name__
)
def test_other_values_are_refused_with_their_name(value: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^extra\.x\.y\[1\] is a .*(plain values|directly in extra)"):
        sw.save_checkpoint(tmp_path / "c", nn.Linear(2, 2), extra={"x": {"y": [0, value]}})
    assert not list(tmp_path.iterdir())


# -- one process -------------------------------------------------------------------------------------------------------


def trained(seed: int, steps: int) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Dropout(0.5), nn.Linear(7, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], 0.5)
    train(model, optimizer, schedule, steps)
    return model, optimizer, schedule


def train(model: nn.Module, optimizer: torch.optim.Optimizer, schedule: Any, steps: int) -> None:
    for _ in range(steps):
        model(torch.randn(4, 5) + random.random()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


@pytest.mark.parametrize("before", [0, 1, 3])
def test_training_goes_on_bit_for_bit(tmp_path: Path, before: int) -> None:
    model, optimizer, schedule = trained(0, before)
    sw.save_checkpoint(tmp_path / "c", model, optimizer, extra={"schedule": schedule, "step": before})
    train(model, optimizer, schedule, 3)
    other, its_optimizer, its_schedule = trained(1, 2)
    extra = sw.load_checkpoint(tmp_path / "c", other, its_optimizer, extra={"schedule": its_schedule})
    assert extra["step"] == before and type(its_schedule.milestones) is Counter
    train(other, its_optimizer, its_schedule, 3)
    for name, value in model.state_dict().items():
        assert bits(value) == bits(other.state_dict()[name]), name
    assert its_schedule.get_last_lr() == schedule.get_last_lr()


def test_a_checkpoint_is_replaced_only_if_asked(tmp_path: Path) -> None:
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    sw.save_checkpoint(tmp_path / "c", one)
    with pytest.raises(FileExistsError, match="overwrite=True"):
        sw.save_checkpoint(tmp_path / "c", two)
    sw.save_checkpoint(tmp_path / "c", two, overwrite=True)
    sw.load_checkpoint(tmp_path / "c", one)
    assert torch.equal(one.weight, two.weight)
    assert [each.name for each in tmp_path.iterdir()] == ["c"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").touch()
    with pytest.raises(FileExistsError, match="no checkpoint"):
        sw.save_checkpoint(tmp_path / "mine", two, overwrite=True)


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        (
            nn.Linear(2, 3),
            r"expected weight of shape \[3, 2\], found \[2, 2\]; this is a checkpoint of another model",
        ),
        (nn.Linear(2, 2).double(), r"model\.weight has dtype torch\.float32, expected torch\.float64"),
        (nn.Linear(2, 2, bias=False), r"expected no tensor bias, found one of shape \[2\]"),
        (nn.Bilinear(2, 2, 2), r"expected weight of shape \[2, 2, 2\], found \[2, 2\]"),
        (nn.Sequential(nn.Linear(2, 2)), r"expected 0\.weight of shape \[2, 2\], found no such tensor"),
    ],
    ids=["shape", "dtype", "more", "dims", "names"],
)
def test_another_model_is_refused_and_stays_as_it_is(tmp_path: Path, model: nn.Module, problem: str) -> None:
    sw.save_checkpoint(tmp_path / "c", nn.Linear(2, 2))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=problem):
        sw.load_checkpoint(tmp_path / "c", model)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("file", ["__0_0.distcp", "__values.distcp", ".metadata"])
@pytest.mark.parametrize("damage", ["bit", "short", "missing", "link"])
def test_damage_is_noticed_before_anything_changes(tmp_path: Path, file: str, damage: str) -> None:
    sw.save_checkpoint(tmp_path / "c", nn.Linear(20, 20), extra={"step": 1})
    path = tmp_path / "c" / file
    content = bytearray(path.read_bytes())
    path.unlink()
    if damage == "bit":
        content[len(content) // 2] ^= 16
        path.write_bytes(content)
    elif damage == "short":
        path.write_bytes(content[:-1])
    elif damage == "link":
        (tmp_path / "elsewhere").write_bytes(content)
        path.symlink_to(tmp_path / "elsewhere")
    model = nn.Linear(20, 20)
    before = model.weight.detach().clone()
    with pytest.raises(Damaged, match=file.replace(".", r"\.")):
        sw.load_checkpoint(tmp_path / "c", model)
    assert torch.equal(model.weight, before)


def test_a_later_version_is_one_error(tmp_path: Path) -> None:
    import hashlib

    sw.save_checkpoint(tmp_path / "c", nn.Linear(2, 2))
    path = tmp_path / "c" / INDEX
    body = path.read_bytes().rpartition(b'"sha256": "')[0].replace(b'"version": 1', b'"version": 2')
    path.write_bytes(body + b'"sha256": "' + hashlib.sha256(body).hexdigest().encode() + b'"}\n')
    with pytest.raises(UnknownVersion, match=r"version 2.*newer shardwright"):  # not Damaged: it may be whole
        sw.load_checkpoint(tmp_path / "c", nn.Linear(2, 2))


def test_states_that_cannot_be_stored_name_their_tensor(tmp_path: Path) -> None:
    for tensor, problem in (
        (torch.empty(2, device="meta"), "a.b is on the meta device"),
        (torch.eye(2).to_sparse(), "a.b is sparse"),
    ):
        with pytest.raises(ValueError, match=problem):
            save_state(tmp_path / "c", {"a": {"b": tensor}})
    with pytest.raises(ValueError, match=r"two entries of the state have the name 'a\.b'"):
        save_state(tmp_path / "c", {"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)})


def test_a_large_tensor_is_stored_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwright.checkpoint.format.nested.CHUNK_BYTES", 100)
    state = {"wide": torch.randn(1, 3, 40), "tall": torch.randn(90, 2), "view": torch.randn(8, 9).t()}
    save_state(tmp_path / "c", state)
    opened = checkpoint_at(tmp_path / "c")
    assert isinstance(opened, OwnCheckpoint)
    index = opened.index
    assert all(math.prod(chunk.sizes) * 4 <= 100 for each in index.tensors.values() for chunk in each.chunks)
    read = {name: torch.zeros(each.shape) for name, each in state.items()}
    load_state(tmp_path / "c", read, RankGroup())
    assert all(torch.equal(read[name], state[name]) for name in state)


# -- several ranks -----------------------------------------------------------------------------------------------------


def sharded(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
    for layer in (model[0], model[2], model):
        sw.fully_shard(layer, mesh=world_mesh(dist.get_world_size()))
    return model, sw.fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(4, 5)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def whole(model: nn.Module) -> dict[str, Any]:
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


@multirank(1, 2, 3)
def test_ranks_go_on_with_their_generators(rank: int, world_size: int, tmp_path: Path) -> None:
    torch.manual_seed(rank)
    model, optimizer = sharded(0)
    torch.manual_seed(10 + rank)
    step(model, optimizer)
    sw.save_checkpoint(tmp_path / "c", model, optimizer)
    step(model, optimizer)
    other, its = sharded(1)
    sw.load_checkpoint(tmp_path / "c", other, its)
    step(other, its)
    mine, theirs = whole(model), whole(other)
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@multirank(2)
def test_another_number_of_ranks_gets_seeds_of_its_own(rank: int, world_size: int, tmp_path: Path) -> None:
    model, optimizer = sharded(0)
    step(model, optimizer)
    sw.save_checkpoint(tmp_path / "c", model, optimizer)
    expected = whole(model)
    plain = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
    group = [dist.new_group([r]) for r in range(world_size)][rank]
    draws = []
    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            sw.load_checkpoint(tmp_path / "c", plain, process_group=group)
        assert [str(each.message)[:44] for each in caught] == ["The checkpoint was saved by 2 ranks and is l"]
        assert caught[0].filename == __file__
        draws.append((torch.rand(1).item(), random.random()))
    assert draws[0] == draws[1]
    assert all(torch.equal(expected[name], value) for name, value in plain.state_dict().items())


@multirank(2)
def test_ranks_raise_the_same_error(rank: int, world_size: int, tmp_path: Path) -> None:
    model, _ = sharded(0)
    with pytest.raises(ValueError, match=r"^rank 1: extra.x is a builtins.object"):
        sw.save_checkpoint(tmp_path / "c", model, extra={"x": object() if rank else 0})
    with pytest.raises(
        ValueError, match=r"t has dtype torch.float32 and shape \(3,\) on rank 1, and .* \(2,\)"
    ):
        save_state(tmp_path / "c", {"t": torch.ones(2 + rank)})
    with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
        sw.load_checkpoint(tmp_path / "none", model)
    assert not (tmp_path / "c").exists()
    dist.barrier()


@multirank(2)
def test_fsdp2_reads_and_writes(rank: int, world_size: int, tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict import set_state_dict
    from torch.distributed.fsdp import fully_shard

    def theirs(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
        fully_shard(model, mesh=world_mesh(world_size))
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    model, optimizer = sharded(0)
    step(model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.03
    sw.save_checkpoint(tmp_path / "ours", model, optimizer)
    other, its = theirs(1)
    values, moments = get_state_dict(other, its)
    state = {"model": values, "optimizer": moments}
    dcp.load(state, checkpoint_id=str(tmp_path / "ours"))
    set_state_dict(other, its, model_state_dict=values, optim_state_dict=moments)
    assert its.param_groups[0]["lr"] == 0.03
    values, moments = get_state_dict(other, its)
    dcp.save({"model": values, "optimizer": moments}, checkpoint_id=str(tmp_path / "theirs"))
    again, ours = sharded(2)
    sw.load_checkpoint(tmp_path / "theirs", again, ours)
    assert ours.param_groups[0]["lr"] == 0.03
    torch.manual_seed(5 + rank)
    step(model, optimizer)
    torch.manual_seed(5 + rank)
    step(again, ours)
    mine, read = whole(model), whole(again)
    assert all(torch.equal(mine[name], read[name]) for name in mine)
