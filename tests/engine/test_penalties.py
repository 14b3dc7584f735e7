"""Penalties of sharded parameters whose weight differs by rank, in every way of differentiating them.

The reference is data-parallel training with plain models: every rank has the whole parameter, and the gradient is the
mean over the ranks of each rank's gradient.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwright as sw
from tests.engine.kit.models import full
from tests.engine.kit.torch_versions import subclasses_dispatch
from tests.support import multirank, world_mesh

needs_subclasses = pytest.mark.skipif(
    not subclasses_dispatch, reason="sums of sharded parameters are torch's own there"
)
SETTINGS: dict[str, dict[str, Any]] = {
    "per_parameter": {},
    "ragged": {"layout": "ragged"},
    "element": {"layout": sw.Ragged("element")},
    "zero1": {"strategy": "zero1"},
    "ddp": {"strategy": "ddp"},
    "ragged ddp": {"strategy": "ddp", "layout": "ragged"},
}


class Net(nn.Module):
    """Layers of uneven sizes, a parameter without dimensions, one that no forward uses, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(4, 5), nn.Linear(5, 4, bias=False)])
        self.head = nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.spare = nn.Parameter(torch.linspace(-1, 1, 3))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x) * self.scale + self.frozen


def shard(plain: nn.Module, **options: Any) -> Any:
    model: Any = copy.deepcopy(plain)
    for layer in model.layers:
        sw.fully_shard(layer, **options)
    return sw.fully_shard(model, **options)


def ce(model: Any, rank: int, step: int = 0) -> torch.Tensor:
    x = torch.randn(3 + rank, 4, generator=torch.Generator().manual_seed(10 * step + rank))
    return model(x.double()).square().mean()


def penalty(model: Any) -> torch.Tensor:
    return sum((p**2).sum() for p in model.parameters() if p.requires_grad)  # type: ignore[return-value]


def fisher(model: Any) -> torch.Tensor:
    """Elastic weight consolidation, of an uneven part of the parameters."""
    terms = [
        (p.detach().abs() * (p - 0.5 * p.detach()) ** 2).sum()
        for p in (model.layers[0].weight, model.spare, model.head.bias)
    ]
    return terms[0] + terms[1] + terms[2]


def own(rank: int) -> float:
    return 0.3 * (rank + 1) ** 2


LOSSES: dict[str, Callable[[Any, int], torch.Tensor]] = {
    "own factor": lambda m, r: ce(m, r) + own(r) * penalty(m),
    "own share": lambda m, r: (ce(m, r) + 0.1 * penalty(m)) * own(r),
    "fisher": lambda m, r: ce(m, r) + own(r) * fisher(m),
    "norms": lambda m, r: ce(m, r) + own(r) * sum(p.norm() for p in m.layers.parameters()),
    "stacked": lambda m, r: ce(m, r) + own(r) * torch.stack([p.norm() for p in m.layers.parameters()]).sum(),
    "whole": lambda m, r: ce(m, r) + own(r) * (full(m.layers[0].weight).t() @ full(m.layers[0].weight)).sum(),
    "alone": lambda m, r: own(r) * penalty(m),
    "before forward": lambda m, r: own(r) * penalty(m) + ce(m, r),
    "product": lambda m, r: ce(m, r) * (1 + own(r) * penalty(m)),
    "quotient": lambda m, r: penalty(m) / (1 + ce(m, r)) + ce(m, r),
    "no penalty": ce,
}


def mean_gradients(
    plain: nn.Module, loss: Callable[[Any, int], torch.Tensor], select: Any, world_size: int
) -> list[torch.Tensor | None]:
    sums: list[torch.Tensor | None] = [None] * len(select(plain))
    for rank in range(world_size):
        for i, new in enumerate(torch.autograd.grad(loss(plain, rank), select(plain), allow_unused=True)):
            if new is not None:
                old = sums[i]
                sums[i] = new / world_size if old is None else old + new / world_size
    return sums


def check(actual: Sequence[torch.Tensor | None], expected: Sequence[torch.Tensor | None], where: str) -> None:
    for i, (one, two) in enumerate(zip(actual, expected, strict=True)):
        assert (one is None) == (two is None), f"{where}: gradient {i} is {one}, expected {two}"
        if one is not None and two is not None:
            assert torch.allclose(full(one), two, rtol=1e-10, atol=1e-12), (
                f"{where}: gradient {i} is {full(one)}, expected {two}"
            )


SELECTIONS: dict[str, Callable[[Any], list[torch.Tensor]]] = {
    "all": lambda m: [p for p in m.parameters() if p.requires_grad],
    "some": lambda m: [m.layers[0].weight, m.scale, m.spare],
}


