"""Modules as people write them, against the plain model: behaviours x accumulation x precision x reshard x place.

A `Case` is one behaviour: how the model is built, which modules are units, what one micro-batch does (forward and
backward), and what the user does to the model between. The same functions run on the sharded model and on a copy of the
plain model, both with this rank's data; the plain model's gradients are averaged over the ranks. A place is a strategy
on a mesh, and a layout. Which settings a behaviour meets is said in `shows`; tests/support/matrix.py tells how to run
more of them.
"""

from __future__ import annotations

import copy
import dataclasses
import io
import itertools
import math
import os
import pickle
import random
from collections import Counter, OrderedDict, namedtuple
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import shardwright as sw
from shardwright.memory import Slab
from tests.engine.kit.places import On, on
from tests.engine.programs import LAYOUTS, differences
from tests.support import CaseFailed, WorkerPools, multirank
from tests.support.matrix import covering, select, together

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
#: Both models start every step from the same bits (`differences`), so only the order of sums over ranks and
#: micro-batches differs: some 1e-7 of the largest element. With bfloat16 the sums over ranks are float32 as well.
TOLERANCE = 1e-5


# -- how a case runs -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one rank: its place, and data that no other place has."""

    step: int
    micro: int
    micros: int
    rank: int
    world_size: int
    dtype: torch.dtype

    def randn(self, *shape: int, slot: int = 0) -> torch.Tensor:
        """Values that bfloat16 holds exactly, so that casting inputs early or late makes no difference."""
        return torch.randn(shape, generator=self._generator(slot)).bfloat16().to(self.dtype)

    @property
    def x(self) -> torch.Tensor:
        return self.randn(3, DIM)

    @property
    def ids(self) -> torch.Tensor:
        return torch.randint(0, 11, (2, 4), generator=self._generator(9))

    def _generator(self, slot: int) -> torch.Generator:
        seed = ((self.step * 10 + self.micro) * 10 + self.rank) * 10 + slot
        return torch.Generator().manual_seed(seed)


class Case:
    """A behaviour. Subclasses override what they need; instances carry the variant."""

    steps = 3
    precisions: tuple[str, ...] = ("fp32", "bf16")
    #: Whether the plain model adds up in bfloat16 what is added in float32 (several backwards in a micro-batch), or in
    #: another order (nodes of the engine take part in the order in which autograd runs branches).
    sums_differ_in_bf16 = False
    rebuild_optimizer = False  #: after every edit, since parameters or the model are others

    def build(self) -> nn.Module:
        return Net()

    def units(self, model: Any) -> list[Any]:
        """What ``fully_shard`` is applied to, inner units first; the last is usually the model."""
        return [*model.blocks, model]

    def before_sharding(self, model: Any) -> None:
        """Also done to the plain model."""

    def after_sharding(self, model: Any) -> None:
        """Also done to the plain model."""

    def clone(self, model: nn.Module) -> nn.Module:
        """A plain model to compute one micro-batch on."""
        return copy.deepcopy(model)

    def edit(self, model: Any, step: int) -> nn.Module | None:
        """What the user does before a step, gradients being None; may return another model to go on with."""

    def between(self, model: Any, step: int, micro: int) -> None:
        """What the user does before a micro-batch."""

    def mishap(self, model: Any, batch: Batch) -> None:
        """Something that fails before the step and must leave no trace after ``zero_grad``."""

    def train(self, model: Any, batch: Batch) -> Any:
        """Forward and backward of one micro-batch; returns what is to be equal, too."""
        loss = loss_of(model(batch.x))
        loss.backward()
        return loss

    def update(self, optimizer: torch.optim.Optimizer, model: Any, step: int) -> Any:
        """The optimizer's step; returns what is to be equal, too."""
        optimizer.step()


def loss_of(*outputs: torch.Tensor) -> torch.Tensor:
    """A loss of which no gradient is zero by symmetry."""
    return sum(
        (y.float().square().mean() + 0.3 * y.float().sum() / y.numel() for y in outputs), torch.zeros(())
    )


def sharded_modules(model: nn.Module) -> list[sw.FSDPModule]:
    return [m for m in model.modules() if isinstance(m, sw.FSDPModule)]


def run(
    case: Case,
    rank: int,
    world_size: int,
    accumulation: str,
    precision: str,
    reshard: bool | None,
    place: Place | None,
) -> None:
    """Train the sharded and the plain model side by side and compare after every step.

    Without a ``place`` both are plain, on one rank: that checks the case itself.
    """
    compute = BF16 if precision == "bf16" else FP32
    tolerance = 1e-2 if compute is BF16 and case.sums_differ_in_bf16 else TOLERANCE
    torch.manual_seed(0)
    model: Any = case.build()
    case.before_sharding(model)
    plain = case.clone(model)
    policy = sw.MixedPrecisionPolicy(
        None if compute is FP32 else compute, reduce_dtype=FP32 if compute is BF16 else None
    )
    sharded = place is not None
    if place is not None:
        options: dict[str, Any] = {
            "mesh": place.at.mesh,
            "strategy": place.at.strategy,
            "layout": LAYOUTS[place.layout],
            # True is refused where full parameters are kept for the step.
            "reshard_after_forward": reshard if reshard in place.at.reshards else None,
            "mp_policy": policy,
        }
        for unit in case.units(model):
            sw.fully_shard(unit, **options)
    case.after_sharding(model)
    case.after_sharding(plain)
    optimizer, expected = make_optimizer(model, sharded), make_optimizer(plain, False)
    micros = 1 if accumulation == "single" else 2
    for step in range(case.steps):
        with torch.random.fork_rng():
            model = case.edit(model, step) or model
        plain = case.edit(plain, step) or plain
        if case.rebuild_optimizer:
            optimizer, expected = make_optimizer(model, sharded), make_optimizer(plain, False)
        batch = Batch(step, 7, micros, rank, world_size, FP32)
        if type(case).mishap is not Case.mishap:
            case.mishap(work_copy(case, plain, compute), dataclasses.replace(batch, dtype=compute))
            case.mishap(model, batch)
        zero_grad(model, optimizer, step)
        zero_grad(plain, expected, step)
        wrong: list[str] = []
        for micro in range(micros):
            case.between(model, step, micro)
            case.between(plain, step, micro)
            for module in sharded_modules(model):
                module.set_requires_gradient_sync(accumulation != "hold" or micro == micros - 1)
                module.set_requires_all_reduce(accumulation != "late" or micro == micros - 1)
            batch = Batch(step, micro, micros, rank, world_size, FP32)
            told = detached(case.train(model, batch))
            wanted = reference_step(case, plain, batch, compute)
            wrong += output_differences(told, wanted, f"step {step} micro-batch {micro}", tolerance)
        found = differences(model, plain, tolerance, wrong)
        assert not found, f"step {step}, gradients:\n" + "\n".join(found)
        told, wanted = (
            detached(case.update(optimizer, model, step)),
            detached(case.update(expected, plain, step)),
        )
        wrong = output_differences(told, wanted, f"after step {step}", tolerance)
        found = differences(model, plain, tolerance, wrong, adopt=True)
        assert not found, f"step {step}, after the optimizer:\n" + "\n".join(found)


def make_optimizer(model: nn.Module, sharded: bool) -> torch.optim.Optimizer:
    # Weight decay moves a parameter whose gradient should be None and is zero instead.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.05)
    return sw.fully_shard_optimizer(optimizer) if sharded else optimizer


