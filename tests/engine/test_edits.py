"""Users edit full weights, inside forward and between: writes, reads of ``.data``, replacements, copies.

Everything is compared with a copy of the plain model that was made before sharding, on which the same is done. Ranks
have different data, edits are the same on all of them.
"""

from __future__ import annotations

import copy
import io
import os
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.tensor import DTensor

import shardwright as sw
from tests.engine.kit.edits import average, check_same, data, loss_of, mlp, outcome, step_both, twins
from tests.engine.kit.models import full
from tests.engine.kit.subclasses import (
    HalfGathered,
    Stored,
    backward as backward_of_wrapped,
    check,
    data as data_of_wrapped,
    gradients,
    straight_through,
    wrapped,
)
from tests.support import multirank

# -- the plain model and the sharded one ---------------------------------------------------------------------


class Touched(nn.Module):
    """A linear layer to which something is done before and after it is used."""

    def __init__(self, before: str = "nothing", after: str = "nothing") -> None:
        super().__init__()
        self.linear, self.before, self.after = nn.Linear(4, 4), before, after

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        TOUCHES[self.before](self.linear)
        y = self.linear(x)
        TOUCHES[self.after](self.linear)
        return torch.tanh(y)


def set_data(linear: nn.Linear) -> None:
    linear.weight.data = linear.weight.data * 0.9


@torch.no_grad()
def multiply(linear: nn.Linear) -> None:
    linear.weight.mul_(0.9)


def replace(linear: nn.Linear) -> None:
    linear.weight = nn.Parameter(linear.weight.detach() * 0.9)


ALIASES: weakref.WeakKeyDictionary[nn.Module, torch.Tensor] = weakref.WeakKeyDictionary()


def multiply_alias(linear: nn.Linear) -> None:
    if linear not in ALIASES:
        ALIASES[linear] = linear.weight.data
    ALIASES[linear].mul_(0.9)


TOUCHES: dict[str, Callable[[nn.Linear], Any]] = {
    "nothing": lambda linear: None,
    "read": lambda linear: [linear.weight.data.norm(), linear.bias.data.norm()],
    "multiply data": lambda linear: linear.weight.data.mul_(0.9),
    "multiply alias": multiply_alias,
    "multiply": multiply,
    "set data": set_data,
    "replace": replace,
}


def touched(**touches: str) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(Touched(**touches), nn.Linear(4, 4), Touched(**touches))


def untouch(*models: nn.Module) -> None:
    for module in (m for model in models for m in model.modules() if isinstance(m, Touched)):
        module.before = module.after = "nothing"


# -- .data of full weights -----------------------------------------------------------------------------------


class Logged(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data.norm(), self.bias.data.norm()
        return super().forward(x)


@multirank(2)
def test_reading_data_does_not_round_the_weights(rank: int, world_size: int) -> None:
    policy = sw.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    plain, model = twins(lambda: Logged(4, 4), mp_policy=policy)
    x = torch.arange(8.0).view(2, 4) + rank
    with torch.no_grad():
        model(x)
    torch.testing.assert_close(full(model.weight.detach()), plain.weight.detach(), rtol=0, atol=0)
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-4) for m in (plain, model)]
    for _ in range(20):
        for m in (plain, model):
            m.zero_grad()
            m(x).sum().backward()  # gradients are small integers, which bfloat16 holds
        average(plain)
        for optimizer in optimizers:
            optimizer.step()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full(p.detach()), q.detach(), rtol=0, atol=0)


@multirank(2)
def test_reading_data_beside_a_loss_of_the_local_shards(rank: int, world_size: int) -> None:
    plain, model = twins(touched(before="read"), "0", "2")
    decay = model[0].linear.weight.to_local().square().sum()
    (decay + loss_of(model)).backward()
    (plain[0].linear.weight.square().sum() + loss_of(plain)).backward()
    average(plain)
    check_same(plain, model)


@pytest.mark.extensive("both ways", but=("*-True-*",))
@multirank(2)
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("touch", ["read", "multiply data", "multiply", "multiply alias", "set data"])
def test_touched_before_use(rank: int, world_size: int, touch: str, keep: bool) -> None:
    plain, model = twins(touched(before=touch), "0", "2", reshard_after_forward=not keep)
    for step in range(3):
        step_both(plain, model, step, evaluate=True)