@pytest.mark.extensive("each layout", but=("element-2ranks",))
@needs_subclasses
@multirank(2, 3)
@pytest.mark.parametrize("setting", SETTINGS)
def test_each_way_of_differentiating(rank: int, world_size: int, setting: str) -> None:
    """Each loss with each selection, before or after a first step: every two of these and the setting meet."""
    plain, turn = Net(), list(SETTINGS).index(setting)
    for warm in (False, True):
        model = shard(plain, **SETTINGS[setting])
        if warm:
            ce(model, rank).backward()
            model.zero_grad()
        for (i, (name, loss)), (j, (chosen, select)) in itertools.product(
            enumerate(LOSSES.items()), enumerate(SELECTIONS.items())
        ):
            if (i + j + warm + turn) % 2:
                continue
            expected = mean_gradients(plain, loss, select, world_size)
            where = f"{setting}, {name}, {chosen}, warm {warm}"
            selected = select(model)
            found = torch.autograd.grad(loss(model, rank), selected, allow_unused=True)
            check(found, expected, f"{where}, grad")
            assert all(p.grad is None for p in model.parameters()), where
            graph = loss(model, rank)
            twice = [
                torch.autograd.grad(graph, selected, retain_graph=i < 1, allow_unused=True) for i in range(2)
            ]
            check(twice[0], expected, f"{where}, retained")
            check(twice[1], expected, f"{where}, again")
            loss(model, rank).backward(inputs=selected)
            check([p.grad for p in selected], expected, f"{where}, inputs")
            others = [p for p in model.parameters() if not any(p is q for q in selected)]
            assert all(p.grad is None for p in others), where
            model.zero_grad()
            everything = [p for p in model.parameters() if p.requires_grad]
            loss(model, rank).backward()
            check(
                [p.grad for p in everything],
                mean_gradients(plain, loss, SELECTIONS["all"], world_size),
                f"{where}, backward",
            )
            model.zero_grad()


@pytest.mark.extensive("each loss on each mesh")
@needs_subclasses
@multirank(4)
def test_on_meshes_of_two_dimensions(rank: int, world_size: int) -> None:
    plain = Net()
    for strategy, layout in itertools.product(("hsdp", "hfsdp"), ("per_parameter", "ragged")):
        model = shard(plain, strategy=strategy, layout=layout, mesh=world_mesh(2, 2))
        for name, loss in LOSSES.items():
            expected = mean_gradients(plain, loss, SELECTIONS["all"], world_size)
            where = f"{strategy}, {layout}, {name}"
            found = torch.autograd.grad(loss(model, rank), SELECTIONS["all"](model), allow_unused=True)
            check(found, expected, where)
            loss(model, rank).backward()
            check([p.grad for p in SELECTIONS["all"](model)], expected, where)
            model.zero_grad()


#: A loss of this rank, two penalties of the sharded parameters; each form joins them by other operations.
JOINED: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "product": lambda c, p, q: c * p,
    "other side": lambda c, p, q: p * c,
    "weighted product": lambda c, p, q: c * (1 + 0.01 * p),
    "quotient": lambda c, p, q: c / p,
    "divided": lambda c, p, q: p / (1 + c),
    "share": lambda c, p, q: (c + p) / (1 + p),
    "logarithms": lambda c, p, q: torch.log(c) * p.log(),
    "roots": lambda c, p, q: c.sqrt() * p.sqrt() * p,
    "used twice": lambda c, p, q: c * p + p.log(),
    "square": lambda c, p, q: c * c * p + p * p * c,
    "exponential": lambda c, p, q: c * (0.1 * p).exp(),
    "power": lambda c, p, q: c ** p.clamp(max=1.1),
    "power of the penalty": lambda c, p, q: p.pow(0.1 * c),
    "largest": lambda c, p, q: torch.maximum(c, p),
    "smallest": lambda c, p, q: torch.minimum(c, p) * p,
    "chosen": lambda c, p, q: torch.where(c > p, c * p, c),
    "three": lambda c, p, q: torch.addcmul(c, c, p),
    "three divided": lambda c, p, q: torch.addcdiv(c, c, p),
    "between": lambda c, p, q: torch.lerp(c, p, 0.3),
    "distance": lambda c, p, q: torch.hypot(c, p) + (c - p).abs(),
    "angle": lambda c, p, q: torch.atan2(c, p),
    "log of sums": lambda c, p, q: torch.logaddexp(c, p),
    "norm": lambda c, p, q: c * q,
    "two penalties": lambda c, p, q: c * p * q + q,
    "penalties first": lambda c, p, q: p * q * c,
    "sum of two": lambda c, p, q: c * (p + q).sqrt(),
    "detached": lambda c, p, q: c * p.detach() + p,
}


