"""``backward(inputs=...)`` and ``torch.autograd.grad`` with sharded parameters among the inputs."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import shardwright as sw
from tests.engine.kit.models import full
from tests.support import multirank, world_mesh

DIM = 6
LAYOUTS: list[Any] = ["per_parameter", "ragged", sw.Ragged("element")]
STRATEGIES = ["ddp", "zero1", "zero2", "zero3"]
POLICIES = [sw.MixedPrecisionPolicy(), sw.MixedPrecisionPolicy(torch.bfloat16, torch.float32)]


class Net(nn.Module):
    """Layers of uneven sizes, one that is used twice, and a parameter that no loss reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(DIM, 5), nn.Linear(5, DIM, bias=False), nn.Linear(DIM, DIM)])
        self.head = nn.Linear(DIM, 3)
        self.spare = nn.Parameter(torch.ones(3))
        self.spared = True
        self.seen: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (*self.layers, self.layers[2]):
            x = torch.tanh(layer(x))
        self.seen = x
        x = self.head(x).square()
        return x if self.spared else x * self.spare


def build() -> Any:
    torch.manual_seed(0)
    return Net()


def shard(plain: Any, **options: Any) -> Any:
    plain.seen = None  # a graph is not copied
    model = copy.deepcopy(plain)
    for layer in model.layers:
        sw.fully_shard(layer, **options)
    return sw.fully_shard(model, **options)


