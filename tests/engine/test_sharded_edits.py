"""Users edit sharded parameters while copies of the full ones are kept or a backward is to come.

Edits, averages, asynchronous checkpoints, copies of state dicts and weights that are borrowed.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from tests.engine.kit.edits import average, check_same, data, loss_of, mlp, outcome, step_both, twins
from tests.engine.kit.models import full
from tests.engine.kit.torch_versions import subclasses_dispatch
from tests.support import multirank

# -- edits of sharded parameters -----------------------------------------------------------------------------


FOREACH: dict[str, Callable[[list[Any]], None]] = {
    "mul": lambda tensors: torch._foreach_mul_(tensors, 0.9),
    "lerp": lambda tensors: torch._foreach_lerp_(tensors, [t.detach() * 0.5 for t in tensors], 0.5),
}


def foreach(model: nn.Module, edit: str, detach: bool) -> None:
    with torch.no_grad():
        FOREACH[edit]([p.detach() if detach else p for p in model.parameters()])


@multirank(2)
@pytest.mark.parametrize("detach", [False, True])
@pytest.mark.parametrize("edit", list(FOREACH))
def test_foreach_is_seen_by_kept_weights(rank: int, world_size: int, edit: str, detach: bool) -> None:
    plain, model = twins(mlp, "2", reshard_after_forward=False)
    model.set_reshard_after_backward(False)
    for step in range(2):  # the second time after a backward, which keeps, too
        with torch.no_grad():
            model(data())
            for m in (plain, model):
                foreach(m, edit, detach)
            torch.testing.assert_close(model(data()), plain(data()), rtol=1e-5, atol=1e-6)
        for m in (plain, model):
            m.zero_grad()
            loss_of(m, step).backward()
            foreach(m, edit, detach)
        average(plain)
        check_same(plain, model)
        torch.testing.assert_close(loss_of(model), loss_of(plain), rtol=1e-5, atol=1e-6)


@multirank(2)
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("edit", [*FOREACH, "mul of views", "SGD", "AdamW"])
def test_foreach_between_forward_and_backward_is_refused(
    rank: int, world_size: int, edit: str, keep: bool
) -> None:
    if not subclasses_dispatch and edit not in ("SGD", "AdamW"):
        pytest.skip("this torch asks no subclass of DTensor about operations, so foreach edits show nowhere")
    plain, model = twins(mlp, "2", reshard_after_forward=not keep)
    for m in (plain, model):
        loss_of(m).backward()
        loss = loss_of(m, 1)
        if edit in ("SGD", "AdamW"):
            getattr(torch.optim, edit)(m.parameters(), lr=0.1, foreach=True).step()
        else:
            foreach(m, edit.split()[0], edit.endswith("views"))
        assert outcome(loss) == "refused"


@multirank(2)
def test_averages_of_weights_are_seen_in_evaluation(rank: int, world_size: int) -> None:
    results = []
    for m in twins(mlp, "0", reshard_after_forward=False):
        average_of = AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        average_of.update_parameters(m)
        with torch.no_grad():
            average_of.module(data())
            for p in m.parameters():
                p.mul_(0.5)
            average_of.update_parameters(m)
            results.append(average_of.module(data()))
    torch.testing.assert_close(results[1], results[0])


# -- checkpoints ---------------------------------------------------------------------------------------------


@multirank(2)
@pytest.mark.parametrize("what", ["state_dict", "named_parameters"])
def test_asynchronous_checkpoints(rank: int, world_size: int, what: str, tmp_path: Path) -> None:
    plain, model = twins(mlp, "0")
    loss_of(model).backward()
    model.zero_grad()
    saved = dcp.async_save(dict(getattr(model, what)()), checkpoint_id=tmp_path)  # a dict, or pairs
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()  # which is the next step's affair
    saved.result()
    found = {key: torch.zeros_like(value) for key, value in plain.state_dict().items()}
    dcp.load(found, checkpoint_id=tmp_path)
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(found[key], value, rtol=0, atol=0)


@multirank(2)
def test_copies_of_state_dicts_are_dtensors(rank: int, world_size: int) -> None:
    plain, model = twins(mlp, "0")
    state = model.state_dict()
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    copied, loaded = copy.deepcopy(state), torch.load(file, weights_only=False)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    for form in (copied, loaded):
        assert form.keys() == plain.state_dict().keys()
        for key, value in plain.state_dict().items():
            assert isinstance(form[key], DTensor) and (form is copied or type(form[key]) is DTensor)
            torch.testing.assert_close(form[key].full_tensor(), value, rtol=0, atol=0)


# -- borrowed weights under checkpointing --------------------------------------------------------------------


class Borrows(nn.Module):
    """A block all of whose weights are another's; it may leave them unused and return its input."""

    def __init__(self, lender: nn.Linear) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.linear.weight, self.linear.bias = lender.weight, lender.bias

    def forward(self, x: torch.Tensor, used: bool) -> torch.Tensor:
        return torch.tanh(self.linear(x)) if used else x


class Lends(nn.Module):
    def __init__(self, lender_first: bool) -> None:
        super().__init__()
        self.lender_first, self.skipped_on = lender_first, 1
        self.first, self.lender, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.block = Borrows(self.lender)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        used = dist.get_rank() != self.skipped_on
        x = torch.tanh(self.first(x))
        if self.lender_first:
            x = torch.tanh(self.lender(x))
        x = checkpoint(self.block, x, used, use_reentrant=True)
        return self.last(x if self.lender_first else torch.tanh(self.lender(x)))