@pytest.mark.extensive("each layout", but=("per_parameter-2ranks",))
@needs_subclasses
@multirank(2, 3)
@pytest.mark.parametrize("setting", ["per_parameter", "ragged", "ddp"])
def test_losses_are_joined_with_penalties(rank: int, world_size: int, setting: str) -> None:
    plain = Net()
    model = shard(plain, **SETTINGS[setting])
    for name, form in JOINED.items():

        def loss(m: Any, r: int, form: Any = form) -> torch.Tensor:
            return form(ce(m, r), (m.head.weight**2).sum(), m.layers[0].weight.norm())  # type: ignore[no-any-return]

        expected = mean_gradients(plain, loss, SELECTIONS["all"], world_size)
        loss(model, rank).backward()
        check([p.grad for p in SELECTIONS["all"](model)], expected, f"{setting}, {name}")
        model.zero_grad()


@pytest.mark.extensive("each layout")
@needs_subclasses
@multirank(2, 3)
@pytest.mark.parametrize("setting", ["per_parameter", "ragged", "ddp"])
def test_penalties_are_divided_as_other_gradients(rank: int, world_size: int, setting: str) -> None:
    """Units of one model may divide by different numbers."""
    plain = Net()
    for factors in ((1.0, 1.0), (3.0, 0.5), (1.0, None)):
        model = shard(plain, **SETTINGS[setting])
        for module, factor in zip((*model.layers[:1], model), factors, strict=True):
            if factor is not None:
                module.set_gradient_divide_factor(factor)
        model.set_force_sum_reduction_for_comms(factors[0] == 3.0)
        for loss, warm in itertools.product(
            (LOSSES["own factor"], LOSSES["alone"], LOSSES["whole"]), range(2)
        ):
            expected = mean_gradients(plain, loss, SELECTIONS["all"], world_size)
            for i, p in enumerate(SELECTIONS["all"](plain)):
                units = [factors[0], factors[1]]
                factor = units[0 if any(p is q for q in plain.layers[0].parameters()) else 1]
                if any(p is q for q in plain.layers[1].parameters()):
                    factor = None
                if expected[i] is not None and factor is not None:
                    expected[i] = expected[i] * world_size / factor
            loss(model, rank).backward()
            check([p.grad for p in SELECTIONS["all"](model)], expected, f"{setting}, {factors}, {warm}")
            model.zero_grad()
            found = torch.autograd.grad(loss(model, rank), SELECTIONS["all"](model), allow_unused=True)
            check(found, expected, f"{setting}, {factors}, {warm}, grad")


@pytest.mark.extensive("each layout", but=("ragged-2ranks",))
@needs_subclasses
@multirank(2)
@pytest.mark.parametrize("setting", SETTINGS)
def test_in_micro_batches_that_are_not_synchronised(rank: int, world_size: int, setting: str) -> None:
    plain = Net()
    model = shard(plain, **SETTINGS[setting])
    for name in ("own factor", "own share", "product", "whole", "before forward"):
        loss = LOSSES[name]
        one = mean_gradients(plain, loss, SELECTIONS["all"], world_size)
        for selected in (False, True):
            for step in range(3):
                model.set_requires_gradient_sync(step == 2)
                if selected:
                    loss(model, rank).backward(inputs=SELECTIONS["all"](model))
                else:
                    loss(model, rank).backward()
            expected = [None if g is None else 3 * g for g in one]
            check([p.grad for p in SELECTIONS["all"](model)], expected, f"{setting}, {name}, {selected}")
            model.zero_grad()


