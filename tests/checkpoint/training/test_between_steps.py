"""When a checkpoint is saved and loaded: ranks that differ, failures of one rank, models that are not ready."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwright as sw
from tests.checkpoint.kit.resharding import assert_equal, whole
from tests.support import multirank, world_mesh


def net(seed: int, width: int = 5) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 3))


def shard(model: nn.Module, **options: Any) -> Any:
    options.setdefault("mesh", world_mesh(dist.get_world_size()))
    sw.fully_shard(model[0], **options)  # type: ignore[index]
    return sw.fully_shard(model, **options)


def made(seed: int, width: int = 5, **options: Any) -> tuple[Any, Any]:
    model = shard(net(seed, width), **options)
    return model, sw.fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))


def step(model: Any, optimizer: Any, number: int = 0) -> None:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


class Fails:
    """An object whose state cannot be had on one rank."""

    def __init__(self, rank: int) -> None:
        self.fails = rank == 1

    def state_dict(self) -> dict[str, Any]:
        if self.fails:
            raise KeyError("on purpose")
        return {"x": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.fails:
            raise KeyError("on purpose")


@multirank(2)
def test_ranks_that_differ_get_one_error(rank: int, world_size: int, tmp_path: Path) -> None:
    model, optimizer = made(0)
    step(model, optimizer)
    path = tmp_path / "c"
    odd = rank == 1
    with pytest.raises(ValueError, match=r"optimizer: rank 1 has passed \[\], and rank 0 \['ShardedAdamW'\]"):
        sw.save_checkpoint(path, model, None if odd else optimizer)
    with pytest.raises(ValueError, match=r"extra: rank 1 has passed \['b'\], and rank 0 \['a'\]"):
        sw.save_checkpoint(path, model, extra={"b" if odd else "a": 1})
    with pytest.raises(ValueError, match="generators: rank 1 has passed False"):
        sw.save_checkpoint(path, model, generators=not odd)
    with pytest.raises(
        ValueError, match=r"rank 1: extra\['x'\]: the state_dict of this Fails has failed.*on purpose"
    ):
        sw.save_checkpoint(path, model, extra={"x": Fails(rank)})
    with pytest.raises(ValueError, match=r"model\.0\.weight has .* on rank 1"):
        sw.save_checkpoint(path, net(0, 6) if odd else net(0))
    with pytest.raises(TypeError, match=r"expected a torch\.optim\.Optimizer or several, got str"):
        sw.save_checkpoint(path, model, ["Adam"])  # type: ignore[list-item]
    with pytest.raises(
        ValueError, match=r"extra\['second'\] is the optimizer of a sharded model.*optimizer=\["
    ):
        sw.save_checkpoint(path, model, extra={"second": optimizer})
    assert not path.exists() and not list(tmp_path.iterdir())
    dist.barrier()

    sw.save_checkpoint(path, model, optimizer, extra={"x": 1})
    before = whole(model, optimizer)
    foreign = torch.optim.AdamW(net(0, 6).parameters())
    for what, arguments in (
        ("optimizer: rank 1 has passed", (model, None if odd else optimizer)),
        (r"rank 1: .*expected 0\.\w+ of shape", (net(1, 6) if odd else net(1), None)),
        ("a parameter of shape .* that the model does not have", (model, foreign)),
    ):
        with pytest.raises(ValueError, match=what):
            sw.load_checkpoint(path, *arguments)
    with pytest.raises(ValueError, match=r"rank 1: extra\['x'\]: the state_dict .*on purpose"):
        sw.load_checkpoint(path, model, extra={"x": Fails(rank)})
    with pytest.raises(ValueError, match="has no extra 'y'"):
        sw.load_checkpoint(path, model, optimizer, extra={"y": torch.ones(2)})
    assert_equal(whole(model, optimizer), before)


@multirank(2)
def test_a_failed_load_leaves_an_optimizer_as_it_was(rank: int, world_size: int, tmp_path: Path) -> None:
    model, optimizer = made(0)
    step(model, optimizer)
    sw.save_checkpoint(tmp_path / "c", model, optimizer)
    other, _ = made(1)
    kinds: dict[str, Any] = {
        r"expected the optimizer's max_exp_avg_sq of 0\.\w+, found none; .* of another optimizer$": lambda p: (
            torch.optim.AdamW(p, amsgrad=True)
        ),
        "has the tensor optimizer.state.*, which this optimizer does not have": lambda p: torch.optim.SGD(
            p, 0.1
        ),
        "parameters of 2 groups": None,
    }
    for problem, kind in kinds.items():
        if kind is None:
            halves = [{"params": list(other[0].parameters())}, {"params": list(other[2].parameters())}]
            its = sw.fully_shard_optimizer(torch.optim.AdamW(halves))
            step(other, its)
            sw.save_checkpoint(tmp_path / "two", other, its)
            its, before = sw.fully_shard_optimizer(torch.optim.AdamW(model.parameters())), whole(model)
            with pytest.raises(ValueError, match=problem):
                sw.load_checkpoint(tmp_path / "two", model, its)
            assert_equal(whole(model), before)
        else:
            its = sw.fully_shard_optimizer(kind(other.parameters()))
            before = whole(other)
            with pytest.raises(ValueError, match=problem):
                sw.load_checkpoint(tmp_path / "c", other, its)
            assert_equal(whole(other), before)
        assert not its.state and its.param_groups[0]["lr"] != 0


@multirank(2)
@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3", "ddp"])
@pytest.mark.parametrize("reshard", [None, False])
def test_kept_weights_are_those_that_were_loaded(
    rank: int, world_size: int, strategy: str, reshard: bool | None, tmp_path: Path
) -> None:
    """After a forward without a step, and with gradients pending, which stay."""
    x = torch.randn(3, 4)
    options = {"strategy": strategy, "reshard_after_forward": reshard}
    model, optimizer = made(0, **options)
    step(model, optimizer)
    sw.save_checkpoint(tmp_path / "c", model, optimizer)
    other, its = made(1, **options)
    other(x).square().mean().backward()
    gradients = [p.grad.full_tensor().clone() for p in other.parameters()]
    sw.load_checkpoint(tmp_path / "c", other, its)
    assert_equal(whole(other, its), whole(model, optimizer))
    with torch.no_grad():
        assert torch.equal(other(x), model(x))
    assert all(
        torch.equal(p.grad.full_tensor(), g) for p, g in zip(other.parameters(), gradients, strict=True)
    )
    its.zero_grad()
    for each in ((model, optimizer), (other, its)):
        step(*each, 2)
    assert_equal(whole(other, its), whole(model, optimizer))


@multirank(2)
def test_models_that_are_not_ready_are_refused_or_get_values(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    model, optimizer = made(0)
    step(model, optimizer)
    sw.save_checkpoint(tmp_path / "c", model, optimizer)
    expected = whole(model)
    with sw.unsharded(model), pytest.raises(RuntimeError, match=r"inside shardwright\.unsharded"):
        sw.load_checkpoint(tmp_path / "c", model, optimizer)
    with sw.unsharded(model), pytest.raises(RuntimeError, match=r"inside shardwright\.unsharded"):
        sw.save_checkpoint(tmp_path / "d", model, optimizer)
    model.set_requires_gradient_sync(False)
    model(torch.randn(3, 4)).sum().backward()
    with pytest.raises(RuntimeError, match="holds gradients of earlier micro-batches"):
        sw.load_checkpoint(tmp_path / "c", model)
    assert_equal(whole(model), expected)

    for build in (sw.deferred_init, lambda: torch.device("meta")):
        with build():
            later, plain = net(3), net(3)
        shard(later)
        with pytest.raises(ValueError, match=r"weight has no values to save.*materialize"):
            sw.save_checkpoint(tmp_path / "d", later)
        sw.load_checkpoint(tmp_path / "c", later)  # shards get their values
        sw.save_checkpoint(tmp_path / "e", later, overwrite=True)
        sw.materialize(later)
        assert_equal(whole(later), expected)
        for call, path in ((sw.save_checkpoint, "d"), (sw.load_checkpoint, "c")):
            with pytest.raises(ValueError, match=r"0\.weight has no values and no memory.*materialize"):
                call(tmp_path / path, plain)
    assert not (tmp_path / "d").exists()


class Counts(nn.Module):
    """Has state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.count = nn.Parameter(torch.zeros(2)), 0

    def get_extra_state(self) -> Any:
        return {"count": self.count, "scale": torch.tensor(float(self.count))}

    def set_extra_state(self, state: Any) -> None:
        self.count = state["count"] + 10 * int(state["scale"])


def test_extra_state_of_modules_returns(tmp_path: Path) -> None:
    one, two = nn.Sequential(Counts()), nn.Sequential(Counts())
    one[0].count = 3
    sw.save_checkpoint(tmp_path / "c", one)
    sw.load_checkpoint(tmp_path / "c", two)
    assert two[0].count == 33


def test_settings_of_groups_may_be_tensors_or_numbers(tmp_path: Path) -> None:
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(one.parameters(), lr=torch.tensor(0.25))
    other = torch.optim.AdamW(two.parameters(), lr=0.5)
    sw.save_checkpoint(tmp_path / "c", one, optimizer)
    sw.load_checkpoint(tmp_path / "c", two, other)
    assert float(other.param_groups[0]["lr"]) == 0.25
    other.param_groups[0]["lr"] = 0.125
    sw.save_checkpoint(tmp_path / "d", two, other)
    sw.load_checkpoint(tmp_path / "d", one, optimizer)
    assert float(optimizer.param_groups[0]["lr"]) == 0.125
