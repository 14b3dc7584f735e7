"""Parameters that a program captured before ``fully_shard``: they are the sharded parameters afterwards.

A generated table: where a parameter is captured x what is done with it x layout x strategy x deferred or not. Each row
trains a model beside a plain one on different data of every rank.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import shardwright as sw
from shardwright.engine import RaggedTensor
from tests.engine.kit.models import full
from tests.engine.kit.strategies import everything
from tests.support import multirank, world_mesh

Find = Callable[[], list[torch.Tensor]]  #: the captured parameters


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(5, 7), nn.Linear(7, 3, bias=False), nn.Linear(3, 2)
        self.extra: Callable[[torch.Tensor], torch.Tensor] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.b(torch.tanh(self.a(x)))
        return self.c(y if self.extra is None else y + self.extra(y))


class Elsewhere(nn.Module):
    """A module outside of the model that holds its parameters."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.those = nn.ParameterList(model.parameters())


# -- where parameters are captured -------------------------------------------------------------------------------------


def by_id(model: nn.Module) -> Find:
    ids = {id(p) for p in model.parameters()}
    return lambda: [p for p in model.parameters() if id(p) in ids]


def weakly(model: nn.Module) -> Find:
    references = [weakref.ref(p) for p in model.parameters()]
    return lambda: [p for ref in references if (p := ref()) is not None]


def in_a_list(model: nn.Module) -> Find:
    those = list(model.parameters())
    return lambda: those


def in_a_dict(model: nn.Module) -> Find:
    named = dict(model.named_parameters())
    return lambda: list(named.values())


def in_an_optimizer(model: nn.Module) -> Find:
    optimizer = torch.optim.SGD(model.parameters())
    return lambda: optimizer.param_groups[0]["params"]


def in_another_module(model: nn.Module) -> Find:
    other = Elsewhere(model)
    return lambda: list(other.parameters())


def as_keys(model: nn.Module) -> Find:
    keys = dict.fromkeys(model.parameters())
    return lambda: [p for p in model.parameters() if p in keys]


CAPTURES: dict[str, Callable[[nn.Module], Find]] = {
    "list": in_a_list,
    "dict": in_a_dict,
    "ids": by_id,
    "weak references": weakly,
    "keys": as_keys,
    "param group": in_an_optimizer,
    "another module": in_another_module,
}

# -- what is done with them --------------------------------------------------------------------------------------------


class Use:
    """One use. Each method is a moment of a training of the model."""

    def __init__(self, model: Net, find: Find, sharded: bool) -> None:
        self.model, self.find, self.sharded = model, find, sharded
        self.seen: list[torch.Tensor] = []

    def begin(self) -> None: ...
    def penalty(self) -> torch.Tensor | float:
        return 0.0

    def before_step(self) -> None: ...
    def after_step(self) -> None: ...
    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)


class ClipByTorch(Use):
    def before_step(self) -> None:
        self.seen.append(nn.utils.clip_grad_norm_(self.find(), 0.05))


class Clip(Use):
    def before_step(self) -> None:
        clip = sw.clip_grad_norm_ if self.sharded else nn.utils.clip_grad_norm_
        self.seen.append(clip(self.find(), 0.05))


class Decay(Use):
    @torch.no_grad()
    def before_step(self) -> None:
        for p in self.find():
            p.mul_(0.9)


class DecayByData(Use):
    def before_step(self) -> None:
        for p in self.find():
            p.data.mul_(0.9)


class Average(Use):
    @torch.no_grad()
    def before_step(self) -> None:
        if not self.seen:
            self.seen = [p.detach().clone() for p in self.find()]
        for mean, p in zip(self.seen, self.find(), strict=True):
            mean.lerp_(p, 0.25)


class FreezeLater(Use):
    def after_step(self) -> None:
        for p in self.find():
            p.requires_grad_(p.ndim == 1)


class FreezeFirst(Use):
    def begin(self) -> None:
        self.find()[2].requires_grad = False