@pytest.mark.extensive("each layout")
@needs_subclasses
@multirank(2)
@pytest.mark.parametrize("setting", SETTINGS)
def test_while_the_optimizer_steps_in_backward(rank: int, world_size: int, setting: str) -> None:
    for name, micros in itertools.product(
        ("own factor", "own share", "before forward", "product", "whole", "no penalty"), (1, 2)
    ):
        plain = Net()
        model = shard(plain, **SETTINGS[setting])
        trained = SELECTIONS["all"]
        reference = torch.optim.SGD(trained(plain), lr=0.1, momentum=0.9)
        sw.optim.in_backward(torch.optim.SGD(trained(model), lr=0.1, momentum=0.9))
        for _ in range(3):
            expected = mean_gradients(plain, LOSSES[name], trained, world_size)
            for p, g in zip(trained(plain), expected, strict=True):
                p.grad = None if g is None else micros * g
            reference.step()
            for micro in range(micros):
                model.set_requires_gradient_sync(micro == micros - 1)
                LOSSES[name](model, rank).backward()
            model.zero_grad()
            for (label, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
                assert torch.allclose(full(p), q, rtol=1e-10), f"{setting}, {name}, {micros} micros, {label}"


@needs_subclasses
@multirank(2)
@pytest.mark.parametrize("setting", ["per_parameter", "ragged", "ddp"])
def test_batched_gradients_are_refused(rank: int, world_size: int, setting: str) -> None:
    for warm in (False, True):
        model = shard(Net(), **SETTINGS[setting])
        if warm:
            ce(model, rank).backward()
        with pytest.raises(RuntimeError, match="is_grads_batched"):
            torch.autograd.grad(
                own(rank) * penalty(model) + torch.zeros(2, dtype=torch.float64),
                SELECTIONS["some"](model),
                torch.eye(2, dtype=torch.float64),
                is_grads_batched=True,
                allow_unused=True,
            )


#: Of the model and the rank: what only some ranks build, or each in another way.
DIVERGENCES: dict[str, Callable[[Any, int], torch.Tensor]] = {
    "on one rank": lambda m, r: 0.1 * (m.head.weight**2).sum() if r else torch.zeros(()).double(),
    "another parameter": lambda m, r: 0.1 * ((m.layers[1].weight if r else m.head.weight) ** 2).sum(),
    "another order": lambda m, r: sum(
        0.1 * (p**2).sum() for p in ((m.head.weight, m.spare) if r else (m.spare, m.head.weight))
    ),
    "another penalty": lambda m, r: m.head.weight.abs().sum() if r else (m.head.weight**2).sum(),
    "one more": lambda m, r: sum(p.norm() for p in ((m.head.weight, m.spare) if r else (m.spare,))),
    "a factor of the parameter": lambda m, r: ((own(r) * m.head.weight) ** 2).sum(),
    "a tensor's factor": lambda m, r: ((torch.tensor(own(r)) * m.head.weight) ** 2).sum(),
    "a norm's factor": lambda m, r: ((own(r) * m.head.weight.norm()) * m.head.weight).sum(),
    "whole on one": lambda m, r: (
        (full(m.head.weight) ** 2).sum() if r else 0.1 * (full(m.layers[0].weight) ** 2).sum()
    ),
}


@pytest.mark.extensive("each layout", but=("ragged ddp-2ranks",))
@needs_subclasses
@multirank(2, 3)
@pytest.mark.parametrize("setting", SETTINGS)
def test_penalties_that_differ_by_rank_raise_on_every_rank(rank: int, world_size: int, setting: str) -> None:
    """And the next step is right."""
    plain = Net()
    for name, way in itertools.product(DIVERGENCES, ("backward", "grad", "alone")):
        model = shard(plain, **SETTINGS[setting])
        expected = mean_gradients(plain, LOSSES["own factor"], SELECTIONS["all"], world_size)
        if name.startswith("whole") and "ddp" in setting:
            continue  # nothing is gathered: each rank reads its own replica
        failed = torch.zeros(())
        try:
            loss = DIVERGENCES[name](model, rank)
            loss = loss if way == "alone" else ce(model, rank) + loss
            if way == "grad":
                torch.autograd.grad(loss, SELECTIONS["all"](model), allow_unused=True)
            elif loss.requires_grad:
                loss.backward()
            else:
                ce(model, rank).backward()
        except RuntimeError as error:
            assert "The ranks have diverged" in str(error), f"{setting}, {name}, {way}: {error}"
            failed += 1
        dist.all_reduce(failed)
        assert failed == world_size, (
            f"{setting}, {name}, {way}: {failed} of {world_size} ranks raised an error"
        )
        model.zero_grad()
        LOSSES["own factor"](model, rank).backward()
        check([p.grad for p in SELECTIONS["all"](model)], expected, f"after {setting}, {name}, {way}")


@multirank(2)
def test_a_backward_without_penalties_has_no_collective_more(rank: int, world_size: int) -> None:
    from torch.distributed.tensor.debug import CommDebugMode

    counts = []
    for with_number in (False, True):
        model = shard(Net(), layout="ragged")
        ce(model, rank).backward()
        if with_number:
            penalty(model)  # nobody reads it
        loss = ce(model, rank)
        with CommDebugMode() as mode:
            loss.backward()
        counts.append(mode.get_total_counts())
    assert counts[0] == counts[1]
