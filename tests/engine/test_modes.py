"""Calls of sharded models inside modes: the engine's own operations do not follow what is around the user's.

Compared with a plain model on every rank's data, and followed by steps that are compared, too. The last tests let a
first call fail at one operation after another.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.autograd import graph
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import shardwright as sw
from tests.engine.kit.models import full
from tests.engine.twins import SETTINGS, assert_same_gradients, assert_steps_right, data, models
from tests.support import multirank, world_mesh


class InDouble(TorchFunctionMode):
    """Makes what is made in double precision, and lets nobody copy: an engine that followed it would fail."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in (torch.Tensor.copy_, torch._foreach_copy_, torch.cat, torch.Tensor.set_)
        if func in (torch.empty, torch.zeros):
            kwargs = {**(kwargs or {}), "dtype": torch.float64}
        return func(*args, **(kwargs or {}))


class Seen(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def packed_and_checked() -> AbstractContextManager[Any]:
    """Saved tensors are the user's own: no rank packs anything of the engine's."""

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        assert tensor.dtype != torch.uint8
        return tensor.clone()

    return graph.saved_tensors_hooks(pack, lambda tensor: tensor)


AROUND: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "mutation of saved tensors": graph.allow_mutation_on_saved_tensors,
    "function mode": InDouble,
    "dispatch mode": Seen,
    "flop counter": lambda: FlopCounterMode(display=False),
    "saved tensors": packed_and_checked,
    "save_on_cpu": graph.save_on_cpu,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


@pytest.mark.extensive("each mode")
@multirank(2)
@pytest.mark.parametrize("number", range(len(SETTINGS)))
def test_steps_inside_modes_are_those_of_a_plain_model(rank: int, world_size: int, number: int) -> None:
    for options in SETTINGS[number : number + 1]:
        later = models(**options)
        for step, (name, around) in enumerate(AROUND.items()):
            first = [models(**options)] if step % len(SETTINGS) == number else []
            for model, plain in (*first, later):
                for each in (model, plain):
                    torch.manual_seed(step)
                    with around():
                        each(data(rank, step)).square().sum().backward()
                if name != "autocast":  # gradients are reduced in other places in bfloat16
                    assert_same_gradients(model, plain)
                for each in (model, plain):
                    each.zero_grad()
                assert_steps_right(model, plain, rank, step)


@multirank(2)
def test_saved_tensors_may_be_mutated(rank: int, world_size: int) -> None:
    """The mode exists for this: memory is written to that was saved, here of weights in a step of the optimizer."""
    for options in SETTINGS:
        model, plain = models(**options)
        with graph.allow_mutation_on_saved_tensors():
            for each in (model, plain):
                torch.manual_seed(1)
                x = data(rank).requires_grad_()
                first = each(x.clone()).tanh()
                loss = first.square().sum()
                first.mul_(2)
                with torch.no_grad():
                    each[4].bias.mul_(0.5)
                (loss + each(x).sum()).backward()
        assert_same_gradients(model, plain)
        assert_steps_right(model, plain, rank, 1)


@multirank(2)
def test_calls_with_fake_tensors_gather_real_weights(rank: int, world_size: int) -> None:
    for options in SETTINGS:
        model, plain = models(**options)
        for _ in range(2):
            with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
                assert model(data(rank)).shape == (4, 3)
            assert_steps_right(model, plain, rank, 1)


@multirank(2)
def test_first_calls_in_inference_mode_train_afterwards(rank: int, world_size: int) -> None:
    for options in SETTINGS:
        model, plain = models(**options)
        with torch.inference_mode():
            torch.testing.assert_close(model.eval()(data(rank)), plain.eval()(data(rank)))
        for each in (model, plain):
            each.train()
            each[1].weight = nn.Parameter(torch.full((5,), 0.5))
        with torch.inference_mode():  # which makes memory again
            torch.testing.assert_close(model.eval()(data(rank)), plain.eval()(data(rank)))
        for step in range(2):
            assert_steps_right(model.train(), plain.train(), rank, step)


@multirank(2)
def test_gradient_hooks_compute_outside_of_autocast(rank: int, world_size: int) -> None:
    """PowerSGD multiplies matrices, which autocast would do in bfloat16."""
    results = []
    for inside in (False, True):
        torch.manual_seed(3)
        model = sw.fully_shard(nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 3)), mesh=world_mesh(2))
        model.set_gradient_comm_hook(sw.comm_hooks.PowerSGD(rank=2))
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.randn(4, 40, generator=torch.Generator().manual_seed(rank))).square().sum()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        results.append([full(p.grad) for p in model.parameters()])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


class Failure(Exception):
    pass


class FailAt(TorchDispatchMode):
    """Raises instead of operation number ``place``, which is the same on every rank."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.place = place

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.place -= 1
        if self.place == -1:
            raise Failure(str(func))
        return func(*args, **(kwargs or {}))


CALLS: dict[str, Callable[[nn.Module], Any]] = {
    "forward": lambda m: m(torch.ones(2, 5)),
    "step": lambda m: m(torch.ones(2, 5)).sum().backward(),
    "inference": torch.inference_mode()(lambda m: m(torch.ones(2, 5))),
    "transform": lambda m: torch.func.vmap(m)(torch.ones(2, 5)),
}
#: First calls: what is called, whether a parameter was replaced before, and options.
FIRST: list[tuple[str, bool, dict[str, Any]]] = [
    ("step", True, {}),
    ("forward", False, {"layout": "ragged"}),
    ("inference", False, {"mp_policy": sw.PrecisionPolicy(torch.bfloat16, full_precision_in_eval=True)}),
    ("transform", True, {"layout": "ragged", "strategy": "zero1"}),
]


@pytest.mark.extensive("each place of a call", but=("2-*",))
@multirank(2, timeout=120)
@pytest.mark.parametrize("number", range(len(FIRST)))
def test_a_first_call_that_fails_anywhere_leaves_a_model_that_trains(
    rank: int, world_size: int, number: int
) -> None:
    name, replaced, options = FIRST[number]
    torch.manual_seed(5)
    original = nn.Sequential(nn.Linear(5, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 3)))
    exact = "mp_policy" not in options
    place, failed = 0, True
    while failed:
        plain, model = copy.deepcopy(original), copy.deepcopy(original)
        for module in (model[1], model):
            sw.fully_shard(module, mesh=world_mesh(2), **options)
        if replaced:  # so that the call makes memory again
            for each in (model, plain):
                each[0].weight = nn.Parameter(torch.arange(20.0).view(4, 5) / 20)
        model.train(name != "inference")
        try:
            with FailAt(place):
                CALLS[name](model)
            failed = False
        except Failure:
            model.zero_grad()
            model.train()
            if exact:
                assert_steps_right(model, plain, rank, place)
            else:
                with torch.no_grad():
                    torch.testing.assert_close(model.eval()(data(rank)), plain.eval()(data(rank)))
                model.train()(data(rank)).sum().backward()
        place += 5 if place > 12 else 1  # each of the first, then one of five
    assert place > 30