def batch(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(4, DIM, generator=torch.Generator().manual_seed(10 * step + rank))


Select = Callable[[Any], Sequence[torch.Tensor]]
SELECTIONS: dict[str, Select] = {
    "all": lambda model: list(model.parameters()),
    "the first": lambda model: [model.layers[0].weight],
    "of one unit a part, of another all": lambda model: [model.layers[2].bias, *model.layers[1].parameters()],
    "of the root": lambda model: [model.head.weight, model.spare],
    "the same twice": lambda model: [model.layers[2].weight, model.layers[2].weight],
}


def expected(plain: Any, select: Select, world_size: int, step: int = 0) -> list[torch.Tensor | None]:
    """The mean over the ranks of what the plain model has."""
    sums: list[torch.Tensor | None] = [None] * len(select(plain))
    for rank in range(world_size):
        loss = plain(batch(rank, step)).mean()
        for i, new in enumerate(torch.autograd.grad(loss, select(plain), allow_unused=True)):
            if new is not None:
                old = sums[i]
                sums[i] = new / world_size if old is None else old + new / world_size
    return sums


def check(
    found: Sequence[torch.Tensor | None], wanted: Sequence[torch.Tensor | None], exact: bool, what: str
) -> None:
    tolerance = 1e-5 if exact else 3e-2  # of bfloat16, through four layers
    for one, two in zip(found, wanted, strict=True):
        assert (one is None) == (two is None), f"{what}: a gradient is {one}, expected {two}"
        if one is not None and two is not None:
            near = torch.allclose(full(one).float(), two, rtol=tolerance, atol=tolerance)
            assert near, f"{what}: {full(one)}, expected {two}"


@pytest.mark.extensive("each strategy")
@multirank(2, 3)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_of_selected_parameters(rank: int, world_size: int, strategy: str) -> None:
    """``.grad`` of exactly those after backward; from torch.autograd.grad, and ``.grad`` of none."""
    plain = build()
    settings = list(zip(LAYOUTS, [*POLICIES, POLICIES[0]], strict=True))
    at = STRATEGIES.index(strategy)
    if world_size > 2:  # each strategy with one of them
        settings = [settings[(at + 1) % len(settings)]]
    elif strategy != "zero3":  # with every second one
        settings = settings[at % 2 :: 2]
    for layout, policy in settings:
        model = shard(plain, strategy=strategy, layout=layout, mp_policy=policy)
        exact = policy.param_dtype is None
        for (name, select), step in itertools.product(SELECTIONS.items(), range(2)):
            what = f"{layout}, {name}, step {step}"
            wanted = expected(plain, select, world_size, step)
            chosen = select(model)
            model(batch(rank, step)).mean().backward(inputs=chosen)
            check([p.grad for p in chosen], wanted, exact, what)
            others = [p for p in model.parameters() if not any(p is q for q in chosen)]
            assert all(p.grad is None for p in others), what
            # Gradients that there are stay; with another loss they would be added to.
            found = torch.autograd.grad(model(batch(rank, step)).mean(), chosen, allow_unused=True)
            check(found, wanted, exact, what + ", autograd.grad")
            check([p.grad for p in chosen], wanted, exact, what + ", .grad after autograd.grad")
            assert all(p.grad is None for p in others), what
            model(batch(rank, step)).mean().backward(inputs=chosen)
            twice = [None if g is None else 2 * g for g in wanted]
            check([p.grad for p in chosen], twice, exact, what + ", accumulated")
            model.zero_grad()
        model(batch(rank)).mean().backward()
        check(
            [p.grad for p in model.parameters()],
            expected(plain, SELECTIONS["all"], world_size),
            exact,
            "then all",
        )


@multirank(4)
def test_on_meshes_of_two_dimensions(rank: int, world_size: int) -> None:
    plain = build()
    for strategy in ("hsdp", "hfsdp"):
        model = shard(plain, strategy=strategy, mesh=world_mesh(2, 2))
        for name, select in SELECTIONS.items():
            wanted, chosen = expected(plain, select, world_size), select(model)
            check(
                torch.autograd.grad(model(batch(rank)).mean(), chosen, allow_unused=True), wanted, True, name
            )
            model(batch(rank)).mean().backward(inputs=chosen)
            check([p.grad for p in chosen], wanted, True, name)
            model.zero_grad()


@multirank(2)
def test_activations_beside_parameters(rank: int, world_size: int) -> None:
    plain = build()
    for layout in LAYOUTS:
        model = shard(plain, layout=layout)
        mine = plain(batch(rank)).mean()
        (of_seen,) = torch.autograd.grad(mine, [plain.seen])
        (weight,) = expected(plain, SELECTIONS["the first"], world_size)
        x = batch(rank).requires_grad_()
        of_x = torch.autograd.grad(plain(x).mean(), [x])
        # Activations alone.
        loss = model(batch(rank)).mean()
        check(torch.autograd.grad(loss, [model.seen]), [of_seen], True, "activation")
        assert all(p.grad is None for p in model.parameters())
        # Together: in both calls, and by its edge of the graph.
        x.grad = None
        loss = model(x).mean()
        both = torch.autograd.grad(loss, [x, model.layers[0].weight, model.seen])
        check(both, [*of_x, weight, of_seen], True, "grad of both")
        assert x.grad is None
        assert all(p.grad is None for p in model.parameters())
        model(x).mean().backward(inputs=[x, model.layers[0].weight])
        check([x.grad, model.layers[0].weight.grad], [*of_x, weight], True, "backward to both")
        x.grad = None
        model.zero_grad()
        edge = torch.autograd.graph.get_gradient_edge(model.layers[0].weight)
        check(torch.autograd.grad(model(x).mean(), [edge]), [weight], True, "an edge")


@multirank(2)
def test_what_torch_says_of_unused_and_frozen_parameters(rank: int, world_size: int) -> None:
    model = shard(build())
    with pytest.raises(RuntimeError, match="appears to not have been used in the graph"):
        torch.autograd.grad(model(batch(rank)).mean(), [model.head.weight, model.spare])
    assert all(p.grad is None for p in model.parameters())
    zeros = torch.autograd.grad(model(batch(rank)).mean(), [model.spare], materialize_grads=True)
    check(zeros, [torch.zeros(3)], True, "materialized")
    model.head.bias.requires_grad_(False)
    with pytest.raises(RuntimeError, match=r"requires_grad|require grad"):
        model(batch(rank)).mean().backward(inputs=[model.head.bias])
    model.zero_grad()
    model(batch(rank)).mean().backward(inputs=list(model.layers[0].parameters()))
    assert model.layers[0].weight.grad is not None


@multirank(2)
def test_only_one_rank_uses_a_selected_parameter(rank: int, world_size: int) -> None:
    """As in a whole backward: the other counts as zeros."""
    plain = build()
    model = shard(plain)
    model.spared = rank == 0
    found = torch.autograd.grad(model(batch(rank)).mean(), [model.layers[0].weight, model.spare])
    plain.spared = False
    (gradient,) = torch.autograd.grad(plain(batch(1)).mean(), [plain.spare])
    check(found[1:], [gradient / 2], True, "both ranks")


@multirank(2, 3)
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_the_loss_of_one_rank_reaches_nothing_that_is_selected(
    rank: int, world_size: int, strategy: str
) -> None:
    """The others' backward communicates, so it is an error on all ranks; where no loss reaches it, it is none."""
    model = shard(build(), strategy=strategy)
    selected = list(model.parameters())
    for way in ("grad", "inputs"):
        for lonely in (True, False):
            x = batch(rank).requires_grad_()
            y = model(x)
            loss = (y if lonely and rank == 0 else x).square().mean()
            with pytest.raises(RuntimeError, match=r"have diverged: .*backward") if lonely else nullcontext():
                if way == "inputs":
                    loss.backward(inputs=selected)
                else:
                    assert not any(torch.autograd.grad(loss, selected, allow_unused=True))


@multirank(2)
def test_gradients_that_are_held_cannot_be_returned(rank: int, world_size: int) -> None:
    plain = build()
    model = shard(plain)
    names = dict(model.named_parameters())
    model.set_requires_gradient_sync(False)
    loss = model(batch(rank)).mean()
    with pytest.raises(
        RuntimeError,
        match=r"autograd\.grad got parameters of unit 'layers\.0', which holds gradients of micro-batches",
    ):
        torch.autograd.grad(loss, names["layers.0.weight"])
    chosen = [names["layers.0.weight"], names["head.bias"]]
    loss.backward(inputs=chosen)  # is held as in any backward
    model.set_requires_gradient_sync(True)
    loss = model(batch(rank, 1)).mean()
    with pytest.raises(RuntimeError, match="holds gradients"):
        torch.autograd.grad(loss, chosen)
    loss.backward(inputs=chosen)
    two = [
        expected(plain, lambda m: [m.layers[0].weight, m.head.bias], world_size, step) for step in range(2)
    ]
    check([p.grad for p in chosen], [a + b for a, b in zip(*two, strict=True)], True, "both micro-batches")
    assert all(p.grad is None for p in names.values() if not any(p is q for q in chosen))
    model.zero_grad()
    optimizer = sw.optim.in_backward(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(RuntimeError, match="whose optimizer steps in backward"):
        torch.autograd.grad(model(batch(rank)).mean(), chosen)
    optimizer.leave_backward()
    with pytest.raises(RuntimeError, match="is_grads_batched"):
        y = model(batch(rank)).mean(0)
        torch.autograd.grad(y, chosen, torch.eye(len(y)), is_grads_batched=True)
    with pytest.raises(RuntimeError, match="create_graph=True reached unit 'Net'"):
        torch.autograd.grad(model(batch(rank)).mean(), chosen, create_graph=True)


@multirank(2)
def test_hooks_of_parameters(rank: int, world_size: int) -> None:
    """Hooks of gradients run, those after accumulation only where something is accumulated: as in plain torch."""
    plain = build()
    model = shard(plain)
    weight = model.layers[0].weight
    (wanted,) = expected(plain, SELECTIONS["the first"], world_size)
    assert wanted is not None
    weight.register_hook(lambda gradient: 3 * gradient)
    calls: list[torch.Tensor] = []
    weight.register_post_accumulate_grad_hook(calls.append)
    check(torch.autograd.grad(model(batch(rank)).mean(), [weight]), [3 * wanted], True, "grad")
    assert not calls
    model(batch(rank)).mean().backward(inputs=[weight])
    check([weight.grad], [3 * wanted], True, "backward")
    assert len(calls) == 1


@multirank(2)
def test_no_zeros_for_parameters_that_are_not_selected(rank: int, world_size: int) -> None:
    plain = build()
    model = shard(plain)
    model.set_reduce_scatter_unused_params(True)
    model(batch(rank)).mean().backward(inputs=[model.layers[0].weight])
    others = [p for p in model.parameters() if p is not model.layers[0].weight]
    assert all(p.grad is None for p in others)
    found = torch.autograd.grad(model(batch(rank)).mean(), [model.head.bias, model.spare], allow_unused=True)
    assert found[0] is not None
    assert found[1] is None
    assert all(p.grad is None for p in others)
    model(batch(rank)).mean().backward()
    assert model.spare.grad is not None


@multirank(2)
def test_an_error_in_between_changes_no_gradient(rank: int, world_size: int) -> None:
    model = shard(build())
    model(batch(rank)).mean().backward()
    before = [p.grad for p in model.parameters()]

    def fails(gradient: torch.Tensor) -> None:
        raise ArithmeticError("as the test asked for")

    loss = model(batch(rank)).mean()
    model.seen.register_hook(fails)
    with pytest.raises(ArithmeticError):
        torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    assert all(p.grad is g for p, g in zip(model.parameters(), before, strict=True))
    model.zero_grad()
    model(batch(rank)).mean().backward(inputs=[model.head.weight])
    assert model.head.weight.grad is not None


@multirank(2)
def test_weights_as_stored_in_evaluation_do_not_matter(rank: int, world_size: int) -> None:
    """Evaluation between forward and backward reads other memory, which no graph is over."""
    plain = build()
    policy = sw.PrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, full_precision_in_eval=True
    )
    model = shard(plain, mp_policy=policy)
    select = SELECTIONS["of one unit a part, of another all"]
    for evaluate in (False, True):
        loss = model(batch(rank)).mean()
        if evaluate:
            with torch.no_grad():
                model.eval()(batch(rank))
            model.train()
        loss.backward(inputs=select(model))
        check([p.grad for p in select(model)], expected(plain, select, world_size), False, f"{evaluate}")
        model.zero_grad()


class AsksInBackward(torch.autograd.Function):
    """Its backward runs a model, and asks for gradients of the model's parameters."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, model: nn.Module, parameters: list[nn.Parameter] | None
    ) -> torch.Tensor:
        ctx.model, ctx.parameters = model, parameters
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        with torch.enable_grad():
            loss = ctx.model(torch.ones(2, 4)).square().mean()
            torch.autograd.grad(loss, ctx.parameters or list(ctx.model.parameters()))
        return gradient, None, None


@multirank(2)
def test_gradients_asked_for_inside_a_backward_that_ran_the_forward_are_refused(
    rank: int, world_size: int
) -> None:
    """The parameters may be those from before, or those that the model has there, which are full."""
    for before in (False, True):
        for own in (False, True):
            models = [nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2)]
            for model in models:
                sw.fully_shard(model[0])
                sw.fully_shard(model)
            asked = models[not own]
            output = AsksInBackward.apply(
                models[0](torch.ones(2, 4)), asked, list(asked.parameters()) if before else None
            )
            with pytest.raises(
                RuntimeError, match=r"inside another backward got parameters of unit .*adds to \.grad"
            ):
                output.sum().backward()
            models[0](torch.ones(2, 4)).sum().backward()