class Penalty(Use):
    def penalty(self) -> torch.Tensor:
        return 0.1 * sum((p**2).sum() for p in self.find())


class InForward(Use):
    def begin(self) -> None:
        self.model.extra = lambda y: nn.functional.linear(y, self.find()[3]).sum(-1, keepdim=True)


class HookOnGradient(Use):
    def begin(self) -> None:
        for p in self.find():
            p.register_hook(lambda gradient: gradient * 3)


class HookAfterGradient(Use):
    def begin(self) -> None:
        self.count = 0

        def count(p: torch.Tensor) -> None:
            self.count += 1

        for p in self.find():
            p.register_post_accumulate_grad_hook(count)

    def after_step(self) -> None:
        self.seen.append(torch.tensor(float(self.count)))


class ReadGradients(Use):
    def before_step(self) -> None:
        self.seen += [p.grad.detach().clone() for p in self.find()]  # type: ignore[union-attr]


class DropGradients(Use):
    def before_step(self) -> None:
        for p in self.find()[:3]:
            p.grad = None


class Load(Use):
    @torch.no_grad()
    def begin(self) -> None:
        for p in self.find():
            p.copy_(torch.arange(p.numel(), dtype=p.dtype).view(p.shape) / 50)


class SetData(Use):
    def begin(self) -> None:
        for p in self.find():
            p.data = p.data * 0.5


class OptimizerOfThem(Use):
    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.find(), lr=0.01)


class WrappedOptimizerOfThem(Use):
    def optimizer(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(self.find(), lr=0.01)
        return sw.fully_shard_optimizer(optimizer) if self.sharded else optimizer


class IsParameter(Use):
    def begin(self) -> None:
        own = list(self.model.parameters())
        assert all(isinstance(p, nn.Parameter) and p is q for p, q in zip(self.find(), own, strict=True))


USES = Use.__subclasses__()


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + rank))


def trained(
    use: type[Use],
    capture: Callable[[nn.Module], Find],
    rank: int,
    deferred: bool,
    options: dict[str, Any] | None,
) -> list[torch.Tensor]:
    torch.manual_seed(0)
    sharded = options is not None
    if deferred and sharded:
        with sw.deferred_init():
            model = Net()
    else:
        model = Net()
    find = capture(model)
    if sharded:
        sw.fully_shard(model.a, **options)
        sw.fully_shard(model, **options)
        sw.materialize(model)
    moment = use(model, find, sharded)
    moment.begin()
    optimizer = moment.optimizer()
    for step in range(3):
        optimizer.zero_grad()
        loss = model(batch(step, rank)).pow(2).mean() + moment.penalty()
        loss.backward()
        for p in model.parameters() if not sharded else ():
            if p.grad is not None:
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()
        moment.before_step()
        optimizer.step()
        moment.after_step()
    return [full(t.detach()) for t in (*model.parameters(), *moment.seen)]


def rows() -> Iterator[tuple[str, type[Use]]]:
    """Every pair of a capture and a use; in short runs each capture with some uses, and each use at least once."""
    for c, capture in enumerate(CAPTURES):
        for u, use in enumerate(USES):
            if everything() or (c + u) % len(CAPTURES) < 2:
                yield capture, use


STRATEGIES: dict[str, tuple[int, ...]] = {
    "zero3": (2,),
    "zero2": (2,),
    "zero1": (2,),
    "ddp": (2,),
    "hsdp": (1, 2),
}
LAYOUTS = {"per_parameter": "per_parameter", "ragged": "ragged", "element": "element", "blocks": sw.Ragged(2)}
PLACES = [
    pytest.param(layout, strategy, deferred, id=f"{layout}-{strategy}-{'deferred' if deferred else 'built'}")
    for layout in LAYOUTS
    for strategy in STRATEGIES
    for deferred in (False, True)
]


