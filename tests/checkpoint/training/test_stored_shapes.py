"""A part of a state is one value in files if it has no tensors, and several entries if it has some. Both load alike."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwright as sw
from shardwright.engine.comm import GradientHook
from shardwright.train.errors import UserError
from shardwright.train.run.position import Position
from shardwright.train.step import loading
from shardwright.train.step.saving import checkpoint
from tests.checkpoint.kit.resharding import assert_equal, whole
from tests.support import multirank, world_mesh

KINDS = ("numbers", "tensors", "both", "none")


class Numbers(torch.optim.Optimizer):
    """SGD whose state has numbers, tensors, both or nothing."""

    def __init__(self, parameters: Any, kind: str, lr: Any) -> None:
        super().__init__(parameters, {"lr": lr})
        self.kind = kind

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = {} if self.kind == "none" else self.state[p]
                if self.kind in ("numbers", "both"):
                    state["count"] = state.get("count", 0) + 1
                    state["past"] = {"counts": [*state.get("past", {"counts": []})["counts"], state["count"]]}
                if self.kind in ("tensors", "both"):
                    state["sum"] = state.get("sum", 0) + p.grad
                p -= group["lr"] / state.get("count", 1) * state.get("sum", p.grad)


def made(seed: int, kind: str, is_tensor: bool, hook: Any = None) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    sw.fully_shard(model, mesh=world_mesh(dist.get_world_size()), layout="per_parameter")
    if hook is not None:
        model.set_gradient_comm_hook(hook)
    return model, Numbers(model.parameters(), kind, torch.tensor(0.1) if is_tensor else 0.1)


def step(model: Any, optimizer: Any, number: int) -> None:
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def numbers_of(model: Any, optimizer: Any) -> dict[str, Any]:
    """The plain values in the state of each parameter."""
    names = {p: name for name, p in model.named_parameters()}
    return {
        names[p]: {key: each for key, each in state.items() if not isinstance(each, torch.Tensor)}
        for p, state in optimizer.state.items()
    }


@multirank(2)
@pytest.mark.extensive("each kind of state", but=("both-float rate-*",))
@pytest.mark.parametrize("is_tensor", [False, True], ids=["float rate", "tensor rate"])
@pytest.mark.parametrize("kind", KINDS)
def test_optimizers_go_on_whatever_their_state_holds(
    rank: int, world_size: int, tmp_path: Path, kind: str, is_tensor: bool
) -> None:
    extras: list[dict[str, Any]] = [{}, {"step": 3}, {"mean": torch.ones(2), "step": 3}]
    for steps, extra in itertools.product((0, 2), extras):
        model, optimizer = made(0, kind, is_tensor)
        for number in range(steps):
            step(model, optimizer, number)
        path = tmp_path / f"{steps}-{len(extra)}"
        sw.save_checkpoint(path, model, optimizer, extra=extra)
        other, its = made(1, kind, is_tensor)
        step(other, its, 7)
        stored = sw.load_checkpoint(path, other, its)
        assert stored.keys() == extra.keys() and stored.get("step") == extra.get("step")
        assert numbers_of(other, its) == numbers_of(model, optimizer)
        assert_equal(whole(other, its), whole(model, optimizer))
        for each, of_each in ((model, optimizer), (other, its)):
            step(each, of_each, 9)
        assert_equal(whole(other, its), whole(model, optimizer))


class CountingHook(GradientHook):
    """Its state has numbers alone, or a tensor, too."""

    def __init__(self, has_tensor: bool) -> None:
        self.count, self.nest = 0, {"counts": [0]}
        self.sum = torch.zeros(3) if has_tensor else None

    def __repr__(self) -> str:
        return "CountingHook()"  # a part of the place that the state fits

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"count": self.count, "nest": self.nest}
        return state if self.sum is None else {**state, "sum": self.sum}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self.nest = state["count"], state["nest"]
        if self.sum is not None:
            self.sum = state["sum"]


@multirank(2)
@pytest.mark.parametrize("has_tensor", [False, True])
def test_gradient_hooks_go_on_whatever_their_state_holds(
    rank: int, world_size: int, tmp_path: Path, has_tensor: bool
) -> None:
    hook = CountingHook(has_tensor)
    hook.count, hook.nest = 5, {"counts": [1, 2]}
    if hook.sum is not None:
        hook.sum += 4
    model, _ = made(0, "none", False, hook)
    sw.save_checkpoint(tmp_path / "c", model)
    new = CountingHook(has_tensor)
    other, _ = made(1, "none", False, new)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sw.load_checkpoint(tmp_path / "c", other)
    assert (new.count, new.nest) == (5, {"counts": [1, 2]})
    assert new.sum is None or hook.sum is None or torch.equal(new.sum, hook.sum)


class LateHook(CountingHook):
    """It has no state before the first gradient."""

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() if self.count else {}


@multirank(2)
def test_a_hook_that_makes_its_state_later_does_not_lose_it_in_silence(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    hook = LateHook(False)
    hook.count = 5
    model, _ = made(0, "none", False, hook)
    sw.save_checkpoint(tmp_path / "c", model)
    other, _ = made(1, "none", False, LateHook(False))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sw.load_checkpoint(tmp_path / "c", other)
    texts = [str(each.message) for each in caught if "gradient hooks" in str(each.message)]
    assert len(texts) == (rank == 0) and all("LateHook starts without" in text for text in texts), texts


@multirank(1, 2)
def test_a_state_is_read_as_it_was_saved(rank: int, world_size: int, tmp_path: Path) -> None:
    """Also into the tensors of a present state, and whether or not it or its neighbours have tensors."""
    mesh = world_mesh(world_size)
    tensor = torch.arange(12.0).view(4, 3)
    states: dict[str, dict[str, Any]] = {
        "values": {"a": 1, "deep": {"b": [1, {"c": None}]}},
        "tensors": {"a": tensor, "deep": {"list": [tensor + 1, 5, tensor + 2], 3: tensor + 3}},
        "empty": {},
    }
    for number, names in enumerate(itertools.chain.from_iterable(
        itertools.combinations(states, length) for length in (1, 2, 3)
    )):  # fmt: skip
        path = tmp_path / f"{number}"
        sw.save_checkpoint(path, nn.Linear(2, 2), extra={name: states[name] for name in names})
        stored = sw.open_checkpoint(path)
        for name in states:
            assert_same(stored.state("extra", name), states[name] if name in names else None)
        assert stored.state("extra", "values", "deep", "b") == (
            [1, {"c": None}] if "values" in names else None
        )
        assert stored.state("other") is None
        if "tensors" in names:
            sharded = (
                torch.distributed.tensor.distribute_tensor(torch.zeros(4, 3), mesh)
                if world_size > 1
                else None
            )
            present: dict[str, Any] = {
                "a": torch.zeros(4, 3) if sharded is None else sharded,
                "deep": {"list": [torch.zeros(1)]},
            }
            read = stored.state("extra", "tensors", own=present)
            assert isinstance(read["a"], type(present["a"]))
            read["a"] = read["a"] if sharded is None else sharded.full_tensor()
            assert torch.equal(read["a"], tensor) and present["deep"]["list"][0].numel() == 1
            assert_same(read, states["tensors"])
        copied = stored.state("extra", "values")
        if copied:
            copied["deep"]["b"].clear()
            assert stored.state("extra", "values") == states["values"]


def assert_same(found: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected)
    elif isinstance(expected, (dict, list)):
        assert type(found) is type(expected) and len(found) == len(expected)
        for key in expected if isinstance(expected, dict) else range(len(expected)):
            assert_same(found[key], expected[key])
    else:
        assert found == expected


@pytest.mark.parametrize("is_tensor", [False, True], ids=["float rate", "tensor rate"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_resumes_whatever_the_state_of_its_optimizer_holds(
    tmp_path: Path, kind: str, is_tensor: bool
) -> None:
    def run(seed: int) -> tuple[nn.Module, Numbers]:
        torch.manual_seed(seed)
        model = nn.Linear(4, 3)
        return model, Numbers(model.parameters(), kind, torch.tensor(0.1) if is_tensor else 0.1)

    model, optimizer = run(0)
    for _ in range(2):
        model(torch.randn(5, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    state: dict[str, Any] = {"mine": {"counts": [3, 4], "means": [torch.ones(2), 5]}}
    checkpoint.save(tmp_path, model, optimizer, Position(2, 2), hooks=state)
    other, its = run(1)
    loaded = loading.load_newest(tmp_path, other, its)
    assert loaded.position == Position(2, 2)
    assert_same(dict(other.state_dict()), dict(model.state_dict()))
    assert_same(its.state_dict()["state"], optimizer.state_dict()["state"])
    assert_same(loading.hook_states(loaded, {"mine": {}, "new": {}}), state)


OPTIMIZERS: dict[str, Any] = {
    "adamw": torch.optim.AdamW,
    "amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "adagrad": torch.optim.Adagrad,  # has state before its first step
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "plain": lambda p: torch.optim.SGD(p, 0.1),  # never has state
}


@pytest.mark.extensive("each pair of optimizers", but=("*-adamw-*",))
@pytest.mark.parametrize("used", [0, 1, 2])
@pytest.mark.parametrize("theirs", OPTIMIZERS)
@pytest.mark.parametrize("mine", OPTIMIZERS)
def test_parameters_without_a_gradient_resume_with_the_same_optimizer_alone(
    tmp_path: Path, mine: str, theirs: str, used: int
) -> None:
    """Some of two layers had gradients. The checkpoint has the state that the optimizer has, and no other."""

    def run(seed: int, kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)])
        return model, OPTIMIZERS[kind](model.parameters())

    def train(model: Any, optimizer: torch.optim.Optimizer, layers: int) -> None:
        for number in range(3):
            for layer in list(model)[:layers]:
                layer(torch.randn(5, 4, generator=torch.Generator().manual_seed(number))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    model, optimizer = run(0, theirs)
    train(model, optimizer, used)
    checkpoint.save(tmp_path, model, optimizer, Position(3, 3))
    other, its = run(1, mine)
    before = {name: value.clone() for name, value in other.state_dict().items()}
    same = mine == theirs or ({mine, theirs} <= {"plain", "momentum"} and not optimizer.state_dict()["state"])
    if not same and not (used == 0 and {mine, theirs} == {"adamw", "amsgrad"}):
        with pytest.raises(
            UserError, match=r"another optimizer; resume with the optimizer\.name of the saved"
        ):
            loading.load_newest(tmp_path, other, its)
        assert_same(dict(other.state_dict()), before)
        return
    loading.load_newest(tmp_path, other, its)
    assert_same(its.state_dict()["state"], optimizer.state_dict()["state"])
    if mine == theirs:
        for each in ((model, optimizer), (other, its)):
            train(*each, 2)
        assert_same(dict(other.state_dict()), dict(model.state_dict()))
        assert_same(its.state_dict()["state"], optimizer.state_dict()["state"])
