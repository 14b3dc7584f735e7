"""Parameters made of views, values and copies of sharded ones: what they train is what every state dict shows.

Everything is compared with a plain model, after every step, in each form in which a user can read it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import shardwright as sw
from tests.engine.kit.models import full
from tests.support import multirank, world_mesh

STRATEGIES = ["ddp", "zero1", "zero2", "zero3"]
#: What is put in the place of a layer's weight, given the model and the layer's name.
WAYS: dict[str, Callable[[nn.Module, str], torch.Tensor]] = {
    "data": lambda model, name: model.get_submodule(name).weight.data,
    "detached": lambda model, name: model.get_submodule(name).weight.detach(),
    "of state dict": lambda model, name: model.state_dict()[f"{name}.weight"],
    "detached data": lambda model, name: model.get_submodule(name).weight.data.detach(),
    "view": lambda model, name: model.get_submodule(name).weight.data.view(4, 4),
    "copied": lambda model, name: model.get_submodule(name).weight.detach().clone(),
    "deep copy": lambda model, name: copy.deepcopy(model.get_submodule(name).weight),
    "kept": lambda model, name: model.get_submodule(name).weight,
}


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in WAYS))


def sharded(plain: nn.Module, **options: Any) -> nn.Module:
    model = copy.deepcopy(plain)
    for number in range(0, len(model), 2):
        sw.fully_shard([model[number], model[number + 1]], **options)
    return sw.fully_shard(model, **options)


def replace_all(model: nn.Module) -> None:
    for number, way in enumerate(WAYS.values()):
        layer = model.get_submodule(f"{number}.0")
        layer.weight = nn.Parameter(way(model, f"{number}.0"))


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    rank = dist.get_rank()
    optimizer.zero_grad()
    model(
        torch.randn(3, 4, generator=torch.Generator().manual_seed(100 * step + rank))
    ).square().sum().backward()
    if not hasattr(next(model.parameters()), "to_local"):
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
    optimizer.step()


def saved(model: nn.Module, folder: Path) -> dict[str, torch.Tensor]:
    """The content of a checkpoint of torch's, read as one of plain tensors."""
    dcp.save(model.state_dict(), checkpoint_id=folder)
    values = {n: torch.zeros(p.shape) for n, p in model.named_parameters()}
    dcp.load(values, checkpoint_id=folder)
    return values


def readings(model: nn.Module, folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """The parameters' values in every form in which they can be read."""
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    results = {
        "parameters": {n: full(p) for n, p in model.named_parameters()},
        "detached": {n: full(p.detach()) for n, p in model.named_parameters()},
        "data": {n: full(p.data) for n, p in model.named_parameters()},
        "state dict": {n: full(t) for n, t in model.state_dict().items()},
        "full state dict": whole,
        "copies": {n: full(copy.deepcopy(p)) for n, p in model.named_parameters()},
        "clones": {n: full(p.clone()) for n, p in model.named_parameters()},
    }
    if all(
        t.is_leaf for t in vars(model[0][0]).values() if isinstance(t, torch.Tensor)
    ):  # not of weight_norm
        results["copy"] = {n: full(p) for n, p in copy.deepcopy(model).named_parameters()}
    with sw.unsharded(model):
        results["unsharded"] = {n: p.detach().clone() for n, p in model.named_parameters()}
    results["checkpoint"] = saved(model, folder)
    return results


def check(plain: nn.Module, model: nn.Module, folder: Path, what: str) -> None:
    for how, values in readings(model, folder).items():
        for name, p in plain.named_parameters():
            assert torch.allclose(values[name], p, rtol=1e-5, atol=1e-6), f"{what}: {how} of {name}"


def train_and_check(model: nn.Module, plain: nn.Module, folder: Path, what: str) -> None:
    """Sums over ranks are taken in another order than the plain model's, hence the tolerance."""
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (plain, model)]
    for step in range(2):
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            step_of(each, optimizer, step)
    check(plain, model, folder, what)


@pytest.mark.extensive("each strategy", but=("ddp-*",))
@multirank(2, timeout=120)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_trains_is_what_state_dicts_show(
    rank: int, world_size: int, strategy: str, tmp_path: Path
) -> None:
    """Every two values of strategy, layout and way occur together."""
    for number, layout in enumerate(("per_parameter", "ragged", sw.Ragged("element"))):
        how = ("replaced", "assigned")[(number + STRATEGIES.index(strategy)) % 2]
        plain = layers()
        model = sharded(plain, layout=layout, strategy=strategy)
        for m in (plain, model):
            if how == "replaced":
                replace_all(m)
            else:
                m.load_state_dict(m.state_dict(), assign=True)
        train_and_check(model, plain, tmp_path / f"{number}{how}", f"{layout}, {how}")


@pytest.mark.extensive("on a mesh")
@multirank(4, timeout=120)
def test_what_trains_is_what_state_dicts_show_on_two_axes(rank: int, world_size: int, tmp_path: Path) -> None:
    mesh = world_mesh(2, 2, names=("replicate", "shard"))
    for strategy in ("hsdp", "hfsdp"):
        for layout in ("per_parameter", "ragged"):
            plain = layers()
            model = sharded(plain, layout=layout, strategy=strategy, mesh=mesh)
            for m in (plain, model):
                replace_all(m)
            train_and_check(model, plain, tmp_path / f"{strategy}{layout}", f"{strategy}, {layout}")


@multirank(1, 2)
def test_transposed_views_become_parameters(rank: int, world_size: int, tmp_path: Path) -> None:
    plain = layers()
    model = sharded(plain)
    for m in (plain, model):
        weight = m[0][0].weight
        torch.testing.assert_close(full(weight.data.t().detach()), full(weight.detach()).t(), rtol=0, atol=0)
        m[0][0].weight = nn.Parameter(weight.data.t())
        m[1][0].weight = nn.Parameter(m[1][0].weight.t().detach())
    train_and_check(model, plain, tmp_path / "saved", "transposed")


@multirank(2)
def test_weight_norm_after_sharding(rank: int, world_size: int, tmp_path: Path) -> None:
    plain = layers()
    model = sharded(plain)
    for m in (plain, model):
        torch.nn.utils.weight_norm(m[0][0])
    train_and_check(model, plain, tmp_path / "saved", "weight_norm")
