"""Fabric's checkpoints, full and sharded: resumed training, other numbers of ranks, values, refusals."""

from __future__ import annotations

import importlib.util
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwright as sw
from tests.integrations.kit import TIMEOUT, refused
from tests.support import WorkerPools, multirank
from tests.train.kit.damage import on_first_rank

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lightning") is None, reason="needs the extra lightning"
)


def _others() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    return {"step": 2, "generator": generator.get_state(), "names": ["a", "b"]}


@multirank(2, timeout=TIMEOUT)
@pytest.mark.parametrize(("kind", "layout"), [("sharded", "per_parameter"), ("full", "ragged")])
def test_resumed_training_goes_on_bit_by_bit(
    rank: int, world_size: int, kind: str, layout: str, tmp_path: Path
) -> None:
    """Model, optimizer, scheduler and values come back, in place of an earlier checkpoint, into a model of other
    values and another layout."""
    from tests.integrations.fabrics import fabric_of, full, set_up, train

    path = tmp_path / "deep" / "checkpoint"
    fabric = fabric_of(state_dict_type=kind, layout=layout, strategy="zero1" if kind == "full" else None)
    model, optimizer = set_up(fabric)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, **_others()}
    fabric.save(path, state)  # before the first step: an optimizer without state
    train(fabric, model, optimizer, range(2))
    scheduler.step()
    model.module.seen = {"batches": 2, "last": torch.ones(2)}
    fabric.save(path, state)
    assert path.is_dir() == (kind == "sharded")
    assert [each.name for each in path.parent.iterdir()] == ["checkpoint"]
    losses = train(fabric, model, optimizer, range(2, 4))

    other = fabric_of(layout="ragged" if layout == "per_parameter" else "per_parameter")
    again, its_optimizer = set_up(other, seed=99, rate=0.5)
    its_scheduler = torch.optim.lr_scheduler.StepLR(its_optimizer, 1, gamma=0.5)
    new: dict[str, Any] = {"model": again, "optimizer": its_optimizer, "scheduler": its_scheduler, "step": 0}
    rest = other.load(path, new)
    assert new["step"] == 2 and set(rest) == {"generator", "names"}
    assert rest["names"] == ["a", "b"] and torch.equal(rest["generator"], _others()["generator"])
    assert its_scheduler.get_last_lr() == [0.005]
    assert again.module.seen["batches"] == 2 and again.module.seen["last"].tolist() == [1, 1]
    assert train(other, again, its_optimizer, range(2, 4)) == losses
    for p, q in zip(again.parameters(), model.parameters(), strict=True):
        assert torch.equal(full(p), full(q))
        for key, value in optimizer.state[q].items():
            assert torch.equal(full(its_optimizer.state[p][key]), full(value)), key