@multirank(2)
@pytest.mark.extensive(
    "all layouts and strategies", but=("per_parameter-zero3-built-*", "ragged-zero2-deferred-*")
)
@pytest.mark.parametrize(("layout", "strategy", "deferred"), PLACES)
def test_captured_parameters_are_the_sharded_ones(
    rank: int, world_size: int, layout: str, strategy: str, deferred: bool
) -> None:
    options = {"mesh": world_mesh(*STRATEGIES[strategy]), "strategy": strategy, "layout": LAYOUTS[layout]}
    for capture, use in rows():
        expected = trained(use, CAPTURES[capture], rank, deferred, None)
        found = trained(use, CAPTURES[capture], rank, deferred, options)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(  # sums over ranks round differently
                a, b, rtol=1e-4, atol=1e-6, msg=lambda m, row=(capture, use.__name__): f"{row}: {m}"
            )


# -- the objects themselves --------------------------------------------------------------------------------------------


class Scaled(nn.Parameter):
    """A user's class with methods and attributes."""

    def half(self) -> torch.Tensor:
        return self.detach() / 2


class Slotted(nn.Parameter):
    """Python lets no object of this class become a sharded parameter."""

    __slots__ = ("note",)


@multirank(2)
@pytest.mark.parametrize("layout", ["per_parameter", "ragged"])
def test_objects_stay_what_they_were(rank: int, world_size: int, layout: str) -> None:
    torch.manual_seed(0)
    model = Net()
    model.a.weight = Scaled(model.a.weight.detach())
    model.a.weight.learning = 3  # type: ignore[attr-defined]
    hooked: list[torch.Size] = []
    handle = model.b.weight.register_hook(lambda gradient: hooked.append(gradient.shape))
    before = [p.detach().clone() for p in model.parameters()]
    those, references = list(model.parameters()), [weakref.ref(p) for p in model.parameters()]
    shown: list[Any] = []
    model.a.register_forward_hook(lambda module, inputs, output, shown=shown: shown.append(module.weight))
    sw.fully_shard(model.a, layout=layout)
    sw.fully_shard(model, layout=layout)
    for p, ref, q, value in zip(those, references, model.parameters(), before, strict=True):
        assert p is q
        assert ref() is p
        assert torch.equal(full(p), value)
        assert isinstance(p, nn.Parameter)
        assert isinstance(p, RaggedTensor if layout == "ragged" else DTensor)
        assert p.is_leaf
        assert p.requires_grad
        for copied in (copy.deepcopy(p), nn.Parameter(p)):
            assert type(copied) is type(p)
            assert copied is not p
            assert torch.equal(full(copied), value)
    assert isinstance(those[0], Scaled)
    assert those[0].learning == 3  # type: ignore[attr-defined]
    assert torch.equal(full(those[0].half()), before[0] / 2)
    model(batch(0, rank)).sum().backward()
    assert isinstance(shown[0], Scaled)  # in forward too, where it is the whole parameter
    assert shown[0].learning == 3  # type: ignore[attr-defined]
    assert hooked == [torch.Size([3, 7])]
    handle.remove()
    model(batch(0, rank)).sum().backward()
    assert len(hooked) == 1
    twin = copy.deepcopy(model)
    assert isinstance(twin.a.weight, Scaled)
    assert torch.equal(full(twin.a.weight), before[0])
    gone = weakref.ref(those[0])
    shown.clear()  # the hook of the twin holds the list
    del model, those, p, q, copied
    gc.collect()
    assert gone() is None


@multirank(2)
@pytest.mark.parametrize("layout", ["per_parameter", "ragged"])
def test_a_graph_from_before_is_refused(rank: int, world_size: int, layout: str) -> None:
    model = Net()
    x = batch(0, rank).requires_grad_()
    output = model(x)
    sw.fully_shard(model, layout=layout)
    with pytest.raises(
        RuntimeError, match=r"Parameter '.*' of unit 'Net' was sharded between a forward and its backward"
    ):
        output.sum().backward()
    model = Net()
    expected = torch.autograd.grad(model(x).sum(), x)[0]
    output = model(x).sum()
    sw.fully_shard(model, layout=layout)
    assert torch.equal(torch.autograd.grad(output, x)[0], expected)  # it needs no gradient of a parameter