def zero_grad(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """The ways in which people clear gradients, in turn."""
    if step % 3 == 0:
        model.zero_grad()
    elif step % 3 == 1:
        optimizer.zero_grad()
    else:
        for p in model.parameters():
            p.grad = None


def work_copy(case: Case, plain: nn.Module, compute: torch.dtype) -> nn.Module:
    """The plain model in the compute dtype, without gradients. Buffers keep their dtype, as under a policy."""
    work = case.clone(plain)
    for p in work.parameters():
        p.grad = None
        if compute is not FP32:
            p.data = p.data.to(compute)
    return work


def reference_step(case: Case, plain: nn.Module, own: Batch, compute: torch.dtype) -> Any:
    """Run this rank's micro-batch on a copy of ``plain``, and add the mean over all ranks to ``plain``'s gradients.

    The mean is by one plain all-reduce in float64, so every rank must call it.
    """
    work = work_copy(case, plain, compute)
    told = detached(case.train(work, dataclasses.replace(own, dtype=compute)))
    for mine, buffer in zip(plain.buffers(), work.buffers(), strict=True):
        mine.copy_(buffer)
    parameters = list(zip(work.parameters(), plain.parameters(), strict=True))
    # In the dtype of the parameter, as gradients are handed over. The last items say how many ranks have one.
    gradients = [torch.zeros_like(q) if p.grad is None else p.grad.to(q.dtype) for p, q in parameters]
    there = torch.tensor([p.grad is not None for p, _ in parameters], dtype=FP64)
    everything = torch.cat([*(g.detach().flatten().to(FP64) for g in gradients), there])
    if own.world_size > 1:
        dist.all_reduce(everything)
    *totals, there = everything.split([*(g.numel() for g in gradients), len(there)])
    for (_, q), total, users in zip(parameters, totals, there, strict=True):
        if users:
            mean = (total / own.world_size).view(q.shape).to(q.dtype)
            q.grad = mean if q.grad is None else q.grad + mean
    return told


def detached(told: Any) -> list[torch.Tensor]:
    told = [] if told is None else [told] if isinstance(told, torch.Tensor) else told
    return [t.detach().clone() for t in told]


def output_differences(
    told: list[torch.Tensor], wanted: list[torch.Tensor], where: str, tolerance: float
) -> list[str]:
    found = [] if len(told) == len(wanted) else [f"{where}: {len(told)} results instead of {len(wanted)}"]
    for i, (mine, theirs) in enumerate(zip(told, wanted, strict=False)):
        error = (
            (mine.float() - theirs.float()).abs().max().item() if mine.shape == theirs.shape else float("inf")
        )
        if not error <= tolerance * max(1.0, theirs.float().abs().max().item()):
            found.append(f"{where}: result {i} is off by {error:.1e}")
    return found


# -- models ----------------------------------------------------------------------------------------------------------

DIM, HIDDEN = 6, 5  # HIDDEN divides evenly over neither 2 nor 3 ranks


class Block(nn.Module):
    def __init__(self, dim: int = DIM, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.down(torch.tanh(self.up(x))))


class Net(nn.Module):
    """Input layer, blocks, output layer; ``path`` says which blocks run, in which order."""

    def __init__(self, layers: int = 3, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(block() for _ in range(layers))
        self.head = nn.Linear(DIM, 4)

    def forward(self, x: torch.Tensor, path: tuple[int, ...] | None = None) -> torch.Tensor:
        x = self.first(x)
        for i in range(len(self.blocks)) if path is None else path:
            x = self.blocks[i](x)
        return self.head(x)


CASES: dict[str, Case] = {}


def case(name: str, *arguments: Any, **options: Any) -> Callable[[type[Case]], type[Case]]:
    """Enter an instance of the class into the matrix; a class may be entered several times."""

    def enter(cls: type[Case]) -> type[Case]:
        assert name not in CASES
        CASES[name] = cls(*arguments, **options)
        return cls

    return enter


# -- order, skips, repeats -------------------------------------------------------------------------------------------


@case("plain")
class Plain(Case):
    pass


@case("order changes between steps", lambda b: [(0, 1, 2), (2, 0, 1), (1, 2, 0)][b.step])
@case("order changes between micro-batches", lambda b: [(0, 1, 2), (2, 1, 0)][b.micro % 2])
@case("skipped in one micro-batch", lambda b: (0, 2) if b.micro == 1 or b.step == 1 else (0, 1, 2))
@case("skipped in the last micro-batch of a step", lambda b: (2,) if b.micro == b.micros - 1 else (0, 1, 2))
@case("skipped in a whole step", lambda b: (0, 1, 2) if b.step != 1 else (0,))
@case("skipped from the first step on", lambda b: (1, 2) if b.step < 2 else (2, 1, 0))
@case("called twice", lambda b: (0, 1, 0, 2))
@case("called twice in a row", lambda b: (0, 0, 1, 1, 2))
@case("called twice in some micro-batches", lambda b: (0, 1, 2, 1) if (b.step + b.micro) % 2 else (2, 1))
@case("no block at all", lambda b: () if b.step == 1 else (0, 1, 2))
class Path(Case):
    def __init__(self, path: Callable[[Batch], tuple[int, ...]]) -> None:
        self.path = path

    def train(self, model: Any, batch: Batch) -> Any:
        y = model(batch.x, self.path(batch))
        loss_of(y).backward()
        return y


class Recursion(Block):
    def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
        x = super().forward(x)
        return self(x, depth - 1) if depth else x


class CallsAnother(Block):
    """Its forward runs the block it is given, perhaps itself, in its middle."""

    def forward(self, x: torch.Tensor, inner: nn.Module | None = None) -> torch.Tensor:
        x = torch.tanh(self.up(x))
        x = self.down(x)
        return x if inner is None else x + inner(x)


@case("recursive unit")
class Recursive(Case):
    def build(self) -> nn.Module:
        return Net(2, Recursion)


@case("unit called inside another's forward and on its own")
class Interleaved(Case):
    def build(self) -> nn.Module:
        return Scripted(Net(2, CallsAnother))

    def units(self, model: Any) -> list[Any]:
        return [*model.net.blocks, model]


class Scripted(nn.Module):
    def __init__(self, net: Net) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, two = self.net.blocks
        return self.net.head(two(one(self.net.first(x), inner=two), inner=one))


@case("recursive root")
class RecursiveRoot(Case):
    class Root(Net):
        def forward(self, x: torch.Tensor, depth: int = 1) -> torch.Tensor:
            y = super().forward(x)
            return y + self(torch.tanh(x), depth - 1) if depth else y

    def build(self) -> nn.Module:
        return self.Root()


@case("two forwards, one backward")
@case("two forwards, one backward, other orders", (2, 0, 1), (1,))
class TwoForwards(Case):
    def __init__(self, first: tuple[int, ...] | None = None, second: tuple[int, ...] | None = None) -> None:
        self.paths = first, second

    def train(self, model: Any, batch: Batch) -> Any:
        one = model(batch.x, self.paths[0])
        two = model(batch.randn(2, DIM, slot=1), self.paths[1])
        loss_of(one, two).backward()
        return one, two


@case("two forwards, two backwards, in order", (0, 1))
@case("two forwards, two backwards, reversed", (1, 0))
class TwoForwardsTwoBackwards(Case):
    sums_differ_in_bf16 = True

    def __init__(self, order: tuple[int, ...]) -> None:
        self.order = order

    def train(self, model: Any, batch: Batch) -> Any:
        losses = [loss_of(model(batch.x)), loss_of(model(batch.randn(2, DIM, slot=1), (1, 0)))]
        for i in self.order:
            losses[i].backward()
        return losses


@case("a forward whose backward never runs")
class ForwardOnly(Case):
    def train(self, model: Any, batch: Batch) -> Any:
        y = model(batch.x)
        dropped = model(batch.randn(2, DIM, slot=1), (0, 2))
        loss_of(y).backward()
        return y, dropped


@case("backward twice by retain_graph")
class RetainGraph(Case):
    def train(self, model: Any, batch: Batch) -> Any:
        loss = loss_of(model(batch.x))
        loss.backward(retain_graph=True)
        loss.backward()
        return loss


@case("two losses of one graph")
class TwoLosses(Case):
    sums_differ_in_bf16 = True

    def train(self, model: Any, batch: Batch) -> Any:
        y = model(batch.x)
        y[:, :2].float().square().mean().backward(retain_graph=True)
        y[:, 2:].float().tanh().mean().backward()
        return y


@case("gradients of inputs by autograd.grad")
class InputGradients(Case):
    """Penalties on gradients and saliency maps ask for the inputs' gradients only."""

    def train(self, model: Any, batch: Batch) -> Any:
        x = batch.x.requires_grad_()
        (gradient,) = torch.autograd.grad(loss_of(model(x)), x)
        loss = loss_of(model(batch.randn(2, DIM, slot=1) + gradient[:2]))
        loss.backward()
        return gradient, loss


# -- unused parameters -----------------------------------------------------------------------------------------------


class Experts(nn.Module):
    """Three expert layers of which some are used."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))
        self.never = nn.Parameter(torch.randn(2, 3))

    def forward(self, x: torch.Tensor, which: tuple[int, ...] = (0, 1, 2)) -> torch.Tensor:
        for i in which:
            x = x + torch.tanh(self.experts[i](x))
        return x


class Mixture(Net):
    def __init__(self) -> None:
        super().__init__(2, Experts)

    def forward(self, x: torch.Tensor, which: list[tuple[int, ...]]) -> torch.Tensor:  # type: ignore[override]
        x = self.first(x)
        for block, some in zip(self.blocks, which, strict=True):
            x = block(x, some)
        return self.head(x)


@case("unused on every rank", lambda b: [(0,), (2, 1)])
@case("unused on every rank, others in each step", lambda b: [(b.step % 3,), ((b.step + 1) % 3,)])
@case("unused on some ranks", lambda b: [(b.rank % 3,), (2, (b.rank + 1) % 2)])
@case("unused on some ranks, others in each micro-batch", lambda b: [((b.rank + b.micro) % 3,), (b.micro,)])
@case("whole unit unused on one rank", lambda b: [() if b.rank == b.step % 2 else (0, 1), (1,)])
@case("whole unit unused on every rank", lambda b: [(), (1, 2)])
class UnusedParameters(Case):
    def __init__(self, which: Callable[[Batch], list[tuple[int, ...]]]) -> None:
        self.which = which

    def build(self) -> nn.Module:
        return Mixture()

    def train(self, model: Any, batch: Batch) -> Any:
        y = model(batch.x, self.which(batch))
        loss_of(y).backward()
        return y


@case("an output that no loss uses, on some ranks")
class UnusedOutput(Case):
    """Every unit runs forward everywhere, but backward does not reach the same ones."""

    class TwoHeads(Net):
        def __init__(self) -> None:
            super().__init__(2)
            self.other = nn.Linear(DIM, 3)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
            x = self.blocks[1](self.blocks[0](self.first(x)))
            return self.head(x), self.other(x)

    def build(self) -> nn.Module:
        return self.TwoHeads()

    def train(self, model: Any, batch: Batch) -> Any:
        y, z = model(batch.x)
        loss_of(*((y,) if batch.rank == 0 and batch.step != 1 else (y, z))).backward()
        return y, z


# -- inputs and outputs ----------------------------------------------------------------------------------------------


@dataclass
class Record:
    y: torch.Tensor
    extra: torch.Tensor | None = None
    text: str = "a"


@dataclass(frozen=True)
class FrozenRecord:
    y: torch.Tensor
    extra: Any = None


Named = namedtuple("Named", ["y", "extra"])


class ModelOutput(OrderedDict):
    """Like Hugging Face's: a dataclass that is an ordered dict of the fields that are not None."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if value is not None:
                super().__setitem__(field.name, value)

    def __getitem__(self, key: Any) -> Any:
        return dict(self.items())[key] if isinstance(key, str) else tuple(self.values())[key]

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.keys() and value is not None:
            super().__setitem__(name, value)
        super().__setattr__(name, value)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


@dataclass
class BlockOutput(ModelOutput):
    y: torch.Tensor | None = None
    extra: torch.Tensor | None = None
    states: tuple[torch.Tensor, ...] | None = None


class Custom:
    """An object with nothing but attributes, as caches of keys and values are."""

    def __init__(self, y: torch.Tensor, extra: torch.Tensor) -> None:
        self.layers = [{"y": y}, (extra, None)]


class Slotted:
    __slots__ = ("extra", "y")

    def __init__(self, y: torch.Tensor, extra: torch.Tensor) -> None:
        self.y, self.extra = y, extra


PACK: dict[str, tuple[Callable[..., Any], Callable[[Any], tuple[torch.Tensor, torch.Tensor]]]] = {
    "tuple": (lambda y, e: (y, e), lambda o: o),
    "list": (lambda y, e: [y, [e, None]], lambda o: (o[0], o[1][0])),
    "dict": (lambda y, e: {"y": y, "more": {"extra": e, "n": 3}}, lambda o: (o["y"], o["more"]["extra"])),
    "ordered dict": (lambda y, e: OrderedDict(y=y, extra=e), lambda o: (o["y"], o["extra"])),
    "named tuple": (Named, lambda o: (o.y, o.extra)),
    "dataclass": (Record, lambda o: (o.y, o.extra)),
    "frozen dataclass": (FrozenRecord, lambda o: (o.y, o.extra)),
    "ModelOutput": (lambda y, e: BlockOutput(y=y, extra=e, states=(y,)), lambda o: (o.y, o["extra"])),
    "custom object": (Custom, lambda o: (o.layers[0]["y"], o.layers[1][0])),
    "object with slots": (Slotted, lambda o: (o.y, o.extra)),
    "nested": (
        lambda y, e: (None, [Named(Record(y), {"a": FrozenRecord(e)})], 3),
        lambda o: (o[1][0].y.y, o[1][0].extra["a"].y),
    ),
}


class Packing(Block):
    """Takes and gives its tensors in some container. ``extra`` comes from other weights than ``y``."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.side = nn.Linear(DIM, 2)

    def forward(self, packed: Any) -> Any:
        pack, unpack = PACK[self.kind]
        x, extra = unpack(packed)
        return pack(super().forward(x), torch.tanh(self.side(x)) + extra)


class PackingNet(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.head = nn.Linear(DIM, DIM), nn.Linear(DIM, 4)
        self.blocks = nn.ModuleList(Packing(kind) for _ in range(2))

    def forward(self, x: torch.Tensor) -> Any:
        pack, unpack = PACK[self.kind]
        packed = pack(self.first(x), x[:, :2])
        for block in self.blocks:
            packed = block(packed)
        y, extra = unpack(packed)
        return pack(self.head(y), extra)


class Containers(Case):
    def __init__(self, kind: str) -> None:
        self.kind = kind

    def build(self) -> nn.Module:
        return PackingNet(self.kind)

    def train(self, model: Any, batch: Batch) -> Any:
        y, extra = PACK[self.kind][1](model(batch.x))
        # Each part of the output alone, and both, must find the weights.
        parts = [(y, extra), (y,), (extra,)][batch.step]
        loss_of(*parts).backward()
        return y, extra


for _kind in PACK:
    case(f"output: {_kind}", _kind)(Containers)


@case("output: None")
class NoOutput(Case):
    """A unit that returns nothing leaves its result in a list it is given."""

    class Into(Block):
        def forward(self, x: torch.Tensor, into: list[torch.Tensor]) -> None:  # type: ignore[override]
            into.append(x.detach())

    class Root(Net):
        def __init__(self) -> None:
            super().__init__(2)
            self.silent = NoOutput.Into()

        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            seen: list[torch.Tensor] = []
            x = self.first(x)
            assert self.silent(x, seen) is None
            return self.head(self.blocks[1](self.blocks[0](x))) + seen[0][:, :4]

    def build(self) -> nn.Module:
        return self.Root()

    def units(self, model: Any) -> list[Any]:
        return [model.silent, *super().units(model)]


@case("loss from an inner unit", through_root=True)
@case("loss from an inner unit by a list outside", through_root=False)
class InnerLoss(Case):
    """The loss is computed in an inner unit; the root's own output has no part in it."""

    class WithLoss(Block):
        def forward(self, x: torch.Tensor, losses: list[torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
            y = super().forward(x)
            losses.append(loss_of(y))
            return y

    class Root(Net):
        def forward(self, x: torch.Tensor, losses: list[torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
            x = self.first(x)
            x = self.blocks[0](x, [])
            x = self.blocks[1](x, losses)
            with torch.no_grad():
                return self.head(x)

    def __init__(self, through_root: bool) -> None:
        self.through_root = through_root

    def build(self) -> nn.Module:
        return self.Root(2, self.WithLoss if not self.through_root else ReturnsLoss)

    def train(self, model: Any, batch: Batch) -> Any:
        losses: list[torch.Tensor] = []
        y = model(batch.x, losses)
        losses[-1].backward()
        return y, losses[-1]


class ReturnsLoss(Block):
    def forward(self, x: torch.Tensor, losses: list[torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
        y, loss = self.both(x)
        losses.append(loss)
        return y

    def both(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = super().forward(x)
        return y, loss_of(y)


@case("loss of hidden states of inner units")
class HiddenStates(Case):
    """Outputs of inner units, kept by the caller through forward hooks, as feature extractors do."""

    sums_differ_in_bf16 = True

    def train(self, model: Any, batch: Batch) -> Any:
        states: list[torch.Tensor] = []
        handles = [b.register_forward_hook(lambda m, a, o: states.append(o)) for b in model.blocks]
        y = model(batch.x)
        for handle in handles:
            handle.remove()
        # In one step backward does not start from the root's output at all.
        loss_of(*(states[:2] if batch.step == 1 else [*states, y])).backward()
        return states


@case("keyword-only inputs")
class Keywords(Case):
    class KeywordBlock(Block):
        def forward(self, *, hidden: torch.Tensor, scale: dict[str, Any]) -> dict[str, torch.Tensor]:  # type: ignore[override]
            return {"hidden": super().forward(hidden) * scale["by"]}

    class Root(Net):
        def forward(self, *, x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            x = self.first(x)
            for block in self.blocks:
                x = block(hidden=x, scale={"by": by})["hidden"]
            return self.head(x)

    def build(self) -> nn.Module:
        return self.Root(3, self.KeywordBlock)

    def train(self, model: Any, batch: Batch) -> Any:
        y = model(x=batch.x, by=batch.randn(3, 1, slot=2))
        loss_of(y).backward()
        return y


@case("inputs that need no gradient", detach=True)
@case("integer inputs of inner units", detach=False)
class NoInputGradient(Case):
    """Nothing tells a unit that its backward is over when none of its inputs needs a gradient."""

    class Lookup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.mix = nn.Embedding(11, DIM), nn.Linear(DIM, DIM)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.mix(self.table(ids))

    class Root(nn.Module):
        def __init__(self, detach: bool) -> None:
            super().__init__()
            self.detach = detach
            self.blocks = nn.ModuleList(NoInputGradient.Lookup() if not detach else Block() for _ in range(3))
            self.table, self.head = nn.Embedding(11, DIM), nn.Linear(DIM, 4)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            if not self.detach:
                return self.head(sum(block(ids) for block in self.blocks) + self.table(ids))  # type: ignore[operator]
            x = self.table(ids)
            y = torch.zeros_like(x)
            for block in self.blocks:
                y = y + block(x.detach())
            return self.head(y + x)

    def __init__(self, detach: bool) -> None:
        self.detach = detach

    def build(self) -> nn.Module:
        return self.Root(self.detach)

    def train(self, model: Any, batch: Batch) -> Any:
        y = model(batch.ids)
        loss_of(y).backward()
        return y


@case("an input needs a gradient on one rank only")
class InputGradientOnOneRank(Case):
    def train(self, model: Any, batch: Batch) -> Any:
        x = batch.x.requires_grad_(batch.rank == 0)
        y = model(x)
        loss_of(y).backward()
        return y


@case("in-place on a unit's output", "whole")
@case("in-place on a view of a unit's output", "view")
@case("in-place on a transposed view", "transposed")
@case("in-place on a view that a unit returned", "returned")
@case("in-place on a unit's input", "input")
class InPlace(Case):
    class ReturnsView(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([super().forward(x), x], dim=1)[:, :DIM]

    class Root(Net):
        kind = "whole"

        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            x = self.first(x)
            for block in self.blocks:
                if self.kind == "input":
                    x = x * 1.0
                    x.mul_(0.5)
                x = block(x)
                if self.kind == "whole":
                    x.mul_(0.5).add_(0.1)
                elif self.kind == "view":
                    x[:, 1:3].mul_(0.5)
                elif self.kind == "transposed":
                    x.t().tanh_()
                elif self.kind == "returned":
                    x.add_(0.25)
                    x[0].mul_(2.0)
            return self.head(x)

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def build(self) -> nn.Module:
        net = self.Root(3, self.ReturnsView if self.kind == "returned" else Block)
        net.kind = self.kind
        return net


@case("a unit that returns its input")
class Identity(Case):
    class Sometimes(Block):
        skip = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if self.skip else super().forward(x)

    def build(self) -> nn.Module:
        return Net(3, self.Sometimes)

    def edit(self, model: Any, step: int) -> None:
        for i, block in enumerate(model.blocks):
            block.skip = i == step


@case("a weight returned as output", "whole")
@case("a view of a weight returned as output", "view")
class WeightReturned(Case):
    class Returns(Block):
        kind = "whole"

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
            weight = self.up.weight
            return super().forward(x), weight if self.kind == "whole" else weight.t()[1:3]

    class Root(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            x = self.first(x)
            penalty = torch.zeros((), dtype=x.dtype)
            for block in self.blocks:
                x, weight = block(x)
                penalty = penalty + weight.square().sum() * 0.1
            return self.head(x) + penalty

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def build(self) -> nn.Module:
        net = self.Root(2, self.Returns)
        for block in net.blocks:
            block.kind = self.kind
        return net


@case("auxiliary loss in an attribute", "tensor")
@case("auxiliary losses in a list attribute", "list")
@case("auxiliary loss in an attribute of an inner module", "inner")
class AuxiliaryLoss(Case):
    class Router(Block):
        kind = "tensor"

        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(DIM, 3)
            self.holder = nn.Tanh()
            self.loss: Any = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            loss = torch.softmax(self.gate(x).float(), -1).square().mean()
            self.holder.loss = loss if self.kind == "inner" else None
            self.loss = loss if self.kind == "tensor" else {"aux": [loss]} if self.kind == "list" else None
            return super().forward(x)

        def taken(self) -> torch.Tensor:
            loss = (
                self.loss if self.kind == "tensor" else self.loss["aux"][0] if self.kind == "list" else None
            )
            loss = self.holder.loss if loss is None else loss
            self.loss = self.holder.loss = None
            return loss

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def build(self) -> nn.Module:
        net = Net(2, self.Router)
        for block in net.blocks:
            block.kind = self.kind
        return net

    def train(self, model: Any, batch: Batch) -> Any:
        y = model(batch.x)
        aux = [block.taken() for block in model.blocks]
        # In one step the auxiliary losses are all there is.
        (sum(aux) + (loss_of(y) if batch.step != 1 else 0.0)).backward()
        return [y, *aux]


# -- exceptions ------------------------------------------------------------------------------------------------------


class Boom(BaseException):
    """Not an Exception: what a user's Ctrl-C raises is none either."""


class Bomb:
    """A hook that raises once it is armed, the n-th time it is called."""

    def __init__(self, n: int = 1) -> None:
        self.left = n

    def __call__(self, *_: Any) -> None:
        self.left -= 1
        if self.left == 0:
            raise Boom


def raising(module: nn.Module, where: str, n: int = 1) -> Any:
    bomb = Bomb(n)
    if where == "forward":
        return module.register_forward_pre_hook(bomb)
    if where == "after forward":
        return module.register_forward_hook(bomb)
    if where == "backward pre":
        return module.register_full_backward_pre_hook(bomb)
    return module.register_full_backward_hook(bomb)


PLACES: dict[str, Callable[[Any], nn.Module]] = {
    "first block": lambda m: m.blocks[0],
    "inside the middle block": lambda m: m.blocks[1].down,
    "last block": lambda m: m.blocks[2],
    "root's own layer": lambda m: m.head,
    "root": lambda m: m,
}


class ForwardRaises(Case):
    """Goes on at once: nothing has to be cleared, as in plain torch."""

    def __init__(self, place: str, where: str) -> None:
        self.place, self.where = place, where

    def train(self, model: Any, batch: Batch) -> Any:
        handle = raising(PLACES[self.place](model), self.where)
        with pytest.raises(Boom):
            model(batch.randn(2, DIM, slot=1))
        handle.remove()
        return super().train(model, batch)


class BackwardRaises(Case):
    """Goes on after ``zero_grad``, as in plain torch, where a part of the gradients is there already."""

    def __init__(self, place: str, where: str) -> None:
        self.place, self.where = place, where

    def mishap(self, model: Any, batch: Batch) -> None:
        super().train(model, batch)
        handle = raising(PLACES[self.place](model), self.where)
        loss = loss_of(model(batch.randn(2, DIM, slot=1)))
        with pytest.raises(Boom):
            loss.backward()
        handle.remove()


for _place, _where in itertools.product(PLACES, ("forward", "after forward")):
    case(f"exception in forward: {_place}, {_where}", _place, _where)(ForwardRaises)
for _place, _where in itertools.product(PLACES, ("backward pre", "backward")):
    if (
        _place != "root" or _where == "backward pre"
    ):  # the root's input needs no gradient, so its hook never runs
        case(f"exception in backward: {_place}, {_where}", _place, _where)(BackwardRaises)


@case("exception in forward of an evaluation")
class EvaluationRaises(Case):
    def train(self, model: Any, batch: Batch) -> Any:
        handle = raising(model.blocks[1], "forward")
        with torch.no_grad(), pytest.raises(Boom):
            model(batch.x)
        handle.remove()
        with torch.no_grad():
            y = model(batch.x)
        return [y, super().train(model, batch)]


@case("exception between forward and backward")
class NeverBackward(Case):
    def mishap(self, model: Any, batch: Batch) -> None:
        with pytest.raises(Boom):
            loss_of(model(batch.x))
            raise Boom


@case("exception caught inside a unit's forward")
class Caught(Case):
    """The model itself catches what an inner unit raises, and goes another way."""

    class Root(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            x = self.first(x)
            for block in self.blocks:
                try:
                    x = block(x)
                except Boom:
                    x = torch.tanh(x)
            return self.head(x)

    def build(self) -> nn.Module:
        return self.Root()

    def train(self, model: Any, batch: Batch) -> Any:
        handle = raising(model.blocks[batch.step].down, "after forward")
        y = model(batch.x)
        handle.remove()
        loss_of(y).backward()
        return y


@case("exception in the optimizer")
class OptimizerRaises(Case):
    def update(self, optimizer: torch.optim.Optimizer, model: Any, step: int) -> None:
        handle = optimizer.register_step_pre_hook(Bomb())
        with pytest.raises(Boom):
            optimizer.step()
        handle.remove()
        optimizer.step()


@case("exception in the optimizer, given up")
class OptimizerGivenUp(Case):
    def update(self, optimizer: torch.optim.Optimizer, model: Any, step: int) -> None:
        handle = optimizer.register_step_pre_hook(Bomb(1 if step == 1 else 0))
        if step == 1:
            with pytest.raises(Boom):
                optimizer.step()
        else:
            optimizer.step()
        handle.remove()


# -- evaluation, no_grad ---------------------------------------------------------------------------------------------


@case("evaluation twice in a row", torch.no_grad, False)
@case("evaluation in inference mode", torch.inference_mode, False)
@case("evaluation between forward and backward", torch.no_grad, True)
@case("inference between forward and backward", torch.inference_mode, True)
class Evaluation(Case):
    def __init__(self, mode: Callable[[], Any], inside: bool) -> None:
        self.mode, self.inside = mode, inside

    def train(self, model: Any, batch: Batch) -> Any:
        loss = loss_of(model(batch.x)) if self.inside else None
        model.eval()
        with self.mode():
            y = model(batch.randn(2, DIM, slot=1))
            z = model(batch.randn(2, DIM, slot=2), (2, 0))
        model.train()
        loss = loss_of(model(batch.x)) if loss is None else loss
        loss.backward()
        return y, z, loss


@case("evaluation after the optimizer")
class EvaluationAfterUpdate(Case):
    """A kept slab must not be taken for the new weights."""

    precisions = ("fp32",)  # the plain model between steps computes in float32

    def update(self, optimizer: torch.optim.Optimizer, model: Any, step: int) -> Any:
        x = Batch(step, 8, 1, 0, 1, FP32).x
        with torch.no_grad():
            before = model(x)
            optimizer.step()
            return before, model(x)


class Twice(Net):
    """Blocks run without gradients first, as for a target network or a warm start of a fixed point."""

    kind = "before"

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        x = self.first(x)
        if self.kind == "one block":
            with torch.no_grad():
                x = self.blocks[0](x)
            x = self.blocks[1](x)
            return self.head(x)
        if self.kind == "before":
            with torch.no_grad():
                start = x
                for block in self.blocks:
                    start = block(start)
            x = x + start
        for block in self.blocks:
            x = block(x)
        if self.kind == "after":
            with torch.no_grad():
                extra = self.blocks[0](x)
            x = x + extra
        return self.head(x)


@case("a block under no_grad only", "one block")
@case("blocks under no_grad, then with gradients", "before")
@case("a block with gradients, then under no_grad", "after")
class PartsWithoutGrad(Case):
    def __init__(self, kind: str) -> None:
        self.kind = kind

    def build(self) -> nn.Module:
        net = Twice()
        net.kind = self.kind
        return net


# -- frozen parameters -----------------------------------------------------------------------------------------------


@case("frozen prefix", lambda m, s: (m.first, m.blocks[0]))
@case("frozen middle block", lambda m, s: (m.blocks[1],))
@case("frozen suffix", lambda m, s: (m.blocks[2], m.head))
@case("frozen parts of every unit", lambda m, s: [b.up for b in m.blocks])
@case("frozen biases", lambda m, s: [m.first.bias, m.head.bias, *(b.up.bias for b in m.blocks)])
@case("frozen but the head", lambda m, s: (m.first, *m.blocks))
@case("gradual unfreezing", lambda m, s: m.blocks[: 2 - s])
@case("gradual freezing", lambda m, s: m.blocks[:s])
@case("frozen in one step", lambda m, s: m.blocks if s == 1 else ())
@case("another block frozen in each step", lambda m, s: (m.blocks[s],))
class Frozen(Case):
    def __init__(self, which: Callable[[Any, int], Any]) -> None:
        self.which = which

    def before_sharding(self, model: Any) -> None:
        self.edit(model, 0)

    def edit(self, model: Any, step: int) -> None:
        model.requires_grad_(True)
        for each in self.which(model, step):
            each.requires_grad_(False)


@case("frozen between micro-batches", 1)
@case("unfrozen between micro-batches", 0)
class FrozenBetween(Case):
    def __init__(self, frozen_in: int) -> None:
        self.frozen_in = frozen_in

    def between(self, model: Any, step: int, micro: int) -> None:
        for module in (model.blocks[step], model.first):
            module.requires_grad_(micro != self.frozen_in)


@case("frozen between forward and backward")
class FrozenBeforeBackward(Case):
    """AccumulateGrad looks at requires_grad when it runs, so these get no gradient."""

    def train(self, model: Any, batch: Batch) -> Any:
        loss = loss_of(model(batch.x))
        model.blocks[1].up.requires_grad_(False)
        loss.backward()
        model.blocks[1].up.requires_grad_(True)
        return loss


@case("LoRA")
class Lora(Case):
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(DIM, DIM).requires_grad_(False)
            self.a, self.b = nn.Parameter(torch.randn(2, DIM) / 3), nn.Parameter(torch.randn(DIM, 2) / 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.base(x) + x @ self.a.t() @ self.b.t())

    def build(self) -> nn.Module:
        return Net(3, self.Adapted)


# -- ties ------------------------------------------------------------------------------------------------------------


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, DIM), nn.Linear(DIM, 11, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(DIM)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Reading(Language):
    """Reads the embedding's weight without calling it, as tied output layers often do."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return nn.functional.linear(self.norm(x), self.embed.weight) + self.head(x)


def tie_head(model: Any) -> None:
    model.head.weight = model.embed.weight


def tie_blocks(model: Any) -> None:
    model.blocks[1].up.weight = model.blocks[0].up.weight


def share_layer(model: Any) -> None:
    model.blocks[1].down = model.blocks[0].down


def share_unit(model: Any) -> None:
    model.blocks[1] = model.blocks[0]


def tie_everything(model: Any) -> None:
    tie_head(model)
    tie_blocks(model)


TIES: dict[str, tuple[type, Callable[[Any], None], Callable[[Any], list[Any]]]] = {
    "inside the root": (Language, tie_head, lambda m: [*m.blocks, m]),
    "inside a list unit": (Language, tie_head, lambda m: [*m.blocks, [m.embed, m.head], m]),
    "embedding unit and root": (Language, tie_head, lambda m: [m.embed, *m.blocks, m]),
    "head unit and root": (Language, tie_head, lambda m: [*m.blocks, m.head, m]),
    "embedding unit and head unit": (Language, tie_head, lambda m: [m.embed, *m.blocks, m.head, m]),
    "embedding unit and list unit": (Language, tie_head, lambda m: [m.embed, *m.blocks, [m.norm, m.head], m]),
    "two blocks": (Language, tie_blocks, lambda m: [*m.blocks, m]),
    "two blocks inside one unit": (Language, tie_blocks, lambda m: [m]),
    "everything": (Language, tie_everything, lambda m: [m.embed, *m.blocks, m.head, m]),
    "a layer shared by two blocks": (Language, share_layer, lambda m: [*m.blocks, m]),
    "a layer shared by two blocks, as a unit": (
        Language,
        share_layer,
        lambda m: [m.blocks[0].down, *m.blocks, m],
    ),
    "a layer shared inside one unit": (Language, share_layer, lambda m: [m]),
    "a block that is there twice": (Language, share_unit, lambda m: [m.blocks[0], m]),
    "weight read without a call": (Reading, lambda m: None, lambda m: [m.embed, *m.blocks, m]),
    "weight tied and read without a call": (Reading, tie_head, lambda m: [m.embed, *m.blocks, m.head, m]),
}


class Tied(Case):
    def __init__(self, kind: str, frozen: bool = False) -> None:
        self.kind, self.frozen = kind, frozen

    def build(self) -> nn.Module:
        cls, tie, _ = TIES[self.kind]
        model = cls()
        tie(model)
        return model

    def units(self, model: Any) -> list[Any]:
        return TIES[self.kind][2](model)

    def edit(self, model: Any, step: int) -> None:
        if self.frozen:
            model.embed.requires_grad_(step == 1)

    def train(self, model: Any, batch: Batch) -> Any:
        y = model(batch.ids)
        loss_of(y).backward()
        return y


for _kind in TIES:
    case(f"tied: {_kind}", _kind)(Tied)
case("tied: embedding unit and head unit, frozen in some steps", "embedding unit and head unit", True)(Tied)


# -- parts called on their own ---------------------------------------------------------------------------------------


@case("a child called before the root", True)
@case("a child called without the root in one step", False)
class ChildAlone(Case):
    sums_differ_in_bf16 = True

    def __init__(self, root_too: bool) -> None:
        self.root_too = root_too

    def train(self, model: Any, batch: Batch) -> Any:
        y = model.blocks[1](batch.x)
        loss_of(y).backward()
        if not self.root_too and batch.step != 1:
            return y
        return [y, super().train(model, batch)]


@case("the root's own layer called without the root")
class LayerAlone(Case):
    """``head`` is no unit: plain FSDP can only refuse this, unless it is a unit as here."""

    def units(self, model: Any) -> list[Any]:
        return [model.head, *super().units(model)]

    def train(self, model: Any, batch: Batch) -> Any:
        y = model.head(torch.tanh(model.blocks[0](batch.x)))
        loss_of(y).backward()
        return y


@case("children called one by one from outside")
class PipelineByHand(Case):
    def units(self, model: Any) -> list[Any]:
        return [model.first, *model.blocks, model.head, model]

    def train(self, model: Any, batch: Batch) -> Any:
        x = model.first(batch.x)
        for i in [(0, 1, 2), (2, 1), (1, 0)][batch.step]:
            x = model.blocks[i](x)
        y = model.head(x)
        loss_of(y).backward()
        return y


@case("units without a common root")
class NoRoot(PipelineByHand):
    def units(self, model: Any) -> list[Any]:
        return [model.first, *model.blocks, model.head]


@case("a list unit of which forward runs a part")
class ChunkedLoss(Case):
    class Root(Net):
        def __init__(self) -> None:
            super().__init__(2)
            self.norm, self.spare = nn.LayerNorm(DIM), nn.Linear(DIM, 4)

        def forward(self, x: torch.Tensor, chunks: int) -> torch.Tensor:  # type: ignore[override]
            x = self.first(x)
            for block in self.blocks:
                x = block(x)
            if chunks == 0:
                return self.head(x)
            x = self.norm(x)
            return sum((loss_of(self.head(part)) for part in x.chunk(chunks)), torch.zeros(()))

    def build(self) -> nn.Module:
        return self.Root()

    def units(self, model: Any) -> list[Any]:
        return [*model.blocks, [model.norm, model.head, model.spare], model]

    def train(self, model: Any, batch: Batch) -> Any:
        y = model(batch.randn(6, DIM), [3, 0, 1][batch.step])
        loss_of(y).backward()
        return y


@case("chunked loss outside the root")
class ChunkedOutside(ChunkedLoss):
    def train(self, model: Any, batch: Batch) -> Any:
        hidden: list[torch.Tensor] = []
        handle = model.blocks[1].register_forward_hook(lambda m, a, o: hidden.append(o))
        y = model(batch.randn(6, DIM), 2)
        handle.remove()
        losses = [loss_of(model.head(part)) for part in hidden[0].chunk(3)]
        (sum(losses) + loss_of(y)).backward()
        return [y, *losses]


# -- checkpointing ---------------------------------------------------------------------------------------------------


class CheckpointedNet(Net):
    where, reentrant = "around", False

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        x = self.first(x)
        if self.where == "around":
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
        elif self.where == "around some":
            for i, block in enumerate(self.blocks):
                x = checkpoint(block, x, use_reentrant=self.reentrant) if i != 1 else block(x)
        elif self.where == "around two":
            x = checkpoint(lambda h: self.blocks[1](self.blocks[0](h)), x, use_reentrant=self.reentrant)
            x = self.blocks[2](x)
        elif self.where == "nested":
            x = checkpoint(self._nested, x, use_reentrant=self.reentrant)
            x = self.blocks[2](x)
        elif self.where == "twice":
            x = checkpoint(self.blocks[0], x, use_reentrant=self.reentrant)
            x = checkpoint(self.blocks[1], x, use_reentrant=self.reentrant)
            x = checkpoint(self.blocks[0], x, use_reentrant=self.reentrant)
        else:
            for block in self.blocks:
                x = block(x)
        return self.head(x)

    def _nested(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        return checkpoint(self.blocks[1], x, use_reentrant=self.reentrant)


class CheckpointedBlock(Block):
    where, reentrant = "inside", False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.where != "inside":
            return super().forward(x)
        hidden = checkpoint(lambda h: torch.tanh(self.up(h)), x, use_reentrant=self.reentrant)
        return x + torch.tanh(self.down(hidden))


class Checkpointed(Case):
    def __init__(self, where: str, reentrant: bool, inner_units: bool = False) -> None:
        self.where, self.reentrant, self.inner_units = where, reentrant, inner_units
        self.sums_differ_in_bf16 = where == "twice"

    def build(self) -> nn.Module:
        net = CheckpointedNet(3, CheckpointedBlock)
        for module in (net, *net.blocks):
            module.where, module.reentrant = self.where, self.reentrant
        return net

    def units(self, model: Any) -> list[Any]:
        inner = [m for b in model.blocks for m in (b.up, b.down)] if self.inner_units else []
        return [*inner, *model.blocks, model]


for _where, _reentrant in itertools.product(
    ("around", "around some", "around two", "nested", "twice", "inside"), (False, True)
):
    _mode = "reentrant" if _reentrant else "not reentrant"
    case(f"checkpoint {_where}, {_mode}", _where, _reentrant)(Checkpointed)
    if _where in ("around", "inside"):
        case(f"checkpoint {_where}, units inside units, {_mode}", _where, _reentrant, True)(Checkpointed)


@case("checkpoint around the whole root", False, False)
@case("checkpoint around the whole root, reentrant", True, False)
@case("checkpoint with retain_graph", False, True)
class CheckpointedRoot(Case):
    def __init__(self, reentrant: bool, retain: bool) -> None:
        self.reentrant, self.retain = reentrant, retain

    def train(self, model: Any, batch: Batch) -> Any:
        x = batch.x.requires_grad_(self.reentrant)
        loss = loss_of(checkpoint(model, x, use_reentrant=self.reentrant))
        if self.retain:
            loss.backward(retain_graph=True)
        loss.backward()
        return loss


@case("checkpoint, exception while recomputing", False)
@case("checkpoint, exception while recomputing, reentrant", True)
class RecomputationRaises(Checkpointed):
    def __init__(self, reentrant: bool) -> None:
        super().__init__("around", reentrant)

    def mishap(self, model: Any, batch: Batch) -> None:
        loss = loss_of(model(batch.x))
        handle = raising(model.blocks[1].down, "forward")
        with pytest.raises(Boom):
            loss.backward()
        handle.remove()


# -- kinds of parameters ---------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Parameters of unusual sizes and layouts."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        if kind == "few rows":
            self.one, self.two = nn.Linear(DIM, 1), nn.Linear(1, DIM, bias=False)
            self.row = nn.Parameter(torch.randn(1, DIM))
        elif kind == "0-d":
            self.scale, self.shift = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.tensor(0.1))
            self.frozen = nn.Parameter(torch.tensor(0.9), requires_grad=False)
        elif kind == "only 0-d":
            self.scale = nn.Parameter(torch.tensor(0.7))
        elif kind == "non-contiguous":
            self.weight = nn.Parameter(torch.randn(DIM, DIM).t() / 3)
            self.strided = nn.Parameter(torch.randn(DIM, 2 * DIM)[:, ::2] / 3)
        elif kind == "channels-last":
            self.conv = nn.Conv2d(2, 3, 2, padding=1).to(memory_format=torch.channels_last)
        elif kind == "empty":
            self.nothing, self.scale = nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.ones(DIM))
        elif kind == "expanded":
            self.weight = nn.Parameter(torch.randn(1, DIM).expand(DIM, DIM).clone() / 3)
        elif kind == "three dimensions":
            self.weight = nn.Parameter(torch.randn(2, 3, DIM) / 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "few rows":
            return x + torch.tanh(self.two(torch.tanh(self.one(x))) + self.row)
        if self.kind == "0-d":
            return torch.tanh(x * self.scale * self.frozen + self.shift)
        if self.kind == "only 0-d":
            return torch.tanh(x) * self.scale
        if self.kind == "non-contiguous":
            return torch.tanh(x @ self.weight + x @ self.strided)
        if self.kind == "channels-last":
            image = x.reshape(-1, 2, 1, 3).contiguous(memory_format=torch.channels_last)
            return torch.tanh(self.conv(image))[:, :2, :1, :3].reshape(-1, DIM)
        if self.kind == "empty":
            return torch.tanh(x * self.scale + self.nothing.sum())
        if self.kind == "three dimensions":
            return torch.tanh(x + torch.einsum("bd,ijd->bij", x, self.weight).reshape(-1, DIM))
        return torch.tanh(x @ self.weight)


class OddCase(Case):
    def __init__(self, kind: str) -> None:
        self.kind = kind

    def build(self) -> nn.Module:
        return Net(2, lambda: Odd(self.kind))


for _kind in (
    "few rows",
    "0-d",
    "only 0-d",
    "non-contiguous",
    "channels-last",
    "empty",
    "expanded",
    "three dimensions",
):
    case(f"parameters: {_kind}", _kind)(OddCase)


@case("mixed dtypes in one unit")
class MixedDtypes(Case):
    """Under a policy all of them compute in bfloat16; without one each computes in its own dtype."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.single = nn.Linear(DIM, DIM)
            self.wide = nn.Linear(DIM, DIM, dtype=FP64)
            self.brain = nn.Linear(DIM, DIM, dtype=BF16)
            self.steps = nn.Parameter(torch.arange(3), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.tanh(self.single(x))
            y = torch.tanh(self.wide(y.to(self.wide.weight.dtype)))
            y = torch.tanh(self.brain(y.to(self.brain.weight.dtype)))
            return y.to(x.dtype) + self.steps.sum() * 0.1

    precisions = ("fp32",)

    def build(self) -> nn.Module:
        return Net(2, self.Mixed)


class Square(nn.Module):
    def forward(self, w: torch.Tensor) -> torch.Tensor:
        return w + w.square() * 0.5

    def right_inverse(self, w: torch.Tensor) -> torch.Tensor:
        return w


class Tanh(nn.Module):
    """Without an inverse, so that the values change when it is registered."""

    def forward(self, w: torch.Tensor) -> torch.Tensor:
        return torch.tanh(w)


class Parametrized(Case):
    def __init__(self, kind: str, whole: bool) -> None:
        self.kind, self.whole = kind, whole
        if "spectral" in kind:
            self.precisions = (
                "fp32",
            )  # its buffers keep their dtype, and torch multiplies them by the weight

    def build(self) -> nn.Module:
        net = Net(2)
        for block in net.blocks:
            if self.kind == "custom":
                parametrize.register_parametrization(block.up, "weight", Square())
                parametrize.register_parametrization(block.up, "weight", Square())
                parametrize.register_parametrization(block.down, "weight", Tanh())
            elif self.kind == "weight norm":
                parametrizations.weight_norm(block.up)
            elif self.kind == "spectral norm":
                parametrizations.spectral_norm(block.up)
            elif self.kind == "orthogonal":
                parametrizations.orthogonal(block.up)
            elif self.kind == "old weight norm":
                torch.nn.utils.weight_norm(block.up)
            elif self.kind == "old spectral norm":
                torch.nn.utils.spectral_norm(block.up)
        return net

    def units(self, model: Any) -> list[Any]:
        return [*model.blocks, model] if self.whole else [*(b.up for b in model.blocks), *model.blocks, model]

    def clone(self, model: nn.Module) -> nn.Module:
        if not self.kind.startswith("old"):
            return copy.deepcopy(model)
        # The hooks keep the weight they computed, a tensor with a graph, which deepcopy refuses.
        new = self.build()
        for mine, theirs in zip(new.parameters(), model.parameters(), strict=True):
            mine.data.copy_(theirs.data)
            mine.requires_grad_(theirs.requires_grad)
        for mine, theirs in zip(new.buffers(), model.buffers(), strict=True):
            mine.data.copy_(theirs.data)
        return new


for _kind in ("custom", "weight norm", "spectral norm", "orthogonal", "old weight norm", "old spectral norm"):
    for _whole in (True, False):
        _name = f"parametrized: {_kind}" + ("" if _whole else ", the layer as a unit")
        case(_name, _kind, _whole)(Parametrized)
CASES["parametrized: orthogonal"].precisions = ("fp32",)
CASES["parametrized: orthogonal, the layer as a unit"].precisions = ("fp32",)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.attention = nn.MultiheadAttention(DIM, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return x + self.attention(h, h, h, need_weights=False)[0]


@case("attention", lambda b: [])
@case("attention: out_proj as a unit of its own", lambda b: [b.attention.out_proj])
@case("attention and its out_proj as units", lambda b: [b.attention.out_proj, b.attention])
class MultiheadAttention(Case):
    sums_differ_in_bf16 = True

    def __init__(self, inner: Callable[[Any], list[Any]]) -> None:
        self.inner = inner

    def build(self) -> nn.Module:
        return Net(2, Attention)

    def units(self, model: Any) -> list[Any]:
        return [*(m for b in model.blocks for m in self.inner(b)), *model.blocks, model]

    def train(self, model: Any, batch: Batch) -> Any:
        x = batch.randn(2, 3, DIM)
        model.eval()  # without gradients torch has a path that reads all weights at once
        with torch.no_grad():
            before = model(x)
        model.train()
        y = model(x)
        loss_of(y).backward()
        return before, y


@case("LSTM")
class Recurrent(Case):
    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(DIM, DIM, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.lstm(x)[0]

    precisions = ("fp32",)

    def build(self) -> nn.Module:
        return Net(2, self.Cell)

    def train(self, model: Any, batch: Batch) -> Any:
        y = model(batch.randn(2, 3, DIM))
        loss_of(y).backward()
        return y


@case("dropout", 0.5)
class Dropout(Case):
    """Random numbers are drawn as often and in the same order as without sharding, also when recomputed."""

    class Dropping(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.dropout(checkpoint(super().forward, x, use_reentrant=False), 0.3)

    def __init__(self, p: float) -> None:
        self.p = p

    def build(self) -> nn.Module:
        return Net(3, self.Dropping)

    def train(self, model: Any, batch: Batch) -> Any:
        torch.manual_seed(batch.rank + 10 * batch.step)
        y = nn.functional.dropout(model(batch.x), self.p)
        loss_of(y).backward()
        return y


@case("batch norm")
class BatchNorm(Case):
    class Normed(Block):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(DIM)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(super().forward(x))

    precisions = ("fp32",)

    def build(self) -> nn.Module:
        return Net(2, self.Normed)


# -- changes by hand -------------------------------------------------------------------------------------------------


def edit_in_place(model: Any) -> None:
    with torch.no_grad():
        model.blocks[0].up.weight.mul_(1.1)
        model.blocks[1].up.bias.add_(0.1)
        model.head.weight.sub_(0.05)


def edit_copy(model: Any) -> None:
    with torch.no_grad():
        for p in (model.blocks[0].down.weight, model.first.bias):
            p.copy_(p * 0.5 + 0.1)


def edit_foreach(model: Any) -> None:
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), 0.9)


def edit_data(model: Any) -> None:
    model.blocks[0].up.weight.data.mul_(1.1)
    model.head.bias.data.add_(0.1)


def edit_data_kept(model: Any) -> None:
    """Edits through an alias that was taken long before."""
    kept = model.__dict__.setdefault("kept", [model.blocks[1].up.weight.data, model.first.weight.detach()])
    for tensor in kept:
        tensor.mul_(0.9)


def edit_data_set(model: Any) -> None:
    for p in (model.blocks[2].up.weight, model.head.bias):
        p.data = p.data * 1.1


def edit_data_whole(model: Any) -> None:
    """A whole tensor, the same on every rank, as a user gives who knows of no shards."""
    for name, p in dict(model.named_parameters()).items():
        if name.endswith("up.weight"):
            p.data = torch.linspace(-0.5, 0.5, p.numel()).view(p.shape)


def edit_init(model: Any) -> None:
    nn.init.constant_(model.blocks[1].up.bias, 0.2)
    nn.init.zeros_(model.first.bias)
    nn.init.ones_(model.head.bias)


def edit_parameter(model: Any) -> None:
    model.head.weight = nn.Parameter(torch.linspace(-1, 1, 4 * DIM).view(4, DIM))
    model.blocks[0].up.bias = nn.Parameter(torch.linspace(0, 1, HIDDEN))


def edit_grow(model: Any) -> None:
    """A parameter of another shape: the vocabulary or the number of classes was changed."""
    rows = model.head.bias.shape[0] + 1
    model.head.weight = nn.Parameter(torch.linspace(-1, 1, rows * DIM).view(rows, DIM))
    model.head.bias = nn.Parameter(torch.linspace(0, 1, rows))


def edit_remove(model: Any) -> None:
    model.head.bias = None
    model.blocks[0].up.bias = None


def edit_add(model: Any) -> None:
    if model.blocks[0].down.bias is None:
        model.blocks[0].down.bias = nn.Parameter(torch.linspace(-1, 1, DIM))


class HandEdit(Case):
    def __init__(self, edit: Callable[[Any], None], steps: tuple[int, ...], rebuild: bool = False) -> None:
        self.what, self.at, self.rebuild_optimizer = edit, steps, rebuild

    def edit(self, model: Any, step: int) -> None:
        if step in self.at:
            self.what(model)


for _edit in (edit_in_place, edit_copy, edit_foreach, edit_data, edit_data_set, edit_data_whole, edit_init):
    case(f"by hand: {_edit.__name__[5:]}", _edit, (0, 1, 2))(HandEdit)
case("by hand: data alias kept", edit_data_kept, (0, 1, 2))(HandEdit)
for _edit in (edit_parameter, edit_grow, edit_remove, edit_add):
    case(f"by hand: {_edit.__name__[5:]} before the first forward", _edit, (0,), True)(HandEdit)
    case(f"by hand: {_edit.__name__[5:]} between steps", _edit, (1,), True)(HandEdit)


@case("by hand: between micro-batches", edit_in_place)
@case("by hand: .data between micro-batches", edit_data)
@case("by hand: .data set between micro-batches", edit_data_set)
class EditBetween(Case):
    def __init__(self, edit: Callable[[Any], None]) -> None:
        self.what = edit

    def between(self, model: Any, step: int, micro: int) -> None:
        if micro:
            self.what(model)


@case("by hand: during evaluation", edit_in_place)
@case("by hand: .data during evaluation", edit_data)
class EditDuringEvaluation(Case):
    """Two evaluations with an edit between them: a slab kept from the first is stale."""

    precisions = ("fp32",)  # edits of a bfloat16 copy round

    def __init__(self, edit: Callable[[Any], None]) -> None:
        self.what = edit

    def edit(self, model: Any, step: int) -> None:
        x = Batch(step, 8, 1, 0, 1, FP32).x
        seen = []
        with torch.no_grad():
            seen.append(model(x))
            self.what(model)
            seen.append(model(x))
        model.__dict__.setdefault("seen", []).append(seen)

    def train(self, model: Any, batch: Batch) -> Any:
        return [*model.__dict__["seen"][-1], super().train(model, batch)]


def clamp(weight: Any) -> None:
    with torch.no_grad():
        weight.clamp_(-0.3, 0.3)


def clamp_data(weight: Any) -> None:
    weight.data.clamp_(-0.3, 0.3)


def set_clamped_data(weight: Any) -> None:
    weight.data = weight.data.clamp(-0.3, 0.3)


@case("weights edited inside forward", clamp)
@case("weights edited inside forward: .data in place", clamp_data)
@case("weights edited inside forward: .data set", set_clamped_data)
class EditedInForward(Case):
    """As codebooks with moving averages, spectral normalisation by hand and constraints on weights do."""

    class Clamping(Block):
        clamp: Callable[[Any], None]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            type(self).clamp(self.up.weight)
            return super().forward(x)

    precisions = ("fp32",)  # under bfloat16 the edit is that of a rounded copy

    def __init__(self, how: Callable[[Any], None]) -> None:
        self.block = type("Clamping", (self.Clamping,), {"clamp": staticmethod(how)})

    def build(self) -> nn.Module:
        return Net(2, self.block)

    def clone(self, model: nn.Module) -> nn.Module:
        return copy.deepcopy(model)

    def edit(self, model: Any, step: int) -> None:
        if not isinstance(model, sw.FSDPModule):  # the copies that compute clamp their own weights
            for block in model.blocks:
                clamp(block.up.weight)


# -- conversions, copies, state dicts --------------------------------------------------------------------------------


def to_double(model: Any, step: int) -> None:
    if step == 1:
        model.to(FP64)
    elif step == 2:
        model.float()


def half_and_back(model: Any, step: int) -> None:
    model.half()
    model.float()


def child_to_double_and_back(model: Any, step: int) -> None:
    model.blocks[1].double()
    model.blocks[1].up.float()
    model.blocks[1].float()


def scaled_by_apply(model: Any, step: int) -> None:
    model._apply(lambda t: t * 0.9)


def child_scaled_by_apply(model: Any, step: int) -> None:
    model.blocks[step]._apply(lambda t: t * 0.9)
    model.head._apply(lambda t: t * 1.1)


def emptied(model: Any, step: int) -> None:
    model.to_empty(device="cpu")
    model.load_state_dict(state_of(model, step))


def state_of(model: Any, step: int) -> dict[str, torch.Tensor]:
    """Whole tensors, the same on every rank, for every name."""
    generator = torch.Generator().manual_seed(step)
    return {
        name: torch.randn(value.shape, generator=generator) / 3 for name, value in model.state_dict().items()
    }


@case("converted: .half() and back", half_and_back)
@case("converted: a child to double and back", child_to_double_and_back)
@case("converted: _apply", scaled_by_apply)
@case("converted: _apply on children", child_scaled_by_apply)
@case("converted: to_empty and loaded", emptied)
class Converted(Case):
    def __init__(self, convert: Callable[[Any, int], None]) -> None:
        self.convert = convert

    def edit(self, model: Any, step: int) -> None:
        self.convert(model, step)


@case("converted: to double and back to float")
class Doubled(Converted):
    precisions = ("fp32",)
    rebuild_optimizer = True

    def __init__(self) -> None:
        super().__init__(to_double)

    def train(self, model: Any, batch: Batch) -> Any:
        x = batch.x.to(FP64 if batch.step == 1 else FP32)
        y = model(x)
        y.square().mean().backward()
        return y


@case("deepcopy, going on with the copy")
class DeepCopied(Case):
    rebuild_optimizer = True

    def edit(self, model: Any, step: int) -> nn.Module:
        if step == 1:  # after use: hooks, gradients and order are there
            with torch.no_grad():
                model(torch.ones(2, DIM))
        return copy.deepcopy(model)


@case("deepcopy, going on with the original")
class CopiedFrom(Case):
    """The copy trains, too, and must not be seen in the original."""

    def edit(self, model: Any, step: int) -> None:
        twin = copy.deepcopy(model)
        loss_of(twin(torch.ones(2, DIM))).backward()
        with torch.no_grad():
            for p in twin.parameters():
                p.mul_(2.0)


def loaded(model: Any, step: int) -> None:
    model.load_state_dict(state_of(model, step))


def loaded_assigned(model: Any, step: int) -> None:
    model.load_state_dict(state_of(model, step), assign=True)


def loaded_in_part(model: Any, step: int) -> None:
    state = {k: v for k, v in state_of(model, step).items() if "blocks.1" in k}
    model.load_state_dict(state, strict=False)
    model.load_state_dict({"unknown": torch.ones(1)}, strict=False)


def loaded_own(model: Any, step: int) -> None:
    """Remember and go back, as early stopping does."""
    if step == 1:
        model.__dict__["best"] = {k: v.clone() for k, v in model.state_dict().items()}
    elif step == 2:
        model.load_state_dict(model.__dict__["best"])


def loaded_own_assigned(model: Any, step: int) -> None:
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)


def loaded_child(model: Any, step: int) -> None:
    model.blocks[1].load_state_dict(state_of(model.blocks[1], step))
    model.head.load_state_dict(state_of(model.head, step))


@case("state dict: loaded", loaded)
@case("state dict: assigned", loaded_assigned, True)
@case("state dict: loaded in part", loaded_in_part)
@case("state dict: own, loaded later", loaded_own)
@case("state dict: own, assigned", loaded_own_assigned, True)
@case("state dict: of a child", loaded_child)
class StateDict(Case):
    def __init__(self, load: Callable[[Any, int], None], rebuild: bool = False) -> None:
        self.load, self.rebuild_optimizer = load, rebuild

    def edit(self, model: Any, step: int) -> None:
        self.load(model, step)


# -- several models --------------------------------------------------------------------------------------------------


class Pair(nn.Module):
    """Two models in one module that is never called itself."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Net(2), Net(2)


class PairCase(Case):
    def build(self) -> nn.Module:
        return Pair()

    def units(self, model: Any) -> list[Any]:
        return [*model.one.blocks, model.one, *model.two.blocks, model.two]


@case("GAN")
class Gan(PairCase):
    """Discriminator on real and fake data, then generator through the frozen discriminator."""

    def train(self, model: Any, batch: Batch) -> Any:
        generator, critic = model.one, model.two
        critic.requires_grad_(True)
        fake = generator(batch.x)
        padded = nn.functional.pad(fake, (0, 2))
        real_score = critic(batch.randn(3, DIM, slot=1))
        fake_score = critic(padded.detach())
        (loss_of(real_score) - 0.5 * loss_of(fake_score)).backward()
        critic.requires_grad_(False)
        score = critic(padded)
        loss_of(score).backward()
        critic.requires_grad_(True)
        return fake, real_score, fake_score, score


@case("GAN without freezing")
class GanUnfrozen(PairCase):
    def train(self, model: Any, batch: Batch) -> Any:
        fake = nn.functional.pad(model.one(batch.x), (0, 2))
        loss_of(model.two(fake.detach())).backward()
        score = model.two(fake)
        loss_of(score).backward()
        return fake, score


@case("distillation")
class Distillation(PairCase):
    def edit(self, model: Any, step: int) -> None:
        model.two.requires_grad_(False)
        model.two.eval()

    def train(self, model: Any, batch: Batch) -> Any:
        y = model.one(batch.x)
        with torch.no_grad():
            target = model.two(batch.x)
        loss = (y - target).float().square().mean()
        loss.backward()
        return y, target


@case("moving average of the weights")
class MovingAverage(PairCase):
    def update(self, optimizer: torch.optim.Optimizer, model: Any, step: int) -> None:
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(model.two.parameters(), model.one.parameters(), strict=True):
                slow.lerp_(fast, 0.3)

    def train(self, model: Any, batch: Batch) -> Any:
        with torch.no_grad():
            target = model.two(batch.x)
        loss = (model.one(batch.x) - target).float().square().mean()
        loss.backward()
        return target, loss


@case("reward model inside another model's step", False)
@case("reward model inside another model", True)
class RewardModel(Case):
    class Policy(Net):
        def __init__(self, inside: bool) -> None:
            super().__init__(2)
            self.reward = Net(2).requires_grad_(False)
            self.inside = inside

        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            y = super().forward(x)
            return y + self.reward(nn.functional.pad(y, (0, 2))) if self.inside else y

    def __init__(self, inside: bool) -> None:
        self.inside = inside

    def build(self) -> nn.Module:
        return self.Policy(self.inside)

    def units(self, model: Any) -> list[Any]:
        return [*model.reward.blocks, model.reward, *model.blocks, model]

    def train(self, model: Any, batch: Batch) -> Any:
        with torch.no_grad():  # on its own before the model it is a part of
            before = model.reward(batch.x)
        y = model(batch.x)
        reward = model.reward(torch.tanh(nn.functional.pad(y, (0, 2))))
        loss_of(y, reward).backward()
        return before, y, reward


@case("a model called inside another's forward")
class CalledInside(PairCase):
    """The first calls the second, which it does not contain, in its middle."""

    class Calling(Net):
        def forward(self, x: torch.Tensor, other: Any = None) -> torch.Tensor:  # type: ignore[override]
            x = self.blocks[0](self.first(x))
            x = x + nn.functional.pad(other(torch.tanh(x)), (0, 2))
            return self.head(self.blocks[1](x))

    def build(self) -> nn.Module:
        pair = Pair()
        pair.one = self.Calling(2)
        return pair

    def train(self, model: Any, batch: Batch) -> Any:
        y = model.one(batch.x, model.two)
        z = model.two(batch.randn(2, DIM, slot=1))
        loss_of(y, z).backward()
        return y, z


# -- hooks of the user -----------------------------------------------------------------------------------------------


class UserHooks(Case):
    def __init__(self, before: bool, kind: str) -> None:
        self.before, self.kind = before, kind

    def before_sharding(self, model: Any) -> None:
        if self.before:
            self.register(model)

    def after_sharding(self, model: Any) -> None:
        if not self.before:
            self.register(model)

    def clone(self, model: nn.Module) -> nn.Module:
        return copy.deepcopy(model)

    def register(self, model: Any) -> None:
        for module in (model.blocks[0], model.blocks[1].up, model.blocks[2], model.head, model):
            if self.kind == "forward pre":
                module.register_forward_pre_hook(halve_inputs)
            elif self.kind == "forward pre with kwargs":
                module.register_forward_pre_hook(halve_with_kwargs, with_kwargs=True)
            elif self.kind == "forward":
                module.register_forward_hook(double_output)
            elif self.kind == "forward, first":
                module.register_forward_hook(double_output, prepend=True)
            elif self.kind == "forward, reading weights":
                module.register_forward_hook(add_weight)
            elif self.kind == "forward pre, reading weights":
                module.register_forward_pre_hook(add_weight_before)
            elif self.kind == "backward":
                module.register_full_backward_hook(halve_gradients)
            elif self.kind == "backward pre":
                module.register_full_backward_pre_hook(halve_output_gradients)


def halve_inputs(module: nn.Module, args: Any) -> Any:
    return tuple(a * 0.5 for a in args)


def halve_with_kwargs(module: nn.Module, args: Any, kwargs: Any) -> Any:
    return tuple(a * 0.5 for a in args), kwargs


def double_output(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 2.0


def add_weight(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output + weight_sum(module).to(output.dtype)


def add_weight_before(module: nn.Module, args: Any) -> Any:
    return tuple(a + weight_sum(module).to(a.dtype) for a in args)


def weight_sum(module: nn.Module) -> torch.Tensor:
    """Of a weight of the module's own unit."""
    layer = module.up if isinstance(module, Block) else module.head if isinstance(module, Net) else module
    return layer.bias.sum() * 0.1


def halve_gradients(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    return tuple(None if g is None else g * 0.5 for g in inputs)


def halve_output_gradients(module: nn.Module, outputs: Any) -> Any:
    return tuple(g * 0.5 for g in outputs)


for _before, _kind in itertools.product(
    (True, False),
    ("forward pre", "forward pre with kwargs", "forward", "forward, first", "backward", "backward pre"),
):
    case(f"hooks: {_kind}, {'before' if _before else 'after'} sharding", _before, _kind)(UserHooks)
case("hooks: forward, reading weights, before sharding", True, "forward, reading weights")(UserHooks)
case("hooks: forward pre, reading weights, after sharding", False, "forward pre, reading weights")(UserHooks)


@case("hooks on the output's gradient")
class TensorHooks(Case):
    def train(self, model: Any, batch: Batch) -> Any:
        y = model(batch.x)
        y.register_hook(lambda g: g * 0.5)
        y.retain_grad()
        loss_of(y).backward()
        return y, y.grad


# -- the matrix ------------------------------------------------------------------------------------------------------

ACCUMULATIONS = ("single", "communicate", "hold", "late")
PRECISIONS = ("fp32", "bf16")
RESHARDS = (None, True, False)


class Place(NamedTuple):
    """A strategy on a mesh, and a layout."""

    at: On
    layout: str

    def __str__(self) -> str:
        return f"{self.at}/{self.layout}"


USUAL = [Place(at, "per_parameter") for at in on("zero3", (2,))]
#: About each third one on four ranks, which take longest.
OTHERS = [
    Place(at, layout)
    for name, shape, layout in (
        ("zero3", (2,), "row"),
        ("zero2", (3,), "per_parameter"),
        ("hsdp", (2, 2), "per_parameter"),
        ("zero1", (2,), "per_parameter"),
        ("hfsdp", (1, 2), "element"),
        ("hfsdp", (2, 2), "row"),
        ("ddp", (2,), "per_parameter"),
        ("zero3", (3,), "per_parameter"),
        ("zero3", (2, 2), "row"),
        ("zero3", (3,), "blocks"),
        ("zero3", (2, 2), "per_parameter"),
        ("hsdp", (1, 2), "row"),
        ("zero2", (2,), "blocks"),
        ("hfsdp", (2, 2), "per_parameter"),
        ("zero1", (3,), "element"),
        ("zero3", (2,), "element"),
        ("0-2", (2, 2), "row"),
        ("hsdp", (2, 1), "per_parameter"),
        ("ddp", (3,), "row"),
        ("zero1", (2, 2), "row"),
        ("zero3", (3,), "element"),
        ("hfsdp", (2, 1), "blocks"),
        ("2-3", (2, 2), "per_parameter"),
        ("zero2", (2,), "row"),
        ("3-0", (2, 1), "element"),
        ("hsdp", (2, 2), "element"),
        ("zero1", (2,), "blocks"),
        ("zero3", (1, 2), "row"),
        ("3-1", (2, 2), "blocks"),
        ("1-2", (2, 1), "per_parameter"),
        ("zero3", (2,), "blocks"),
        ("hfsdp", (2, 2), "element"),
        ("zero2", (3,), "element"),
        ("ddp", (2,), "blocks"),
        ("0-1", (2, 2), "per_parameter"),
        ("zero1", (3,), "row"),
        ("zero3", (3,), "row"),
    )
    for at in on(name, shape)
]


class Row(NamedTuple):
    accumulation: str
    precision: str
    reshard: bool | None
    place: Place


def every_row(name: str) -> list[Row]:
    """Everything at the usual places, and every other place twice; shuffled, so that a selection is a mixture, with
    what few ranks can show before the rest."""
    shift = list(CASES).index(name)
    precisions = CASES[name].precisions
    rows = [*itertools.starmap(Row, itertools.product(ACCUMULATIONS[:3], precisions, RESHARDS, USUAL))]
    for i, place in enumerate(2 * OTHERS, shift):
        accumulation, precision = ACCUMULATIONS[i % 4], precisions[i // 4 % len(precisions)]
        rows.append(Row(accumulation, precision, RESHARDS[i % 3], place))
    random.Random(name).shuffle(rows)
    return sorted(rows, key=lambda row: math.prod(row.place.at.shape))


def settings_of(row: Row) -> tuple[Hashable, ...]:
    return row.accumulation, row.precision, row.reshard, row.place.at, row.place.layout


def shows(case_: tuple[str, Row], strength: int) -> Iterator[Hashable]:
    """Of two settings every pair for some behaviour, and each behaviour once. Of three every triple for some, and for
    each behaviour every pair of some settings: some 30 times as many rows."""
    name, row = case_
    yield from together(strength, *settings_of(row))
    mine = (row.accumulation, row.precision, row.reshard, row.place in USUAL)
    for settings in together(strength - 1, *mine) if strength > 2 else [()]:
        yield name, settings


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Here, so that it is the one who collects that selects, and not every worker."""
    if metafunc.function.__name__ == "test_behaviour_equals_the_plain_model":
        chosen = select([(name, row) for name in CASES for row in every_row(name)], shows)
        ids = [f"{name}-{'-'.join(map(str, row))}" for name, row in chosen]
        metafunc.parametrize(("name", "row"), chosen, ids=ids)


@pytest.mark.multirank
def test_behaviour_equals_the_plain_model(worker_pools: WorkerPools, name: str, row: Row) -> None:
    ranks = math.prod(row.place.at.shape)
    try:
        worker_pools.run(run_row, ranks, name=name, row=row, timeout=20.0)
    except CaseFailed as failure:
        pytest.fail(str(failure), pytrace=False)


def run_row(rank: int, world_size: int, name: str, row: Row) -> None:
    os.environ["SHARDWRIGHT_POISON"] = "1"
    run(CASES[name], rank, world_size, *row)


@pytest.mark.parametrize("name", CASES)
def test_the_cases_themselves(name: str) -> None:
    """A plain model in the place of the sharded one passes: a failure above is the engine's."""
    run(CASES[name], 0, 1, "communicate", "fp32", None, None)


def test_rows_cover_what_they_say() -> None:
    every = [(name, row) for name in CASES for row in every_row(name)]
    chosen = covering(every, lambda case_: shows(case_, 2))
    assert {name for name, _ in chosen} == set(CASES)
    for one, two in itertools.combinations(range(5), 2):
        there, seen = (
            {(settings_of(row)[one], settings_of(row)[two]) for _, row in rows} for rows in (every, chosen)
        )
        assert seen == there, there - seen
    assert {row.place for _, row in chosen} == {*USUAL, *OTHERS}
    assert {row.accumulation for _, row in chosen} == set(ACCUMULATIONS)
    for setting in range(3):  # none is rare
        counts = Counter(row[setting] for _, row in chosen)
        assert min(counts.values()) > len(chosen) / 10, counts


# -- out of memory ---------------------------------------------------------------------------------------------------


@multirank(2, timeout=30.0)
@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("hold", [False, True])
def test_out_of_memory_anywhere_leaves_no_trace(
    rank: int, world_size: int, reshard: bool | None, hold: bool
) -> None:
    """The n-th request for memory fails on every rank, for every n of a step; the next steps are exact."""
    os.environ["SHARDWRIGHT_POISON"] = "1"
    torch.manual_seed(0)
    plain: Any = Net()
    model: Any = copy.deepcopy(plain)
    for unit in [*model.blocks, model]:
        sw.fully_shard(unit, reshard_after_forward=reshard)
    batches = [Batch(0, 0, 1, r, world_size, FP32) for r in range(world_size)]
    reference_step(CASES["plain"], plain, batches[rank], FP32)
    x = batches[rank].x
    failures = 0
    for n in itertools.count():
        model.set_requires_gradient_sync(not hold)
        with memory_runs_out(n) as asked:
            try:
                loss_of(model(x)).backward()
            except torch.OutOfMemoryError:
                failures += 1
        model.set_requires_gradient_sync(True)
        model.zero_grad()
        loss_of(model(x)).backward()
        found = differences(model, plain, TOLERANCE)
        assert not found, f"after request {n} failed:\n" + "\n".join(found)
        model.zero_grad()
        if asked[0] <= n:
            break
    assert failures >= 4  # at least each unit's gather


@contextmanager
def memory_runs_out(n: int) -> Iterator[list[int]]:
    """The ``n``-th lease (from 0) raises; yields how many there were."""
    asked = [0]
    original = Slab.lease

    def lease(self: Slab) -> None:
        asked[0] += 1
        if asked[0] == n + 1:
            raise torch.OutOfMemoryError("out of memory, as the test asked for")
        original(self)

    Slab.lease = lease  # type: ignore[method-assign]
    try:
        yield asked
    finally:
        Slab.lease = original  # type: ignore[method-assign]


# -- refusals: on every rank, by name, at once -----------------------------------------------------------------------


def sharded_net(net: Any = None, **options: Any) -> Any:
    os.environ["SHARDWRIGHT_POISON"] = "1"
    torch.manual_seed(0)
    net = Net() if net is None else net
    for unit in [*net.blocks, net]:
        sw.fully_shard(unit, **options)
    return net


def step_of(model: Any, rank: int, path: tuple[int, ...] | None = None, rows: int = 3) -> None:
    x = torch.randn(rows, DIM, generator=torch.Generator().manual_seed(rank))
    loss_of(model(x, path)).backward()


def refusal(*parts: str) -> Any:
    """An error that says that ranks diverged and has all of these, in whichever order the ranks come."""
    return pytest.raises(
        RuntimeError, match="(?s)" + "".join(f"(?=.*{part})" for part in ("diverged", *parts))
    )


OTHER_PATHS = {
    "skipped by one rank": ((0, 1, 2), (0, 2), r"'blocks\.1'", r"'blocks\.2'"),
    "skipped by one rank, the last": ((0, 1, 2), (0, 1), r"'blocks\.2'", "'Net'"),
    "another order": ((0, 1, 2), (0, 2, 1), r"'blocks\.1'", r"'blocks\.2'"),
    "none at all": ((0, 1, 2), (), r"'blocks\.0'", "'Net'"),
}


@multirank(2, 3, timeout=15.0)
@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("kind", OTHER_PATHS)
def test_other_units_in_forward_are_refused(
    rank: int, world_size: int, kind: str, warm: bool, reshard: bool | None
) -> None:
    """The last rank goes another way than the others."""
    usual, other, *names = OTHER_PATHS[kind]
    model = sharded_net(reshard_after_forward=reshard)
    if warm:  # the guess of the next gather is the usual order on every rank
        step_of(model, rank)
        names = [
            r"unit \d \('.*'\).*unit \d \('.*'\)"
        ]  # what was gathered ahead is named, or what comes next
    last = rank == world_size - 1
    with refusal(*names, "ranks? 0", f"rank {world_size - 1}"):
        step_of(model, rank, other if last else usual)


@multirank(2, 3, timeout=15.0)
@pytest.mark.parametrize("kind", OTHER_PATHS)
def test_training_goes_on_after_a_refusal(rank: int, world_size: int, kind: str) -> None:
    usual, other, *_ = OTHER_PATHS[kind]
    torch.manual_seed(0)
    plain: Any = Net()
    batch = Batch(0, 0, 1, rank, world_size, FP32)
    reference_step(CASES["plain"], plain, batch, FP32)
    model = sharded_net()
    with refusal():
        step_of(model, rank, other if rank == 0 else usual)
    model.zero_grad()
    loss_of(model(batch.x)).backward()
    assert not differences(model, plain, TOLERANCE)


@multirank(2, 3, timeout=15.0)
def test_another_unit_in_backward_only_is_refused(rank: int, world_size: int) -> None:
    """Weights are kept, so nothing is gathered in backward; the reductions differ."""
    model = sharded_net(reshard_after_forward=False)
    x = torch.randn(3, DIM)
    states: list[torch.Tensor] = []
    handles = [b.register_forward_hook(lambda m, a, o: states.append(o)) for b in model.blocks]
    y = model(x)
    for handle in handles:
        handle.remove()
    with refusal("rank"):
        (loss_of(y) if rank else loss_of(states[0])).backward()


@multirank(2, 3, timeout=15.0)
@pytest.mark.parametrize("reshard", [True, False])
def test_the_same_parts_in_another_order_in_backward_are_refused(
    rank: int, world_size: int, reshard: bool
) -> None:
    model = sharded_net(reshard_after_forward=reshard)
    one, two = (model.blocks[i](torch.randn(2, DIM)) for i in (0, 1))
    with refusal():
        for y in (one, two) if rank else (two, one):
            loss_of(y).backward()


class Sized(Net):
    """Ranks that build different models."""

    def __init__(self, hidden: int) -> None:
        super().__init__(2, lambda: Block(DIM, hidden))


@multirank(2, 3, timeout=15.0)
def test_unequal_sizes_are_refused_before_the_gather(rank: int, world_size: int) -> None:
    model = sharded_net(Sized(5 if rank else 50))
    with refusal(r"'blocks\.0'", "bytes"):
        step_of(model, rank)


@multirank(2, 3, timeout=15.0)
def test_other_modules_as_units_are_refused(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model: Any = Net()
    for unit in [*(model.blocks if rank else model.blocks[1:]), model]:
        sw.fully_shard(unit)
    with pytest.raises(RuntimeError):
        step_of(model, rank)


@multirank(2, 3, timeout=15.0)
@pytest.mark.parametrize("ends_early", [0, 1])
def test_a_rank_that_leaves_the_loop_early_is_noticed(rank: int, world_size: int, ends_early: int) -> None:
    """It goes on to the optimizer and an evaluation, where it meets the others' next step."""
    model = sharded_net()
    optimizer = sw.fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    step_of(model, rank)
    with refusal("rank"):
        if rank != ends_early:
            step_of(model, rank)
        sw.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            model(torch.randn(2, DIM), (1, 2))


@multirank(2, 3, timeout=15.0)
@pytest.mark.parametrize("where", ["a part of a unit", "a whole unit", "everything"])
def test_requires_grad_that_differs_is_refused(rank: int, world_size: int, where: str) -> None:
    model = sharded_net()
    if rank == 0:
        {"a part of a unit": model.blocks[1].up, "a whole unit": model.blocks[1], "everything": model}[
            where
        ].requires_grad_(False)
    x = torch.randn(3, DIM).requires_grad_()
    with refusal(*(["requires_grad"] if where == "a part of a unit" else [])):
        loss_of(model(x)).backward()


@multirank(2, 3, timeout=15.0)
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("reshard", [None, False])
def test_a_rank_that_raises_and_goes_on_is_noticed(
    rank: int, world_size: int, where: str, reshard: bool | None
) -> None:
    """As where a user skips batches that fail on one rank: the others hear why, and then all may go on."""
    model = sharded_net(reshard_after_forward=reshard)
    step_of(model, rank)
    if rank == 0:
        handle = raising(model.blocks[1].up, where)
        with pytest.raises(Boom):
            step_of(model, rank)
        handle.remove()
    else:
        with refusal(rf"rank 0 has left the {where} of unit 0 \('Net'\) by Boom"):
            step_of(model, rank)
    model.zero_grad()
    step_of(model, rank)


@multirank(2, timeout=15.0)
@pytest.mark.parametrize("way", ["backward", "grad"])
def test_double_backward_is_refused_by_name(rank: int, world_size: int, way: str) -> None:
    model = sharded_net()
    x = torch.randn(3, DIM).requires_grad_()
    loss = loss_of(model(x))
    with pytest.raises(RuntimeError, match=r"create_graph=True reached unit 'Net'"):
        if way == "backward":
            loss.backward(create_graph=True)
        else:
            torch.autograd.grad(loss, x, create_graph=True)
    model.zero_grad()
    step_of(model, rank)


class Closed:
    """Hides its tensor where nobody can look."""

    def __init__(self, x: torch.Tensor) -> None:
        self.get = lambda: x


class Opaque(Net):
    def forward(self, x: torch.Tensor, path: Any = None) -> Any:  # type: ignore[override]
        return Closed(super().forward(x, path))


@multirank(2, timeout=15.0)
def test_outputs_in_which_no_tensor_can_be_found_are_refused(rank: int, world_size: int) -> None:
    model = sharded_net(Opaque())
    with pytest.raises(TypeError, match=r"unit 'Opaque'.*Closed"):
        model(torch.randn(2, DIM))


@multirank(2, timeout=15.0)
def test_pickling_is_refused_by_name(rank: int, world_size: int) -> None:
    model = sharded_net()
    for write in (pickle.dumps, lambda m: torch.save(m, io.BytesIO())):
        for part in (model, model.blocks[0]):
            with pytest.raises(TypeError, match=r"sharded .* cannot be pickled.*state_dict"):
                write(part)


@multirank(2, timeout=15.0)
@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("reshard", [None, True, False])
def test_backward_after_the_optimizer_is_refused_as_by_torch(
    rank: int, world_size: int, wrapped: bool, reshard: bool | None
) -> None:
    model = sharded_net(reshard_after_forward=reshard)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = sw.fully_shard_optimizer(optimizer) if wrapped else optimizer
    step_of(model, rank)
    loss = loss_of(model(torch.randn(3, DIM)))
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    model.zero_grad()
    step_of(model, rank)
