"""Generators of random numbers in deferred models: drawn from, seeded, given and left as in the plain build."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import shardwright as sw
from tests.init.models import assert_built_alike, assert_same

# -- generators --------------------------------------------------------------------------------------------------------


def test_generator_states_read_inside_are_those_of_the_plain_build() -> None:
    def build() -> list[torch.Tensor]:
        states = []
        for _ in range(3):
            nn.Linear(20, 30)
            states.append(torch.get_rng_state())
        return states

    torch.manual_seed(4)
    wanted = build()
    torch.manual_seed(4)
    with sw.deferred_init():
        found = build()
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert torch.initial_seed() == 4


def test_drawing_before_materialize_is_refused() -> None:
    torch.manual_seed(0)
    with sw.deferred_init():
        model = nn.Linear(3, 3)
    torch.rand(1)
    with pytest.raises(RuntimeError, match=r"drew numbers from the cpu generator between deferred_init"):
        sw.materialize(model)
    torch.manual_seed(0)  # and then it goes on
    sw.materialize(model)


def test_a_constructor_that_fails_leaves_a_generator_that_it_was_given() -> None:
    own = torch.Generator().manual_seed(3)
    state = own.get_state()
    with pytest.raises(ValueError, match="fails"), sw.deferred_init():
        torch.randn(3, generator=own)
        raise ValueError("fails")
    assert torch.equal(own.get_state(), state)


def test_a_constructor_that_fails_leaves_the_generators() -> None:
    torch.manual_seed(0)
    state = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError), sw.deferred_init():
        nn.Linear(3, 3)
        torch.manual_seed(5)
        raise ZeroDivisionError
    assert torch.equal(torch.get_rng_state(), state)
    plain = [nn.Linear(3, 3), nn.Linear(3, 3)]
    torch.manual_seed(0)
    with sw.deferred_init():
        first = nn.Linear(3, 3)
    with pytest.raises(ZeroDivisionError), sw.deferred_init():
        nn.Linear(3, 3)
        raise ZeroDivisionError
    with sw.deferred_init():
        second = nn.Linear(3, 3)
    for model, each in zip((second, first), reversed(plain), strict=True):
        assert_same(sw.materialize(model), each)


@pytest.mark.parametrize("seed", [0, 1])
def test_seeding_before_materialize_counts_as_without_deferral(seed: int) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(3, 3)
    torch.manual_seed(0)
    with sw.deferred_init():
        model = nn.Linear(3, 3)
    torch.manual_seed(seed)
    torch.rand(2)
    state = torch.get_rng_state()
    assert_same(sw.materialize(model), plain)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_context_inside_a_fork_leaves_the_outer_generator() -> None:
    torch.manual_seed(0)
    state = torch.get_rng_state()
    with torch.random.fork_rng():
        torch.manual_seed(9)
        plain = nn.Linear(3, 3)
        torch.manual_seed(9)
        with sw.deferred_init():
            model = nn.Linear(3, 3)
    assert_same(sw.materialize(model), plain)
    assert torch.equal(torch.get_rng_state(), state)


class Draws(TorchDispatchMode):
    """Counts random operations."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
def test_models_may_be_materialised_apart_and_in_any_order(order: list[int]) -> None:
    torch.manual_seed(0)
    plain = [nn.Linear(3, n) for n in (20, 30, 40)]
    state = torch.get_rng_state()
    torch.manual_seed(0)
    models = []
    for n in (20, 30, 40):
        with sw.deferred_init():
            models.append(nn.Linear(3, n))
    with Draws() as draws:
        for number in order:
            sw.materialize(models[number])
            assert torch.equal(torch.get_rng_state(), state)  # as if all were built
    # Two for each model; what the first call passed over is drawn once more, and no more than that.
    assert draws.count == 10
    for model, each in zip(models, plain, strict=True):
        assert_same(model, each)


def test_a_model_that_is_dropped_has_drawn_its_numbers() -> None:
    torch.manual_seed(0)
    nn.Linear(20, 30)
    plain = nn.Linear(3, 3)
    torch.manual_seed(0)
    with sw.deferred_init():
        nn.Linear(20, 30)
    with sw.deferred_init():
        model = nn.Linear(3, 3)
    assert_same(sw.materialize(model), plain)


def test_a_tensor_left_over_says_where_it_went() -> None:
    with sw.deferred_init():
        model = nn.LSTM(3, 3)
    weight, old = model.weight_ih_l0, model.weight_ih_l0.detach()
    sw.materialize(model)
    assert model.weight_ih_l0 is weight  # although LSTM refers to its weights weakly
    with pytest.raises(RuntimeError, match=r"was used after its model was materialized"):
        old.sum()


def test_a_deferred_model_cannot_be_saved() -> None:
    with sw.deferred_init():
        model = nn.Linear(3, 3)
    with pytest.raises(TypeError, match=r"has no values to save yet"):
        torch.save(model.state_dict(), "/dev/null")


# -- what once was silently wrong ------------------------------------------------------------------------------------


def test_one_generator_is_one_stream_however_it_is_given() -> None:
    own = torch.Generator()

    def build() -> nn.Module:
        own.manual_seed(1)
        model = nn.Linear(2, 2)
        nn.init.normal_(model.weight, generator=own)  # operations get another Python object for it
        nn.init.trunc_normal_(model.weight, generator=own)
        nn.init.trunc_normal_(model.bias, generator=torch.default_generator)
        model.extra = nn.Parameter(torch.randn(3, generator=torch.default_generator) + torch.randn(3))
        return model

    torch.manual_seed(0)
    build()
    state = own.get_state()
    assert_built_alike(build, 0)
    assert torch.equal(own.get_state(), state)


def test_the_state_of_one_generator_given_to_another() -> None:
    def build() -> nn.Module:
        model = nn.Linear(2, 2)
        other = torch.Generator()
        other.set_state(torch.default_generator.get_state())
        model.register_buffer("drawn", torch.randn(3, generator=other))
        nn.init.normal_(model.bias, generator=other.clone_state())
        model.last = nn.Parameter(torch.randn(3, generator=other) + torch.randn(3))
        return model

    assert_built_alike(build, 0)


def test_generators_go_on_where_the_plain_build_left_them_if_all_was_loaded(tmp_path: Any) -> None:
    torch.manual_seed(0)
    sw.save_pretrained(nn.Linear(3, 3), tmp_path / "saved")
    state = torch.get_rng_state()
    torch.manual_seed(0)
    with sw.deferred_init():
        model = nn.Linear(3, 3)
    sw.load_pretrained(model, tmp_path / "saved")
    sw.materialize(model)
    assert torch.equal(torch.get_rng_state(), state)
