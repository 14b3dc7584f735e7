"""Steps that send an update instead of values: torch's bits with every option, failures, and an optimizer's own."""

from __future__ import annotations

import copy
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.optim.companion import sharded_companion
from shardwright.optim.whole import updates
from tests.optim.whole import assert_equal_bits, full, set_gradients, twins
from tests.support import multirank


def divided(optimizer: Any) -> set[str]:
    """The names of parameters whose updates travel."""
    return {
        each.name.split(" ")[0]
        for owners in sharded_companion(optimizer).owners.values()
        for each in owners.owned
        if each.updates is not None
    }


OPTIONS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "plain momentum": (torch.float32, {"nesterov": False, "momentum": 0.8, "weight_decay": 0.3}),
    "scaled": (torch.float32, {"adjust_lr_fn": "match_rms_adamw", "ns_steps": 3}),
    "few iterations": (torch.float32, {"ns_steps": 0, "momentum": 0.0, "nesterov": False}),
    "tensor lr": (torch.float32, {"lr": torch.tensor(0.1)}),
    "tensor lr of one dimension": (torch.float32, {"lr": torch.tensor([0.1])}),
    "half": (torch.float16, {}),
    "double": (torch.float64, {}),
}


@multirank(3)
def test_bits_of_torchs_muon_with_every_option(rank: int, world_size: int) -> None:
    for name, (dtype, options) in OPTIONS.items():
        for layout in ("per_parameter", "element"):
            plain, sharded = twins(world_size, "zero3", layout, dtype=dtype)
            expected = torch.optim.Muon(plain.parameters(), **options)
            ours = sw.fully_shard_optimizer(torch.optim.Muon(sharded.parameters(), **copy.deepcopy(options)))
            assert divided(ours) == {"wide", "tall", "row", "even"}
            for step in range(3):
                set_gradients(plain, sharded, step=step, without="tall" if step == 1 else "")
                expected.step()
                ours.step()
                assert_equal_bits(plain, sharded, f"{name}, {layout}, step {step}")
                for p, q in zip(plain.parameters(), sharded.parameters(), strict=True):
                    if p.grad is not None:
                        theirs, mine = expected.state[p]["momentum_buffer"], ours.state[q]["momentum_buffer"]
                        assert torch.equal(full(mine), theirs)


def test_parts_of_a_sum_are_the_sum_of_parts() -> None:
    """The lengths have a rest after the vector loop, or none. In bfloat16 the sums differ, so values travel there."""
    torch.manual_seed(0)
    for dtype in (torch.float16, torch.float32, torch.float64):
        found = updates.muon_updates(torch.empty(2, 2, dtype=dtype))
        assert found is not None
        group = torch.optim.Muon([torch.empty(1, 1)], lr=0.0213).defaults
        for columns in range(1, 70, 3):
            whole, update = torch.randn(7, columns).to(dtype), torch.randn(columns, 7).bfloat16().T
            parts, shape = whole.clone(), whole.shape
            found.apply(whole, update, group, shape)
            for start in range(0, whole.numel(), 37):
                chosen = slice(start, start + 37)
                found.apply(parts.view(-1)[chosen], update.contiguous().view(-1)[chosen], group, shape)
            assert torch.equal(parts, whole), (dtype, columns)
    assert updates.muon_updates(torch.empty(2, 2, dtype=torch.bfloat16)) is None
    assert updates.muon_updates(torch.empty(2, 2, dtype=torch.complex64)) is None


@pytest.mark.parametrize("change", ["other name", "other arguments", "other numbers"])
def test_a_torch_with_another_muon_steps_values(change: str) -> None:
    """Its private functions are not trusted unless two steps have the bits of its own step."""
    orthogonalized, adjusted_lr = updates.muon_functions()  # type: ignore[misc]
    functions: Any = {
        "other name": None,
        "other arguments": (lambda direction: direction, adjusted_lr),
        "other numbers": (lambda *args: orthogonalized(*args).mul(0.5), adjusted_lr),
    }[change]
    updates._muon_updates.cache_clear()
    try:
        with patch.object(updates, "muon_functions", lambda: functions):
            assert updates.muon_updates(torch.empty(2, 2)) is None
    finally:
        updates._muon_updates.cache_clear()


