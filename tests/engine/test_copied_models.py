"""Deep copies of models with other features: attention over ranks, tensor parallelism, compilation, adapters.

A copy is made before or after `fully_shard`. It computes as its original, with weights of its own, and both train on as
the plain model does.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardwright as sw
from shardwright.activations import checkpoint_blocks
from shardwright.train.config import FinetuneConfig
from shardwright.train.finetune.adapters import adapt
from tests.engine.kit.models import full
from tests.support import multirank, world_mesh

WIDTH, LENGTH = 8, 12


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _tensor_parallel(model: Model) -> None:
    mesh = world_mesh(1, torch.distributed.get_world_size(), names=("dp", "tp"))
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})


def _adapters(model: Model, method: str = "lora", **more: Any) -> None:
    adapt(model, FinetuneConfig(method=method, rank=2, **more), seed=0)


def _compile_modules(model: Model) -> None:
    for block in model.blocks:
        block.compile(backend="eager")


def _wrap(model: Model) -> None:
    for number, block in enumerate(model.blocks):
        model.blocks[number] = cast(nn.Module, torch.compile(block, backend="eager"))


class Locked(Block):
    """A block that cannot be copied with all its attributes."""

    lock: Any

    def __getstate__(self) -> tuple[dict[str, Any], int]:
        return {key: value for key, value in self.__dict__.items() if key != "lock"}, 5

    def __setstate__(self, state: tuple[dict[str, Any], int]) -> None:  # type: ignore[override]
        super().__setstate__(state[0])
        self.lock = threading.Lock()

    def forward(self, x: Tensor) -> Tensor:
        with self.lock:
            return super().forward(x)


def _lock(model: Model) -> None:
    for block in model.blocks:
        block.__class__, block.lock = Locked, threading.Lock()


#: Changes of a model before or after it is sharded.
FEATURES: dict[str, Callable[[Model], Any]] = {
    "context": lambda m: sw.context_parallel(m, world_mesh(torch.distributed.get_world_size())),
    "tensor": _tensor_parallel,
    "compiled module": lambda m: m.compile(backend="eager"),
    "compiled blocks": _compile_modules,
    "wrapped blocks": _wrap,
    "own state": _lock,
    "checkpoints": lambda m: checkpoint_blocks(m.blocks, "full"),
    "offload": lambda m: sw.offload_activations(m.blocks, min_bytes=0),
    "lora": _adapters,
    "dora": lambda m: _adapters(m, "dora"),
}
BEFORE_ONLY = ("tensor", "wrapped blocks", "own state", "lora", "dora")


def _shard(model: Model, feature: str) -> None:
    world = torch.distributed.get_world_size()
    mesh = world_mesh(1, world, names=("dp", "tp"))["dp"] if feature == "tensor" else world_mesh(world)
    for unit in (*model.blocks, model):
        sw.fully_shard(unit, mesh=mesh)


def _input(feature: str, rank: int, step: int) -> Tensor:
    whole = torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(step))
    if feature == "context":
        return sw.context.shard(whole, world_mesh(torch.distributed.get_world_size()))
    if feature == "tensor":
        return whole
    return torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def _step(model: Model, x: Tensor) -> tuple[Tensor, list[Tensor | None]]:
    model.zero_grad()
    out = model(x)
    out.square().mean().backward()
    return out.detach(), [
        None if p.grad is None else full(p.grad.detach()).clone() for p in model.parameters()
    ]


def _equal(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


class Copied(Block):
    def __deepcopy__(self, memo: Any) -> Copied:
        raise NotImplementedError


@multirank(2)
def test_a_deepcopy_of_its_own_is_not_called_and_that_is_said(rank: int, world_size: int) -> None:
    model = Model()
    model.blocks[0].__class__ = Copied
    _shard(model, "")
    with pytest.warns(UserWarning, match="sharded Copied does not call the __deepcopy__ of its class"):
        other = copy.deepcopy(model)
    x = _input("", rank, 0)
    _equal(_step(other, x), _step(model, x))


#: The feature, whether it is before `fully_shard`, and the copy: of a model that nobody shards, before, or after it.
CASES = [
    *(
        (feature, "feature first", copied)
        for feature in FEATURES
        for copied in ("alone", "before", "after")
        if feature != "wrapped blocks" or copied == "after"  # a copy of torch's wrapper has no hooks
    ),
    *((feature, "sharded first", "after") for feature in FEATURES if feature not in BEFORE_ONLY),
]
STAY = (
    "context*before*",
    "tensor*after*",
    "compiled module-sharded*",
    "wrapped blocks*after*",
    "own state*after*",
    "checkpoints*alone*",
    "lora*after*",
)


@pytest.mark.extensive("each feature, before and after", but=STAY)
@multirank(2)
@pytest.mark.parametrize(("feature", "order", "copied"), CASES)
def test_a_copy_is_a_model_of_its_own(
    rank: int, world_size: int, feature: str, order: str, copied: str
) -> None:
    torch.manual_seed(0)
    model = Model()
    if order == "sharded first":
        _shard(model, feature)
    FEATURES[feature](model)
    calls: list[Any] = []
    model.blocks[0].register_forward_hook(lambda module, *_: calls.append(module))
    if copied != "after":
        other = copy.deepcopy(model)
    if order == "feature first" and copied != "alone":
        _shard(model, feature)
        if copied == "before":
            _shard(other, feature)
    if copied == "after":
        _step(model, _input(feature, rank, 0))
        model.zero_grad()
        other = copy.deepcopy(model)
    calls.clear()
    x = _input(feature, rank, 1)
    wanted = _step(model, x)
    _equal(_step(other, x), wanted)
    assert {id(each) for each in calls} == {id(model.blocks[0]), id(other.blocks[0])}
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(2)
    changed = other(x).detach()
    assert not torch.allclose(changed, wanted[0])
    _equal(_step(model, x), wanted)
    kept = [full(p.detach()).clone() for p in model.parameters()]
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    optimizer.step()
    for p, old, gradient in zip(model.parameters(), kept, wanted[1], strict=True):
        _equal(full(p.detach()), old if gradient is None else old - 0.1 * gradient)
    assert torch.equal(other(x), changed)