@multirank(2)
@pytest.mark.parametrize("keep", [False, True])
def test_an_alias_of_data_outlives_the_memory_that_it_views(rank: int, world_size: int, keep: bool) -> None:
    """As above, where released memory is really given back."""
    plain, model = twins(
        touched(before="multiply alias"), "0", "2", poison=False, reshard_after_forward=not keep
    )
    for step in range(3):
        step_both(plain, model, step, evaluate=True)


@multirank(2)
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("by_hand", [False, True])
def test_data_set_after_use_is_refused(rank: int, world_size: int, by_hand: bool, keep: bool) -> None:
    """Plain PyTorch goes on with the memory of before, which is the slab's here."""
    plain, model = twins(
        touched() if by_hand else touched(after="set data"), "0", "2", reshard_after_forward=not keep
    )
    loss = loss_of(model)
    loss_of(plain)
    if by_hand:
        model[2].unshard()
        set_data(model[2].linear)  # the first layer's weight is not read in backward
        set_data(plain[2].linear)
    assert outcome(loss) == "refused"
    model.zero_grad()
    check_same(plain, model)
    untouch(plain, model)
    step_both(plain, model, 1)


@multirank(2)
@pytest.mark.parametrize("other", ["shape", "dtype"])
def test_data_of_another_shape_or_dtype_is_refused(rank: int, world_size: int, other: str) -> None:
    plain, model = twins(mlp, "0")
    model.unshard()
    model[0].unshard()
    for m, value in ((model[0], torch.ones(1)), (model[2], torch.ones(4, 4, dtype=torch.float64))):
        with pytest.raises(
            RuntimeError, match=r"full weight.*of shape \(4, 4\) and torch\.float32.*cannot be replaced"
        ):
            m.weight.data = value
    step_both(plain, model)


@multirank(2)
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("then", ["backward", "reshard", "forward", "state_dict"])
@pytest.mark.parametrize("touch", ["multiply data", "multiply", "set data"])
def test_edits_by_hand_are_kept(rank: int, world_size: int, touch: str, then: str, keep: bool) -> None:
    plain, model = twins(mlp, "0", "2", reshard_after_forward=not keep)
    losses = [loss_of(m) for m in (plain, model)]
    if keep:  # what was read through .data once is gathered anew at every use
        assert all(p.data.shape for p in model.parameters())
    model[2].unshard()
    for m in (plain, model):
        TOUCHES[touch](m[2])
    if then == "backward" and touch != "set data":
        assert outcome(losses[0]) == outcome(losses[1]) == ("refused" if touch == "multiply" else "done")
        if touch != "multiply":
            average(plain)
            check_same(plain, model)
        model.zero_grad()
    elif then == "reshard":
        model[2].reshard()
    elif then == "forward":
        with torch.no_grad():
            torch.testing.assert_close(model(data()), plain(data()), rtol=1e-5, atol=1e-6)
    elif then == "state_dict":
        for key, value in model.state_dict().items():
            assert isinstance(value, DTensor)
            torch.testing.assert_close(value.full_tensor(), plain.state_dict()[key])
    check_same(plain, model, and_gradients=False)
    step_both(plain, model, 1, evaluate=True)


@multirank(2)
@pytest.mark.parametrize("then", ["forward", "reshard", "state_dict", "unshard", "step"])
@pytest.mark.parametrize("noticed", [False, True])
def test_one_parameter_is_edited_full_and_the_other_sharded(
    rank: int, world_size: int, then: str, noticed: bool
) -> None:
    """The full weights have one edit, the shards the other. ``noticed``: the engine has seen the latter before."""
    for keep in (False, True):
        plain, model = twins(mlp, "0", "2", reshard_after_forward=not keep)
        sharded = model[2].weight
        model[2].unshard()
        with torch.no_grad():
            sharded.mul_(2)
            plain[2].weight.mul_(2)
            if noticed:
                model[2].unshard()
            for m in (plain, model):
                m[2].bias.add_(1)
            if then == "reshard":
                model[2].reshard()
            elif then == "state_dict":
                model.state_dict()
            elif then == "unshard":
                model[2].unshard()
            elif then == "step":
                torch.optim.SGD(model.parameters(), lr=0.1).step()
            for _ in range(2):
                torch.testing.assert_close(model(data()), plain(data()), rtol=1e-5, atol=1e-6)
        step_both(plain, model, 1, evaluate=True)


class EditsItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.handles: list[torch.Tensor] = []  #: of the weight, as it is outside of forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        self.handles[0].mul_(2)
        self.linear.bias.add_(1)
        return y


@multirank(2)
@pytest.mark.parametrize("keep", [False, True])
def test_a_forward_edits_one_parameter_full_and_the_other_sharded(
    rank: int, world_size: int, keep: bool
) -> None:
    """Weights that are kept after forward have one of the edits only."""
    plain, model = twins(EditsItself, reshard_after_forward=not keep)
    for m in (plain, model):
        m.handles.append(m.linear.weight)
    for _ in range(3):
        with torch.no_grad():  # for evaluation weights are kept from call to call
            torch.testing.assert_close(model(data()), plain(data()), rtol=1e-5, atol=1e-6)
        check_same(plain, model)


@multirank(2)
def test_both_forms_of_one_parameter_are_edited(rank: int, world_size: int) -> None:
    """One change would be lost. What was only handed out is taken for not edited."""
    for how in ("in place", "read data"):
        plain, model = twins(mlp, "0", "2")
        sharded = model[2].weight
        model[2].unshard()
        with torch.no_grad():
            if how == "in place":
                model[2].weight.add_(1)
            else:
                assert model[2].weight.data.shape == (4, 4)
            for weight in (sharded, plain[2].weight):
                weight.mul_(2)
        if how == "in place":
            with pytest.raises(
                RuntimeError, match=r"'weight' .* while it was full, and its shard was changed"
            ):
                model[2].reshard()
        step_both(plain, model, 1, evaluate=True)


# -- extended parameters -------------------------------------------------------------------------------------


class Counted(HalfGathered):
    """Fills ``out`` by an operation that moves its version counter, as edits do."""

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        if out is None:
            return super().fsdp_post_all_gather(outputs, metadata, param_dtype)
        out.copy_(outputs[0][: out.size(0)])
        return None


@multirank(2)
@pytest.mark.parametrize(("kind", "keep"), [(HalfGathered, False), (HalfGathered, True), (Counted, True)])
def test_extended_parameters_that_nobody_edits_train(
    rank: int, world_size: int, kind: type[Stored], keep: bool
) -> None:
    model, plain = wrapped("shardwright", kind, reshard_after_forward=not keep)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    for micro in range(4):
        expected = straight_through(kind, plain, world_size, micro)
        backward_of_wrapped(model, rank, micro)
        check(gradients(model), expected, tol=2e-5)
        for name, p in plain.named_parameters():
            p.grad = expected[name]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@multirank(2)
@pytest.mark.parametrize("where", ["forward", "by hand"])
def test_edits_of_full_extended_parameters_are_refused(rank: int, world_size: int, where: str) -> None:
    model, _ = wrapped("shardwright", HalfGathered)
    with pytest.raises(RuntimeError, match=r"'weight' was changed in place.*HalfGathered"):
        if where == "forward":
            model.first.register_forward_pre_hook(lambda m, _: multiply(m))
            model(data_of_wrapped(rank))
        else:
            model.first.unshard()
            multiply(model.first)
            model.first.reshard()


# -- replaced, copied and written inside forward -------------------------------------------------------------


@multirank(2)
def test_a_parameter_replaced_inside_forward_after_its_use(rank: int, world_size: int) -> None:
    plain, model = twins(touched(after="replace"), "0", "2")
    for step in range(4):
        step_both(plain, model, step)


@multirank(2)
def test_a_parameter_replaced_inside_forward_and_then_used_is_refused(rank: int, world_size: int) -> None:
    """Its gradient is that of each rank alone, and nobody would reduce it."""
    plain, model = twins(touched(before="replace"), "0", "2")
    with pytest.raises(RuntimeError, match=r"'linear.weight' of unit '.*' was put in the place of another"):
        step_both(plain, model, 0)


