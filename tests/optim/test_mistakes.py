"""Mistakes with optimizers and clipping beside a sharded model: the error says what to do."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

import shardwright as sw
from tests.support import multirank, world_mesh


@multirank(2)
def test_an_optimizer_of_another_model_is_refused(rank: int, world_size: int) -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    sw.fully_shard(model, mesh=world_mesh(world_size))
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(ValueError, match="None of the 2 parameters of this SGD belongs to a sharded model"):
        sw.fully_shard_optimizer(other)
    mixed = torch.optim.SGD([*model.parameters(), *nn.Linear(2, 2).parameters()], lr=0.1)
    assert sw.fully_shard_optimizer(mixed) is mixed


@multirank(2)
def test_a_second_call_for_an_optimizer_must_have_equal_arguments(rank: int, world_size: int) -> None:
    model: Any = nn.Linear(4, 4)
    sw.fully_shard(model, mesh=world_mesh(world_size), layout=sw.Ragged(4))
    optimizer = sw.fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), needs=4)
    for needs in (None, 4, lambda p: 4):
        assert sw.fully_shard_optimizer(optimizer, needs=needs) is optimizer
    with pytest.raises(
        ValueError, match=r"needs: expected 4 for parameter weight of Linear, .* ShardedSGD, got 1"
    ):
        sw.fully_shard_optimizer(optimizer, needs=1)
    sw.optim.in_backward(optimizer, clip_value=0.5)
    for clip in (None, 0.5):
        assert sw.optim.in_backward(optimizer, clip_value=clip) is optimizer
    with pytest.raises(ValueError, match=r"clip_value: expected 0\.5, as in the first call .*SGD, got 2\.0"):
        sw.optim.in_backward(optimizer, clip_value=2.0)
    optimizer.leave_backward()  # type: ignore[attr-defined]
    assert sw.optim.in_backward(optimizer, clip_value=2.0) is optimizer


@multirank(2)
@pytest.mark.parametrize("foreach", [None, True, False])
def test_torchs_clipping_of_mixed_gradients_names_ours(
    rank: int, world_size: int, foreach: bool | None
) -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    sw.fully_shard(model, mesh=world_mesh(world_size), ignored_params=set(model[1].parameters()))
    model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(RuntimeError, match=r"sw\.clip_grad_norm_"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=foreach)


@multirank(2)
@pytest.mark.parametrize("layout", ["per_parameter", "ragged"])
@pytest.mark.parametrize("way", ["others", "order", "fewer", "none"])
def test_ranks_clip_the_same_parameters(rank: int, world_size: int, layout: str, way: str) -> None:
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    sw.fully_shard(model, mesh=world_mesh(world_size), layout=layout)
    model(torch.ones(2, 8)).sum().backward()
    parameters = list(model.parameters())
    one, two, words = {
        "others": (parameters[:2], parameters[2:], r"parameters\. Call"),
        "order": (parameters, parameters[::-1], r"parameters\. Call"),
        "fewer": (parameters[1:], parameters, r"\(3 gradients on rank 0; 4 gradients on rank 1\)"),
        "none": (parameters, parameters, r"\(4 gradients on rank 0; 0 gradients on rank 1\)"),
    }[way]
    gradients = [p.grad for p in parameters]
    if way == "none" and rank:
        model.zero_grad()
    with pytest.raises(RuntimeError, match=f"The ranks have diverged: they clip gradients of .*{words}"):
        sw.clip_grad_norm_(two if rank else one, 1.0)
    for p, gradient in zip(parameters, gradients, strict=True):
        p.grad = gradient
    assert sw.clip_grad_norm_(parameters, 1.0) > 0  # all ranks have the same error, and go on


@multirank(2)
def test_a_second_call_names_the_module(rank: int, world_size: int) -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for module in (model[0], model):
        sw.fully_shard(module, mesh=world_mesh(world_size))
    with pytest.raises(
        ValueError, match="this Linear: it is unit 'Linear', with parameters 'weight', 'bias'"
    ):
        sw.fully_shard(model[0], mesh=world_mesh(world_size))
    model(torch.ones(1, 4))
    with pytest.raises(ValueError, match="this Linear: it is unit '0', with parameters"):
        sw.fully_shard(model[0], mesh=world_mesh(world_size))


@multirank(2)
def test_the_group_says_whether_the_full_weights_are_there(rank: int, world_size: int) -> None:
    model: Any = nn.Linear(4, 4)
    sw.fully_shard(model, mesh=world_mesh(world_size))
    group = model._get_fsdp_state()._fsdp_param_group
    seen = []
    model.register_forward_hook(lambda *_: seen.append(group.is_unsharded), prepend=True)
    assert not group.is_unsharded
    loss = model(torch.ones(1, 4)).sum()
    assert seen == [True] and group.is_unsharded  # the root keeps them until backward
    loss.backward()
    assert group.is_sharded and not group.is_unsharded
    model.unshard()
    assert group.is_unsharded
    model.reshard()
    assert group.is_sharded


@multirank(2)
def test_a_module_is_listed_once(rank: int, world_size: int) -> None:
    one, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"one Linear at places \[0, 2\] of its list"):
        sw.fully_shard([one, other, one])
    sw.fully_shard([one, other])


#: Options of the optimizers that take gradients of another dtype.
OPTIONS: dict[type[torch.optim.Optimizer], dict[str, tuple[Any, ...]]] = {
    torch.optim.SGD: {"momentum": (0, 0.9), "dampening": (0, 0.5), "nesterov": (False, True)},
    torch.optim.Adagrad: {"lr_decay": (0, 0.1), "initial_accumulator_value": (0, 0.5)},
    torch.optim.Adadelta: {},
    torch.optim.RMSprop: {"momentum": (0, 0.9), "centered": (False, True)},
    torch.optim.ASGD: {},
    torch.optim.Adam: {"amsgrad": (False, True)},
    torch.optim.Adamax: {},
}
ALL_OPTIONS: dict[str, tuple[Any, ...]] = {
    "foreach": (None, True, False), "weight_decay": (0, 0.1), "maximize": (False, True),
}  # fmt: skip


@multirank(1)
def test_optimizers_step_gradients_of_another_dtype_or_say_that_they_do_not(
    rank: int, world_size: int
) -> None:
    wrong = []
    policy = sw.PrecisionPolicy(param_dtype=torch.bfloat16, grad_dtype=torch.bfloat16)
    for kind, own in OPTIONS.items():
        options = own | ALL_OPTIONS
        for values in itertools.product(*options.values()):
            given = dict(zip(options, values, strict=True))
            model = nn.Linear(3, 2)
            sw.fully_shard(model, mesh=world_mesh(1), mp_policy=policy)
            try:
                optimizer = kind(model.parameters(), lr=0.1, **given)  # type: ignore[call-arg]
            except ValueError:
                continue  # options that exclude one another
            model(torch.ones(2, 3)).float().sum().backward()
            try:
                sw.fully_shard_optimizer(optimizer).step()
            except RuntimeError as error:
                if "Leave grad_dtype at None" not in str(error):
                    wrong.append(f"{kind.__name__} {given}: {error}")
    assert not wrong, "\n".join(wrong)
