"""Gradients that users replace, between backward and step and in hooks, however they are cut."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import shardwright as sw
from tests.engine.kit.models import full
from tests.support import multirank

Operation = Callable[[torch.Tensor], torch.Tensor]
#: Their results are cut like the gradient, in another way, or whole on every rank.
OPERATIONS: dict[str, Operation] = {
    "scaled": lambda g: g * 0.5,
    "copied": lambda g: g.clone(),
    "tril": lambda g: g.tril(),
    "cumsum": lambda g: g.cumsum(0),
    "flip": lambda g: g.flip(0),
    "sort": lambda g: g.sort(1).values,
    "roll": lambda g: g.roll(1, 0),
    "index": lambda g: g[torch.tensor([3, 0, 2, 1])],
    "transposed twice": lambda g: g.t().contiguous().t(),
    "softmax": lambda g: g.softmax(0),
    "centred": lambda g: g - g.mean(0, keepdim=True),
    "stacked": lambda g: torch.stack(list(g.unbind(0))[::-1]),
    "whole": lambda g: full(g).clone(),
    "whole, changed": lambda g: full(g).cumsum(0) * torch.arange(6.0),
    "constant": lambda g: torch.arange(24.0).view(4, 6),
}
#: On a ragged tensor other operations raise an error that names it.
OF_RAGGED = ["scaled", "copied", "whole", "whole, changed", "constant"]
LAYOUTS: dict[str, dict[str, Any]] = {
    "rows": {},
    "columns": {"shard_placement_fn": lambda p: Shard(p.ndim - 1)},
    "ragged": {"layout": "ragged"},
    "element": {"layout": "element"},
    "ddp": {"strategy": "ddp"},
    "zero2": {"strategy": "zero2", "layout": "element"},
}
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "wrapped adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "wrapped adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "in backward adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
}
WRAPS: dict[str, Callable[[Any], Any]] = {
    "wrapped": sw.fully_shard_optimizer,
    "in": sw.optim.in_backward,
    "sgd": lambda o: o,
}


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))


def backward(model: Any, step: int, ranks: list[int]) -> None:
    generators = [torch.Generator().manual_seed(100 * step + rank) for rank in ranks]
    losses = [model(torch.randn(3, 6, generator=g)).square().mean() for g in generators]
    (sum(losses) / len(losses)).backward()  # type: ignore[union-attr]


def replaced(model: Any, name: str) -> None:
    weight = model[0].weight
    weight.grad = OPERATIONS[name](weight.grad)


def expected(name: str, optimizer: str, ranks: list[int]) -> list[torch.Tensor]:
    model = layers()
    made = OPTIMIZERS[optimizer](model.parameters())
    for step in range(2):
        made.zero_grad()
        backward(model, step, ranks)
        replaced(model, name)
        made.step()
    return [p.detach() for p in model.parameters()]


def check(model: Any, values: list[torch.Tensor], label: str) -> None:
    for p, value in zip(model.parameters(), values, strict=True):
        # AdamW divides sums of two ranks, which are added in another order, by their roots.
        torch.testing.assert_close(
            full(p.detach()), value, rtol=1e-4, atol=1e-4, msg=lambda m: f"{label}: {m}"
        )


def names_of(layout: str) -> list[str]:
    return OF_RAGGED if layout in ("ragged", "element", "zero2") else list(OPERATIONS)


def made(layout: str, optimizer: str) -> tuple[Any, Any]:
    model: Any = sw.fully_shard(layers(), **LAYOUTS[layout])
    return model, WRAPS[optimizer.split()[0]](OPTIMIZERS[optimizer](model.parameters()))


@pytest.mark.extensive("every layout with every optimizer", but=["wrapped adamw-rows-*", "sgd-element-*"])
@multirank(2)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name[:2] != "in"])
def test_between_backward_and_step(rank: int, world_size: int, layout: str, optimizer: str) -> None:
    for name in names_of(layout):
        model, own = made(layout, optimizer)
        for step in range(2):
            own.zero_grad()
            backward(model, step, [rank])
            replaced(model, name)
            own.step()
        check(model, expected(name, optimizer, list(range(world_size))), name)


@pytest.mark.extensive(
    "each optimizer with each layout", but=("wrapped adamw-element-2ranks", "in backward adamw-rows-2ranks")
)
@multirank(2)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("optimizer", ["wrapped adamw", "in backward adamw"])
def test_in_hooks(rank: int, world_size: int, layout: str, optimizer: str) -> None:
    """Also with a mask that is equal on all ranks, where the layout can."""
    mask = torch.arange(24.0).view(4, 6) > 7

    def masked(g: torch.Tensor) -> torch.Tensor:
        return g * mask

    for name in (*names_of(layout), *(["masked"] if layout in ("rows", "columns", "ddp") else [])):
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(OPERATIONS, "masked", masked)
            values = expected(name, optimizer, list(range(world_size)))
            for after in (False, True):
                model, own = made(layout, optimizer)
                if after:
                    model[0].weight.register_post_accumulate_grad_hook(
                        lambda p, name=name: setattr(p, "grad", OPERATIONS[name](p.grad))
                    )
                else:
                    model[0].weight.register_hook(OPERATIONS[name])
                for step in range(2):
                    own.zero_grad()
                    backward(model, step, [rank])
                    own.step()
                check(model, values, f"{name}, after accumulation: {after}")


@multirank(2, 4)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_later_micro_batch_adds_to_it(rank: int, world_size: int, layout: str) -> None:
    """With one row on each rank a part would also broadcast over the whole gradient."""
    ranks = list(range(world_size))
    for name in names_of(layout):
        plain, (model, own) = layers(), made(layout, "wrapped adamw")
        for each, its in ((plain, ranks), (model, [rank])):
            backward(each, 0, its)
            replaced(each, name)
            backward(each, 1, its)
        torch.testing.assert_close(
            full(model[0].weight.grad), plain[0].weight.grad, msg=lambda m, n=name: f"{n}: {m}"
        )
        norms = [
            clip(each.parameters(), 0.01)
            for clip, each in ((nn.utils.clip_grad_norm_, plain), (sw.clip_grad_norm_, model))
        ]
        torch.testing.assert_close(*norms)
        own.step()
        ordinary = torch.optim.AdamW(plain.parameters(), lr=0.1)
        ordinary.step()
        check(model, [p.detach() for p in plain.parameters()], name)


@multirank(2)
def test_clipping_of_one_that_is_cut_otherwise(rank: int, world_size: int) -> None:
    for name in ("tril", "whole", "transposed twice"):
        plain, (model, own) = layers(), made("rows", "wrapped adamw")
        for each, its in ((plain, [0, 1]), (model, [rank])):
            backward(each, 0, its)
            replaced(each, name)
        if name == "tril":
            model[0].weight.grad = model[0].weight.grad.redistribute(placements=[Replicate()])
        norms = (
            nn.utils.clip_grad_norm_(plain.parameters(), 0.01),
            sw.clip_grad_norm_(model.parameters(), 0.01),
        )
        torch.testing.assert_close(*norms)
        own.step()
        torch.optim.AdamW(plain.parameters(), lr=0.1).step()
        check(model, [p.detach() for p in plain.parameters()], name)


@multirank(2)
def test_an_operation_that_a_ragged_gradient_does_not_have_names_it(rank: int, world_size: int) -> None:
    model, _ = made("ragged", "sgd")
    backward(model, 0, [rank])
    for operation in map(functools.partial, [OPERATIONS[n] for n in OPERATIONS if n not in OF_RAGGED]):
        with pytest.raises(NotImplementedError, match=r"(ragged tensor of shape|parameter).*weight"):
            operation(model[0].weight.grad)


@multirank(2)
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("layout", ["rows", "element"])
def test_a_hook_of_several_gradients_is_called_or_refused(
    rank: int, world_size: int, layout: str, before: bool
) -> None:
    """It may be registered before or after the model is sharded."""
    for mode in ("any", "all"):
        model: Any = layers()
        calls: list[Any] = []

        def register(model: Any = model, calls: list[Any] = calls, mode: str = mode) -> None:
            torch.autograd.graph.register_multi_grad_hook(tuple(model.parameters()), calls.append, mode=mode)  # type: ignore[arg-type]

        if before:
            register()
        sw.fully_shard(model, **LAYOUTS[layout])
        if not before:
            register()
        if mode == "any":
            backward(model, 0, [rank])
            backward(model, 1, [rank])
            assert len(calls) == 2
            continue
        with pytest.raises(RuntimeError, match=r"weight' of unit 'Sequential' has a hook .*multi_grad_hook"):
            backward(model, 0, [rank])
