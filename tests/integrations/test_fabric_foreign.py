"""Folders by Lightning's strategies, and torch, which Fabric loads; its own, which others read."""

from __future__ import annotations

import importlib.util
import pickle
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

import shardwright as sw
from tests.integrations.kit import TIMEOUT
from tests.support import multirank, world_mesh
from tests.support.payloads import Payload, plant_beside, saved_with
from tests.train.kit.damage import DAMAGES, on_first_rank, restored

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lightning") is None, reason="needs the extra lightning"
)


def _stored(model: Any, optimizer: Any) -> dict[str, Any]:
    inner, stepping = model.module, optimizer.optimizer
    return {
        "model": get_model_state_dict(inner),
        "optimizer": get_optimizer_state_dict(inner, stepping),
    }


@multirank(2, timeout=TIMEOUT)
def test_folders_with_values_beside_them_go_on(rank: int, world_size: int, tmp_path: Path) -> None:
    """With ``meta.pt``, also behind links, as model hubs keep files."""
    from tests.integrations.fabrics import fabric_of, full, set_up, train
    from tests.integrations.foreign import write_folder

    fabric = fabric_of()
    model, optimizer = set_up(fabric)
    train(fabric, model, optimizer, range(2))
    folder = tmp_path / "before"
    write_folder(folder, _stored(model, optimizer), {"step": 2, "pair": (1, 2)})
    on_first_rank(lambda: shutil.copytree(folder, tmp_path / "pristine"))
    on_first_rank(lambda: DAMAGES["a link to the same"](folder / "__1_0.distcp", folder))
    again, its_optimizer = set_up(fabric_of(layout="ragged"), seed=9, rate=0.5)
    state = {"model": again, "optimizer": its_optimizer, "step": 0}
    assert fabric.load(folder, state) == {"pair": (1, 2)}
    assert state["step"] == 2
    losses = train(fabric, model, optimizer, range(2, 4))
    assert train(fabric, again, its_optimizer, range(2, 4)) == losses
    before = [full(p).clone() for p in again.parameters()]
    on_first_rank(lambda: restored(folder, tmp_path / "pristine"))
    for name in (".metadata", "__0_0.distcp", "meta.pt"):
        on_first_rank(lambda n=name: DAMAGES["emptied"](folder / n, folder))
        with pytest.raises(ValueError, match=name.replace(".", r"\.")):
            fabric.load(folder, state)
        on_first_rank(lambda: restored(folder, tmp_path / "pristine"))
    assert all(torch.equal(full(p), old) for p, old in zip(again.parameters(), before, strict=True))


@multirank(2, timeout=TIMEOUT)
def test_lightnings_model_parallel_strategy_and_ours_exchange(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    """Its folder loads here with model, optimizer and values. Ours is read by torch into its model and optimizer."""
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import ModelParallelStrategy
    from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict
    from torch.distributed.fsdp import fully_shard

    from tests.integrations.fabrics import as_under_torchrun, fabric_of, full

    def shard(module: nn.Module, mesh: Any) -> nn.Module:
        fully_shard(module, mesh=world_mesh(world_size))
        return module

    def build(fabric: Fabric, seed: int) -> tuple[Any, Any]:
        torch.manual_seed(seed)
        model = fabric.setup(nn.Sequential(nn.Linear(6, 11), nn.Tanh(), nn.Linear(11, 5)))
        return model, fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.1))

    def train(fabric: Fabric, model: Any, optimizer: Any) -> list[float]:
        losses = []
        for step in range(2):
            torch.manual_seed(10 * step + rank)
            loss = model(torch.randn(4, 6)).square().mean()
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    as_under_torchrun()
    strategy = ModelParallelStrategy(shard, data_parallel_size=world_size, tensor_parallel_size=1)
    theirs = Fabric(accelerator="cpu", devices=world_size, strategy=strategy)
    theirs.launch()
    its_model, its_optimizer = build(theirs, 0)
    train(theirs, its_model, its_optimizer)
    values = {"step": 7, "names": ("a", "b")}
    theirs.save(tmp_path / "theirs", {"model": its_model, "optimizer": its_optimizer, **values})

    fabric = fabric_of(auto_wrap_policy=None)
    model, optimizer = build(fabric, 1)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    assert fabric.load(tmp_path / "theirs", state) == {"names": ("a", "b")}
    assert state["step"] == 7
    for p, q in zip(model.parameters(), its_model.parameters(), strict=True):
        assert torch.equal(full(p), full(q))
        for key, value in its_optimizer.state[q].items():
            assert torch.equal(full(optimizer.state[p][key]), full(value)), key
    fabric.save(tmp_path / "ours", state)

    third, its_third = build(theirs, 2)
    read = _stored(third, its_third)
    dcp.load(read, checkpoint_id=tmp_path / "ours")
    third.load_state_dict(read["model"])
    set_optimizer_state_dict(third.module, its_third.optimizer, read["optimizer"])
    assert train(theirs, third, its_third) == train(fabric, model, optimizer)