@multirank(2)
@pytest.mark.parametrize("skipped_on", [0, 1])
@pytest.mark.parametrize("lender_first", [False, True])
def test_borrowed_weights_unused_on_one_rank(
    rank: int, world_size: int, lender_first: bool, skipped_on: int
) -> None:
    plain, model = twins(lambda: Lends(lender_first), "first", "lender", "block", "last")
    plain.skipped_on = model.skipped_on = skipped_on
    for step in range(3):
        step_both(plain, model, step, evaluate=True)


# -- edits of sharded parameters while a copy of the full ones is kept -------------------------------------------------


KEPT: dict[str, dict[str, Any]] = {
    "zero1": {"strategy": "zero1"},
    "zero1 ragged": {"strategy": "zero1", "layout": "ragged"},
    "zero2": {"strategy": "zero2"},
    "not resharded": {"reshard_after_forward": False},
    "not resharded ragged": {"reshard_after_forward": False, "layout": "ragged"},
}


def load_in_place(model: nn.Module) -> None:
    doubled = {name: full(value) * 2 for name, value in model.state_dict().items()}
    for name, value in model.state_dict().items():
        value.copy_(doubled[name] if type(value) is torch.Tensor else value * 2)


def each(edit: Callable[[torch.Tensor], Any]) -> Callable[[nn.Module], None]:
    def edit_all(model: nn.Module) -> None:
        for p in model.parameters():
            edit(p)

    return edit_all


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def each_value(edit: Callable[[torch.Tensor], Any]) -> Callable[[nn.Module], None]:
    def edit_all(model: nn.Module) -> None:
        for value in model.state_dict().values():
            edit(value)

    return edit_all


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


DOUBLINGS: dict[str, Callable[[nn.Module], None]] = {
    "parameter": each(lambda p: p.mul_(2)),
    "copy": each(lambda p: p.copy_(p * 2)),
    "data": each(lambda p: p.data.mul_(2)),
    "local of data": each(lambda p: local(p.data).mul_(2)),
    "detached": each(lambda p: p.detach().mul_(2)),
    "local of detached": each(lambda p: local(p.detach()).mul_(2)),
    "local": each(lambda p: local(p).mul_(2)),
    "state dict": each_value(lambda v: v.mul_(2)),
    "local of state dict": each_value(lambda v: local(v).mul_(2)),
    "state dict, copied into": load_in_place,
    "foreach": lambda model: torch._foreach_mul_(list(model.parameters()), 2.0),
    "foreach copy": lambda model: torch._foreach_copy_(
        list(model.parameters()), [p.detach() * 2 for p in model.parameters()]
    ),
    "foreach of data": lambda model: torch._foreach_mul_([p.data for p in model.parameters()], 2.0),
    "foreach of state dict": lambda model: torch._foreach_mul_(list(model.state_dict().values()), 2.0),
}


@pytest.mark.extensive("each way to keep a copy", but=("zero2-2ranks", "not resharded ragged-2ranks"))
@multirank(2)
@pytest.mark.parametrize("kept", KEPT)
def test_edits_are_seen_while_a_copy_is_kept(rank: int, world_size: int, kept: str) -> None:
    for number, (name, double) in enumerate(DOUBLINGS.items()):
        if name == "foreach copy":
            if "layout" not in KEPT[kept]:
                continue  # DTensors have no such operation
        elif (number + number // 2 + list(KEPT).index(kept)) % 2:
            continue  # each way with two or three of the reasons for a copy
        plain, model = twins(Chain, "a", "b", **KEPT[kept])
        with torch.no_grad():
            model(data())  # the copy is kept from here
            double(model)
            for q in plain.parameters():
                q.mul_(2)
        for step in range(2):
            torch.testing.assert_close(model(data(step)), plain(data(step)), msg=f"{name}: stale weights")
        step_both(plain, model, 0, evaluate=True)
        check_same(plain, model)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return y


@multirank(2)
@pytest.mark.parametrize("keep", [False, True])
def test_recomputation_has_the_weights_of_backward(rank: int, world_size: int, keep: bool) -> None:
    """As on one device; nothing that autograd has saved tells it that they were edited after forward."""
    plain, model = twins(Checkpointed, reshard_after_forward=not keep)
    for _ in range(2):
        losses = [loss_of(m) for m in (plain, model)]
        for m in (plain, model):
            with torch.no_grad():
                m.inner[0].weight.mul_(2)
        for loss in losses:
            loss.backward()
        average(plain)
        check_same(plain, model)
        for m in (plain, model):
            m.zero_grad()


@multirank(2)
@pytest.mark.parametrize("kept", KEPT)
def test_reading_on_one_rank_changes_nothing_on_the_others(rank: int, world_size: int, kept: str) -> None:
    """Neither what it keeps nor what it gathers: logs of one rank are harmless."""
    plain, model = twins(Chain, "a", "b", **KEPT[kept])
    other = nn.Parameter(torch.zeros(2))
    other.grad = torch.ones(2)
    optimizer = torch.optim.SGD([other], lr=0.1)
    for step in range(3):
        if rank == 0:
            [local(p.data).norm() for p in model.parameters()]
            optimizer.step()
        loss = loss_of(model, step)
        if rank == 0:
            [p.data for p in model.parameters()]
            optimizer.step()
        loss.backward()
        loss_of(plain, step).backward()
    average(plain)
    check_same(plain, model)