class Codebook(nn.Module):
    """As in VQ-VAE: looked up first, then replaced by running means, which are replaced, too."""

    def __init__(self) -> None:
        super().__init__()
        self.codes, self.means = nn.Embedding(3, 4), nn.Parameter(torch.randn(3, 4))
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        quantized = self.codes(torch.cdist(x, self.codes.weight).argmin(1))
        self.means = nn.Parameter(self.means * 0.9 + 0.1)
        self.codes.weight = nn.Parameter(self.means / 2)
        return x + (quantized - x).detach() + 0.1 * quantized


@multirank(2)
@pytest.mark.parametrize("keep", [False, True])
def test_a_codebook_replaced_inside_forward(rank: int, world_size: int, keep: bool) -> None:
    make = lambda: nn.Sequential(nn.Linear(4, 4), Codebook(), nn.Linear(4, 4))  # noqa: E731
    plain, model = twins(make, "0", "1", reshard_after_forward=not keep)
    for step in range(4):
        step_both(plain, model, step, evaluate=True)


COPIES: list[nn.Module] = []


class Snapshot(Touched):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        COPIES.append(copy.deepcopy(self))
        return y + super().forward(x + 1)


@multirank(2)
def test_a_module_that_copies_itself_inside_forward(rank: int, world_size: int) -> None:
    plain, model = twins(lambda: nn.Sequential(Snapshot(), nn.Linear(4, 4), Snapshot()), "0", "2")
    for step in range(2):
        expected = copy.deepcopy(plain[2])
        step_both(plain, model, step)
        copied = COPIES[-1]
        assert isinstance(copied, sw.FSDPModule) and not isinstance(COPIES[-3], sw.FSDPModule)
        torch.testing.assert_close(copied(data()), expected(data()))
        COPIES.clear()


class Scaled(nn.Module):
    """A block with a parameter of its own, and with children."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.scale = nn.Linear(4, 6), nn.Linear(6, 4), nn.Parameter(torch.rand(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x))) * self.scale


@pytest.mark.extensive("compiled graphs")
@multirank(2)
@pytest.mark.parametrize("how", ["wrapped before", "in place before", "in place after"])
def test_a_unit_with_parameters_of_its_own_is_compiled(rank: int, world_size: int, how: str) -> None:
    os.environ["SHARDWRIGHT_POISON"] = "1"
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = nn.Sequential(Scaled(), Scaled())
    model = copy.deepcopy(plain)
    backend = CompileCounterWithBackend("aot_eager")
    for i in range(2):
        if how == "wrapped before":
            model[i] = torch.compile(model[i], backend=backend)
        elif how == "in place before":
            model[i].compile(backend=backend)
        sw.fully_shard(model[i])
        if how == "in place after":
            model[i].compile(backend=backend)
    sw.fully_shard(model)
    for step in range(3):
        step_both(plain, model, step)
    assert backend.frame_count >= 1 and backend.op_count >= 5  # one block as a whole
    torch._dynamo.reset()


class Writes(nn.Module):
    """Writes one of its weights in forward, and returns numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.large, self.small = nn.Linear(300, 300), nn.Linear(4, 4)
        self.written: dict[str, bytes] = {}

    def forward(self, x: torch.Tensor) -> np.ndarray:
        file = io.BytesIO()
        torch.save(self.small.weight, file)
        self.written = {"save": file.getvalue(), "pickle": pickle.dumps(self.small.weight)}
        return self.small(x).detach().numpy()


@multirank(2)
def test_a_full_weight_is_written_alone(rank: int, world_size: int) -> None:
    plain, model = twins(Writes)
    np.testing.assert_allclose(
        model(data()), plain(data()), rtol=1e-6
    )  # an output that is no tensor, by the way
    for how, expected in plain.written.items():
        assert len(model.written[how]) <= len(expected) + 100
    for parameter in (
        pickle.loads(model.written["pickle"]),
        torch.load(io.BytesIO(model.written["save"]), weights_only=False),
    ):
        assert type(parameter) is nn.Parameter
        torch.testing.assert_close(parameter.detach(), plain.small.weight.detach())