@multirank(2, timeout=TIMEOUT)
def test_folders_of_fsdp_with_its_names(rank: int, world_size: int, tmp_path: Path) -> None:
    """As ``FSDPStrategy`` writes them, which runs on GPUs only: state dicts of torch's FSDP, and ``meta.pt``."""
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, StateDictType

    from tests.integrations.fabrics import fabric_of, full
    from tests.integrations.foreign import write_folder

    def build(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 11), nn.Tanh(), nn.Linear(11, 5))

    plain = build(0)
    wrapped = FullyShardedDataParallel(
        plain,
        device_id=torch.device("cpu"),
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        use_orig_params=True,
    )
    stepping = torch.optim.AdamW(wrapped.parameters(), lr=0.1)
    torch.manual_seed(rank)
    wrapped(torch.randn(4, 6)).square().mean().backward()
    stepping.step()
    with FullyShardedDataParallel.state_dict_type(wrapped, StateDictType.FULL_STATE_DICT):
        expected = {name: value.clone() for name, value in wrapped.state_dict().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with FullyShardedDataParallel.state_dict_type(wrapped, StateDictType.SHARDED_STATE_DICT):
            stored = {
                "model": wrapped.state_dict(),
                "optimizer": FullyShardedDataParallel.optim_state_dict(wrapped, stepping),
            }
            write_folder(tmp_path / "fsdp", stored, {"step": 3})
        moments = {
            name: {key: torch.empty(each.shape) for key in ("exp_avg", "exp_avg_sq")}
            for name, each in expected.items()
        }
        dcp.load({"optimizer": {"state": moments}}, checkpoint_id=tmp_path / "fsdp")

    fabric = fabric_of(auto_wrap_policy=None, layout="ragged")
    model = fabric.setup(build(1))
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.5))
    state = {"model": model, "optimizer": optimizer, "step": 0}
    fabric.load(tmp_path / "fsdp", state)
    assert state["step"] == 3 and optimizer.param_groups[0]["lr"] == 0.1
    for name, p in model.module.named_parameters():
        assert torch.equal(full(p), expected[name]), name
        for key, value in moments[name].items():
            assert torch.equal(full(optimizer.state[p][key]), value), (name, key)


@multirank(2, timeout=TIMEOUT)
def test_code_in_foreign_folders_does_not_run(rank: int, world_size: int, tmp_path: Path) -> None:
    """In metadata, in values of the model, in ``meta.pt``; and parameters stay as they were."""
    from tests.integrations.fabrics import fabric_of, full, set_up
    from tests.integrations.foreign import write_folder

    evidence, folder = tmp_path / "evidence", tmp_path / "theirs"
    fabric = fabric_of()
    model, optimizer = set_up(fabric)
    write_folder(folder, _stored(model, optimizer), {"step": 1})
    on_first_rank(lambda: shutil.copytree(folder, tmp_path / "pristine"))
    other, its_optimizer = set_up(fabric, seed=8)
    state = {"model": other, "optimizer": its_optimizer, "step": 0}
    before = [full(p).clone() for p in other.parameters()]
    planted = saved_with({"step": Payload(evidence)})
    called = r"names tests\.support\.payloads\._run, which .* it was not called"

    def refused(expected: str, **options: Any) -> None:
        with pytest.raises(ValueError, match=expected):
            fabric.load(folder, state, **options)
        assert not evidence.exists()
        assert all(torch.equal(full(p), old) for p, old in zip(other.parameters(), before, strict=True))

    on_first_rank(lambda: plant_beside(folder / ".metadata", evidence))
    refused(called, weights_only=False)
    on_first_rank(lambda: restored(folder, tmp_path / "pristine"))
    on_first_rank(lambda: (folder / "meta.pt").write_bytes(planted))
    refused(called)
    on_first_rank(lambda: restored(folder, tmp_path / "pristine"))
    size = (folder / "__1_0.distcp").stat().st_size
    on_first_rank(
        lambda: (folder / "__1_0.distcp").write_bytes(bytes(size))
    )  # sizes are all that can be compared
    with pytest.raises(ValueError, match=r"rank 1: |__1_0.distcp"):
        fabric.load(folder, state)
    model.module.seen = {"batches": Payload(evidence, 5), "last": torch.zeros(2)}
    on_first_rank(lambda: shutil.rmtree(folder))
    write_folder(folder, _stored(model, optimizer), {"step": 1})
    before = [full(p).clone() for p in other.parameters()]
    refused(rf"'model\._extra_state\.batches' {called}")
    # Who says that the folder is trusted has its values read so.
    fabric.load(folder, state, weights_only=False)
    assert evidence.exists() and other.module.seen["batches"] == 5