@multirank(2)
@pytest.mark.parametrize("first", ["values", "updates"])
def test_training_continues_in_the_other_way(rank: int, world_size: int, first: str) -> None:
    """State has the same form, whether values travel or updates."""
    plain, sharded = twins(world_size, "zero3", "row", others=True)
    expected = sw.Muon(plain.named_parameters(), lr=0.1)
    state = None
    for step, way in enumerate([first, {"values": "updates", "updates": "values"}[first]]):
        with patch.object(
            updates, "_muon_updates", updates._muon_updates if way == "updates" else lambda: None
        ):
            ours = sw.fully_shard_optimizer(sw.Muon(sharded.named_parameters(), lr=0.1))
        assert bool(divided(ours)) == (way == "updates")
        if state is not None:
            ours.load_state_dict(state)
        set_gradients(plain, sharded, step=step)
        expected.step()
        ours.step()
        assert_equal_bits(plain, sharded, f"step {step}")
        state = copy.deepcopy(ours.state_dict())


@multirank(3)
def test_an_error_on_an_owner_leaves_equal_values_on_all_ranks(rank: int, world_size: int) -> None:
    """Matrices without an update had their weight decay, on every rank; then training continues."""
    plain, sharded = twins(world_size, "ddp")
    expected = torch.optim.Muon(plain.parameters(), lr=0.1)
    ours = sw.fully_shard_optimizer(torch.optim.Muon(sharded.parameters(), lr=0.1))
    (owners,) = sharded_companion(ours).owners.values()
    failing = next(each for each in owners.owned if each.name.startswith("tall"))
    found = failing.updates

    def fail(*args: Any) -> Any:
        raise KeyError("asked to fail")

    failing.updates = updates.Updates(found.dtype, fail, found.apply)
    before = copy.deepcopy(plain.tall.detach())
    set_gradients(plain, sharded, step=0)
    with pytest.raises(KeyError if rank == failing.owner else RuntimeError) as caught:
        ours.step()
    if rank != failing.owner:
        message = f"failed on rank {failing.owner}, on whole tensors, the first is 'tall of Odd'"
        assert message in str(caught.value)
    everyone: list[Any] = [None] * world_size
    values = {name: full(p).detach() for name, p in sharded.named_parameters()}
    torch.distributed.all_gather_object(everyone, values)
    assert all(torch.equal(other[name], value) for other in everyone for name, value in values.items())
    assert torch.equal(values["tall"], before * (1 - 0.1 * 0.1))
    expected.step()
    others = [owned for owned in owners.owned if owned.owner != failing.owner]
    assert others
    for owned in others:
        name = owned.name.split(" ")[0]
        assert torch.equal(values[name], plain.get_parameter(name))
    failing.updates = found
    set_gradients(sharded, step=1)
    ours.step()


class Centred(torch.optim.Optimizer):
    """Subtracts the gradient without its mean, which it counts, as an update of its own."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def shard_needs(self, p: torch.Tensor) -> Any:
        return "tensor"

    def shard_updates(self, p: torch.Tensor) -> sw.optim.Updates | None:
        return sw.optim.Updates(self.dtype, self.compute, self.apply)

    dtype = torch.float32

    @staticmethod
    def compute(gradient: torch.Tensor, state: Any, group: Any) -> torch.Tensor:
        state["count"] = state.get("count", 0) + 1
        return gradient - gradient.mean() * state["count"]

    @staticmethod
    def apply(part: torch.Tensor, update: torch.Tensor, group: Any, shape: torch.Size) -> None:
        part.sub_(update, alpha=group["lr"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.apply(p, self.compute(p.grad, self.state[p], group), group, p.shape)


class Doubled(Centred):
    """Has another step, and inherits updates that are not its step's."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        super().step()


@multirank(2)
@pytest.mark.parametrize("kind", [Centred, Doubled])
def test_an_optimizers_own_updates(rank: int, world_size: int, kind: Any) -> None:
    plain, sharded = twins(world_size, "zero3", "row", others=True)
    kind([nn.Parameter(torch.ones(1))])  # torch wraps the class's step when it makes the first instance
    expected, ours = kind(plain.parameters()), sw.fully_shard_optimizer(kind(sharded.parameters()))
    assert bool(divided(ours)) == (kind is Centred)
    for step in range(2):
        set_gradients(plain, sharded, step=step)
        expected.step()
        ours.step()
        assert_equal_bits(plain, sharded, f"step {step}")
    counts = {ours.state[p]["count"] for p in sharded.parameters() if p.ndim}
    assert counts == {2 if kind is Centred else 4}


@multirank(2)
def test_an_update_of_another_dtype_is_refused(rank: int, world_size: int) -> None:
    _, sharded = twins(world_size)
    ours = Centred(sharded.parameters())
    ours.dtype = torch.bfloat16
    ours = sw.fully_shard_optimizer(ours)
    set_gradients(sharded, step=0)
    with pytest.raises(
        ValueError,
        match=r"shape \(\d, \d\) and the dtype torch.bfloat16 .* found \(\d, \d\) and torch.float32",
    ):
        ours.step()