@multirank(1)
@pytest.mark.parametrize("layout", ["per_parameter", "ragged"])
def test_a_call_that_fails_gives_the_objects_back(rank: int, world_size: int, layout: str) -> None:
    torch.manual_seed(0)
    model = Net()
    model.a.weight = Scaled(model.a.weight.detach())
    output = model(batch(0, rank)).sum()
    calls: list[int] = []
    model.b.weight.register_hook(lambda gradient: calls.append(1))
    those, before = list(model.parameters()), [p.detach().clone() for p in model.parameters()]
    kinds, attributes = [type(p) for p in those], [dict(vars(p)) for p in those]
    with pytest.MonkeyPatch.context() as patch:

        def fail(*_: Any) -> None:
            raise KeyboardInterrupt

        patch.setattr("shardwright.engine.front.api.install", fail)
        with pytest.raises(KeyboardInterrupt):
            sw.fully_shard(model, layout=layout)
    assert [type(p) for p in those] == kinds
    assert [dict(vars(p)) for p in those] == attributes
    for p, q, value in zip(those, model.parameters(), before, strict=True):
        assert p is q
        assert type(p.data) is torch.Tensor
        assert torch.equal(p.detach(), value)
    output.backward()
    assert calls == [1]
    those[4].register_hook(lambda gradient: calls.append(2))
    model(batch(0, rank)).sum().backward()
    assert calls == [1, 1, 2] or calls == [1, 2, 1]
    assert all(p.grad is not None for p in those)


USES_OF_OLD: dict[str, Callable[[Any], Any]] = {
    "clip": lambda p: sw.clip_grad_norm_([p], 1.0),
    "clip by torch": lambda p: nn.utils.clip_grad_norm_([p], 1.0),
    "decay": lambda p: p.mul_(0.9),
    "data": lambda p: p.data.mul_(0.9),
    "average": lambda p: torch.zeros(7, 5).lerp_(p, 0.5),
    "averages": lambda p: torch._foreach_lerp_([torch.zeros(7, 5)], [p], 0.5),
    "freeze": lambda p: p.requires_grad_(False),
    "freeze by attribute": lambda p: setattr(p, "requires_grad", False),
    "penalty": lambda p: (p**2).sum(),
    "forward": lambda p: nn.functional.linear(torch.ones(2, 5), p),
    "hook": lambda p: p.register_hook(print),
    "gradient": lambda p: p.grad,
    "zero_grad": lambda p: setattr(p, "grad", None),
    "step": lambda p: torch.optim.SGD([p], lr=0.1).step(),
    "zero_grad of an optimizer": lambda p: torch.optim.SGD([p], lr=0.1).zero_grad(),
    "numpy": lambda p: p.detach().numpy(),
    "copy": copy.deepcopy,
}


@multirank(2)
@pytest.mark.parametrize("layout", ["per_parameter", "ragged"])
@pytest.mark.parametrize("why", ["slots", "version"])
def test_an_object_that_cannot_stay_refuses_every_use(
    rank: int, world_size: int, layout: str, why: str
) -> None:
    """As on torch 2.11, where no object can become a sharded parameter."""
    model = Net()
    if why == "slots":
        model.a.weight = Slotted(model.a.weight.detach())
    old = model.a.weight
    kept = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.MonkeyPatch.context() as patch:
        if why == "version":
            patch.setattr("shardwright.engine.tensors.same_object.objects_become_sharded", False)
        sw.fully_shard(model, layout=layout)
        assert old is not model.a.weight
        assert old.shape == (7, 5)
        assert old.dtype == torch.float32
        for name, use in USES_OF_OLD.items():
            with pytest.raises(RuntimeError) as error:
                use(old)
            assert "Parameter 'a.weight of Net' was used through its old object" in str(error.value), name
        with pytest.raises(
            RuntimeError, match=r"Parameter 'a.weight of Net' was used through its old object"
        ):
            kept.step()
    sw.fully_shard_optimizer(kept)
    assert kept.param_groups[0]["params"][0] is model.a.weight