@multirank(2, timeout=TIMEOUT)
def test_folders_of_torch_itself_are_read(rank: int, world_size: int, tmp_path: Path) -> None:
    """Saved without us, read without pickle: parameters under their names, also with values that are no tensors."""
    from tests.integrations.fabrics import assert_same_model, fabric_of, plain_model, set_up

    fabric = fabric_of(layout="ragged")
    model, _ = set_up(fabric, seed=8)
    plain = plain_model(seed=5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(
            {"model": plain.state_dict(), "step": 4, "counts": torch.arange(3)},
            checkpoint_id=tmp_path / "torch",
        )
    state = {"model": model, "step": 0, "counts": None}
    assert fabric.load(tmp_path / "torch", state) == {}
    assert state["step"] == 4 and torch.equal(torch.as_tensor(state["counts"]), torch.arange(3))
    assert_same_model(model, plain)
    with pytest.raises(pickle.UnpicklingError):
        torch.load(tmp_path / "torch" / ".metadata", weights_only=True)


@multirank(2, timeout=TIMEOUT)
def test_save_checkpoint_and_fabric_read_each_other(rank: int, world_size: int, tmp_path: Path) -> None:
    """Fabric's folder by ``sw.load_checkpoint`` and by torch's converter, ``sw.save_checkpoint``'s by Fabric."""
    from tests.integrations.fabrics import (
        Model,
        assert_same_model,
        fabric_of,
        full,
        plain_model,
        set_up,
        train,
    )

    fabric = fabric_of()
    model, optimizer = set_up(fabric)
    train(fabric, model, optimizer, range(2))
    fabric.save(tmp_path / "fabric", {"model": model, "optimizer": optimizer, "step": 2})
    plain: Model = sw.fully_shard(plain_model(seed=8), layout="ragged")
    stepping = torch.optim.AdamW(plain.parameters())
    sw.load_checkpoint(tmp_path / "fabric", plain, stepping)
    sw.save_checkpoint(tmp_path / "ours", plain, stepping, extra={"step": 3})
    again, its_optimizer = set_up(fabric, seed=9)
    assert fabric.load(tmp_path / "ours", {"model": again, "optimizer": its_optimizer}) == {
        "extra": {"step": 3}
    }
    for p, q in zip(again.parameters(), model.parameters(), strict=True):
        assert torch.equal(full(p), full(q))
        for key, value in optimizer.state[q].items():
            assert torch.equal(full(its_optimizer.state[p][key]), full(value)), key
    on_first_rank(lambda: dcp_to_torch_save(tmp_path / "fabric", tmp_path / "file"))
    single = plain_model(seed=1)
    stored = torch.load(tmp_path / "file")
    single.load_state_dict(stored["model"])
    assert_same_model(model, single)
    assert stored["step"] == 2 and stored["optimizer"]["param_groups"][0]["lr"] == 0.01
    dist.barrier()


@multirank(2, timeout=TIMEOUT)
def test_names_that_a_folder_cannot_hold(rank: int, world_size: int, tmp_path: Path) -> None:
    from tests.integrations.fabrics import fabric_of, set_up

    fabric = fabric_of()
    model, _ = set_up(fabric)
    for state, problem in (
        ({"pairs": {(1, 2): torch.ones(1)}}, r"pairs has the key \(1, 2\).*Make it a string"),
        ({5: 1}, r"has the key 5; .* strings"),
        ({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, r"two entries .* 'a\.b'"),
    ):
        with pytest.raises(ValueError, match=problem):
            fabric.save(tmp_path / "c", {"model": model, **state})
    dist.barrier()
    assert not any(tmp_path.iterdir())