@multirank(2, timeout=TIMEOUT)
def test_an_optimizer_that_never_stepped_has_no_state_afterwards(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    from tests.integrations.fabrics import fabric_of, set_up

    for kind in ("sharded", "full"):
        fabric = fabric_of(state_dict_type=kind)
        model, optimizer = set_up(fabric)
        fabric.save(tmp_path / kind, {"model": model, "optimizer": optimizer})
        again, its_optimizer = set_up(fabric, rate=0.5)
        fabric.load(tmp_path / kind, {"model": again, "optimizer": its_optimizer})
        assert not its_optimizer.state and its_optimizer.param_groups[0]["lr"] == 0.01


@multirank(2, timeout=TIMEOUT)
def test_optimizer_state_goes_by_names(rank: int, world_size: int, tmp_path: Path) -> None:
    """In a sharded checkpoint: an optimizer that has its parameters in another order gets each its own."""
    from tests.integrations.fabrics import Block, fabric_of, full, train

    fabric = fabric_of(auto_wrap_policy=None)

    def start(reverse: bool) -> tuple[Any, Any]:
        fabric.seed_everything(0, verbose=False)
        model = nn.Sequential(nn.Linear(6, 12), Block(), Block(), nn.Linear(12, 5))
        parameters = list(model.parameters())
        return fabric.setup(model, torch.optim.AdamW(parameters[::-1] if reverse else parameters))  # type: ignore[no-any-return]

    model, optimizer = start(reverse=False)
    train(fabric, model, optimizer, range(2))
    fabric.save(tmp_path / "checkpoint", {"model": model, "optimizer": optimizer})
    other, its_optimizer = start(reverse=True)
    fabric.load(tmp_path / "checkpoint", {"model": other, "optimizer": its_optimizer})
    for p, q in zip(other.parameters(), model.parameters(), strict=True):
        for key, value in optimizer.state[q].items():
            assert torch.equal(full(its_optimizer.state[p][key]), full(value)), key


@multirank(2, timeout=TIMEOUT)
def test_full_checkpoints_are_those_of_one_device(rank: int, world_size: int, tmp_path: Path) -> None:
    """An unsharded run goes on from ours, and we from its file; torch consolidates the sharded one to the same."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    from tests.integrations.fabrics import (
        assert_same_model,
        fabric_of,
        full,
        plain_gradients,
        plain_model,
        set_up,
        train,
    )

    full_file, folder = tmp_path / "full.ckpt", tmp_path / "sharded"
    fabric = fabric_of(state_dict_type="full", layout="ragged")
    model, optimizer = set_up(fabric)
    train(fabric, model, optimizer, range(2))
    state = {"model": model, "optimizer": optimizer, "step": 2}
    fabric.save(full_file, state)
    fabric_of().save(folder, state)
    only_stem = {"model": lambda name, _: name.startswith("stem")}
    replicas = fabric_of(state_dict_type="full", strategy="ddp")
    replicas.save(tmp_path / "filtered", {"model": set_up(replicas)[0]}, filter=only_stem)
    filtered = torch.load(tmp_path / "filtered")["model"]
    assert list(filtered) == ["stem.weight", "stem.bias"]
    assert (tmp_path / "filtered").stat().st_size < full_file.stat().st_size / 3
    fabric_of().save(tmp_path / "stem", {"model": model}, filter=only_stem)
    fresh, _ = set_up(fabric, seed=20)
    with refused(RuntimeError, "missing", "blocks.0.up.weight"):
        fabric.load(tmp_path / "stem", {"model": fresh})
    fabric.load(tmp_path / "stem", {"model": fresh}, strict=False)
    same = [
        torch.equal(full(p), full(q)) for p, q in zip(fresh.parameters(), model.parameters(), strict=True)
    ]
    assert sum(same) == 2

    stored = torch.load(full_file)
    plain = plain_model(seed=1)
    its_optimizer = torch.optim.AdamW(plain.parameters())
    plain.load_state_dict(stored["model"])
    its_optimizer.load_state_dict(stored["optimizer"])
    assert_same_model(model, plain)
    if rank == 0:
        dcp_to_torch_save(folder, tmp_path / "consolidated")
        consolidated = torch.load(tmp_path / "consolidated")
        expected = {n: v for n, v in stored["model"].items() if isinstance(v, torch.Tensor)}
        assert all(torch.equal(consolidated["model"][name], value) for name, value in expected.items())

    train(fabric, model, optimizer, range(2, 4))
    for step in range(2, 4):
        plain_gradients(plain, range(step, step + 1))
        its_optimizer.step()
        its_optimizer.zero_grad()
    assert_same_model(model, plain)

    file = tmp_path / f"plain{rank}.ckpt"
    torch.save({"model": plain.state_dict(), "optimizer": its_optimizer.state_dict(), "step": 4}, file)
    torch.save(plain.state_dict(), tmp_path / f"weights{rank}.ckpt")
    again, optimizer_again = set_up(fabric_of(), seed=50, rate=0.7)
    new = {"model": again, "optimizer": optimizer_again, "step": 0}
    fabric.load(tmp_path / "plain0.ckpt", new)
    assert new["step"] == 4
    train(fabric, again, optimizer_again, range(4, 5))
    plain_gradients(plain, range(4, 5))
    its_optimizer.step()
    assert_same_model(again, plain)

    fabric.load_raw(tmp_path / "weights0.ckpt", again)
    expected = _loaded(plain_model(seed=9), tmp_path / "weights0.ckpt")
    assert_same_model(again, expected)
    if rank == 0:
        sw.save_pretrained(expected, tmp_path / "folder")
    dist.barrier()
    for path in (tmp_path / "weights0.ckpt", tmp_path / "folder"):
        for empty in (True, False):
            with fabric.init_module(empty_init=empty):
                early = plain_model(seed=9)
            fabric.load_raw(path, early)
            assert_same_model(fabric.setup(early), expected)
    with torch.device("meta"):
        early = plain_model(seed=9)
    with refused(TypeError, "meta device", "fabric.setup"):
        fabric.load_raw(path, early)


def _loaded(model: nn.Module, path: Path) -> nn.Module:
    model.load_state_dict(torch.load(path))
    return model


@pytest.mark.extensive("each number of ranks")
def test_sharded_checkpoints_load_at_another_number_of_ranks(
    worker_pools: WorkerPools, tmp_path: Path
) -> None:
    """Also with state that one rank has whole: of an optimizer that needs matrices whole, and by other owners."""
    worker_pools.run(_save_muon, 2, timeout=TIMEOUT, folder=tmp_path)
    worker_pools.run(_load_muon, 3, timeout=TIMEOUT, folder=tmp_path)


def _with_muon(**options: Any) -> tuple[Any, Any, Any]:
    import shardwright as sw
    from tests.integrations.fabrics import Model, fabric_of

    fabric = fabric_of(**options)
    fabric.seed_everything(4, verbose=False)
    model = Model()
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    groups = [{"params": matrices, "muon": True}, {"params": others, "muon": False}]
    return (fabric, *fabric.setup(model, sw.Muon(groups, lr=0.01)))


def _save_muon(rank: int, world_size: int, folder: Path) -> None:
    from tests.integrations.fabrics import train

    fabric, model, optimizer = _with_muon()
    train(fabric, model, optimizer, range(2))
    fabric.save(folder / "sharded", {"model": model, "optimizer": optimizer})
    fabric, same, its_optimizer = _with_muon(state_dict_type="full")
    train(fabric, same, its_optimizer, range(2))
    fabric.save(folder / "full", {"model": same, "optimizer": its_optimizer})


def _load_muon(rank: int, world_size: int, folder: Path) -> None:
    from tests.integrations.fabrics import assert_same_model, full, plain_model

    stored = torch.load(folder / "full")
    assert len(stored["optimizer"]["state"]) == 13
    for name in ("sharded", "full"):
        fabric, model, optimizer = _with_muon(layout="ragged")
        fabric.load(folder / name, {"model": model, "optimizer": optimizer})
        plain = plain_model()
        plain.load_state_dict(stored["model"])
        assert_same_model(model, plain)
        optimizer.step()  # no gradients: nothing changes, and state is where the next step needs it
        assert_same_model(model, plain)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for number, values in stored["optimizer"]["state"].items():
            for key, value in values.items():
                assert torch.equal(full(optimizer.state[parameters[number]][key]), value), (name, key)


class Average:
    """An exponential average of a model's parameters, sharded as they are."""

    def __init__(self, model: Any) -> None:
        self.values = {
            name: p.detach().clone() for name, p in model.state_dict().items() if name != "_extra_state"
        }

    def state_dict(self) -> dict[str, Any]:
        return {"decay": 0.5, "values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for mine, stored in zip(self.values.values(), state["values"].values(), strict=True):
            mine.copy_(stored)


def _beside(rank: int) -> dict[str, Any]:
    return {
        "step": 2 + 10 * rank,
        "noise": torch.full((3,), float(rank)),
        "counts": Counter({3: 1, 1: 2}),
        "mixed": {
            "z": torch.ones(1),
            "a": torch.zeros(2),
            7: torch.arange(2),
            "inner": [torch.ones(1), (1, 2)],
        },
        "limits": (float("inf"), None, torch.bfloat16),
        "nothing": {},
    }


def _save_values(rank: int, world_size: int, folder: Path) -> None:
    from tests.integrations.fabrics import fabric_of, full, set_up, train

    fabric = fabric_of(layout="ragged")
    model, optimizer = set_up(fabric)
    train(fabric, model, optimizer, range(1))
    average = Average(model)
    train(fabric, model, optimizer, range(1, 2))
    fabric.save(folder / "c", {"model": model, "optimizer": optimizer, "average": average, **_beside(rank)})
    expected = {name: full(value) for name, value in average.values.items()}
    on_first_rank(lambda: torch.save(expected, folder / "expected"))


def _load_values(rank: int, world_size: int, folder: Path) -> None:
    from tests.integrations.fabrics import fabric_of, full, set_up

    fabric = fabric_of()
    model, optimizer = set_up(fabric, seed=7)
    average = Average(model)
    rest = fabric.load(folder / "c", {"model": model, "average": average, "step": 0})
    expected = torch.load(folder / "expected")
    for name, value in average.values.items():
        assert torch.equal(full(value), expected[name]), name
    first = _beside(0)
    assert rest.keys() == first.keys() - {"step"}
    assert torch.equal(rest["noise"], first["noise"])  # the first rank's
    for key in ("counts", "limits", "nothing"):
        assert rest[key] == first[key] and type(rest[key]) is type(first[key]), key
    mixed = rest["mixed"]
    assert [key for key in mixed if key != "inner"] == ["z", "a", 7]  # in their order
    assert mixed["inner"][1] == (1, 2) and torch.equal(mixed[7], torch.arange(2))
    # What is not asked for is returned whole.
    rest = fabric.load(folder / "c", {"model": model, "optimizer": optimizer})
    assert rest["average"]["decay"] == 0.5 and rest["step"] == 2
    assert all(torch.equal(value, expected[name]) for name, value in rest["average"]["values"].items())


def test_values_return_at_other_numbers_of_ranks(worker_pools: WorkerPools, tmp_path: Path) -> None:
    worker_pools.run(_save_values, 2, timeout=TIMEOUT, folder=tmp_path)
    worker_pools.run(_load_values, 3, timeout=TIMEOUT, folder=tmp_path)


@multirank(2, timeout=TIMEOUT)
def test_checkpoints_that_do_not_fit_are_refused(rank: int, world_size: int, tmp_path: Path) -> None:
    from tests.integrations.fabrics import Model, fabric_of, full, set_up

    paths = {}
    for kind in ("sharded", "full"):
        fabric = fabric_of(state_dict_type=kind)
        model, optimizer = set_up(fabric)
        paths[kind] = tmp_path / kind
        fabric.save(paths[kind], {"model": model, "optimizer": optimizer, "step": 2})
    fabric.barrier()

    torch.manual_seed(0)
    odd = nn.Sequential(nn.Linear(3, 3))
    odd = fabric_of(auto_wrap_policy=None).setup(odd)
    wrong = Model()
    wrong.stem = nn.Linear(7, 12)
    sized = fabric_of().setup(wrong)
    before = [full(p).clone() for p in odd.parameters()]
    for path in paths.values():
        with refused(RuntimeError, "0.weight", "blocks.0.up.weight"):
            fabric.load(path, {"model": odd})
        with refused(RuntimeError, "stem.weight", "6", "7"):
            fabric.load(path, {"model": sized}, strict=False)
        with refused(KeyError, "'epoch'", "strict=False", "'step'"):
            fabric.load(path, {"model": model, "epoch": 0})
        state = {"model": model, "epoch": 7}
        assert fabric.load(path, state, strict=False)["step"] == 2 and state["epoch"] == 7
        fabric.load(path, {"model": odd}, strict=False)
        few = torch.optim.AdamW(list(model.module.parameters())[:2])
        with refused(ValueError, "optimizer", "groups of [2]"):
            fabric.load(path, {"model": model, "optimizer": fabric.setup_optimizers(few)})
        with refused(ValueError, "no model"):
            fabric.load(path, {"step": 0})
        with refused(ValueError, "no model in the state has"):
            fabric.load(path, {"model": odd, "optimizer": optimizer})
        with refused(ValueError, "state['step'] is", "on rank 1", "same keys"):
            fabric.load(path, {"model": odd} if rank else {"model": odd, "step": 0})
    assert all(torch.equal(full(p), old) for p, old in zip(odd.parameters(), before, strict=True))

    with refused(FileNotFoundError, "nothing"):
        fabric.load(tmp_path / "nothing", {"model": model})
    (tmp_path / "empty").mkdir(exist_ok=True)
    with refused(ValueError, "empty", "no checkpoint"):
        fabric.load(tmp_path / "empty", {"model": model})
    (tmp_path / f"text{rank}").write_text("not a checkpoint")
    with refused(ValueError, "text", "torch.save"):
        fabric.load(tmp_path / "text0", {"model": model})
    with refused(ValueError, "remote"):
        fabric.load("s3://bucket/checkpoint", {"model": model})
    with refused(ValueError, "sharded checkpoint", "fabric.load("):
        fabric.load_raw(paths["sharded"], model)
    with refused(ValueError, "sharded checkpoint", "state={"):
        fabric.load(paths["sharded"])
    assert fabric.load(paths["full"])["step"] == 2
    with refused(NotImplementedError, "'optimizer': optimizer"):
        fabric.load_raw(paths["full"], optimizer)
    with refused(TypeError, "Linear", "not sharded", "fabric.setup"):
        fabric.save(tmp_path / "x", {"model": model, "teacher": nn.Linear(2, 2)})
