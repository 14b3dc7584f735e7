"""Models on the meta device: initialised by a callable, by each module's reset_parameters, or by the user."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardwright as sw
from tests.engine.kit.torch_versions import subclasses_dispatch
from tests.init.models import assert_same, full, tensors_of
from tests.support import multirank


class Model(nn.Module):
    """A model whose ``init_weights`` needs whole tensors, a tie, a buffer, and one parameter replaced by another."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.block = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("frequencies", torch.arange(4.0), persistent=False)

    def init_weights(self) -> None:
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.trunc_normal_(p, std=0.1, a=-0.2, b=0.2)
        nn.init.orthogonal_(self.block.weight[:3])
        self.block.bias = nn.Parameter(torch.linspace(0, 1, 6))
        self.frequencies = 1 / (1 + torch.arange(4.0))


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


def initialised(build: Callable[[], nn.Module], seed: int, init: Callable[[Any], Any]) -> nn.Module:
    """The plain model, initialised once more."""
    model = build()
    torch.manual_seed(seed)
    with torch.no_grad():
        init(model)
    return model


def shard(model: nn.Module, layout: Any) -> nn.Module:
    for child in model.children():
        sw.fully_shard(child, layout=layout)
    return sw.fully_shard(model, layout=layout)


@multirank(1, 3)
@pytest.mark.parametrize("layout", ["per_parameter", sw.Ragged("element"), None])
def test_an_initialiser_of_the_whole_model(rank: int, world_size: int, layout: Any) -> None:
    plain = initialised(Model, 5, Model.init_weights)
    state = torch.get_rng_state()
    model: Any = on_meta(Model)
    if layout is not None:
        shard(model, layout)
    torch.manual_seed(5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sw.materialize(model, init=model.init_weights)
    assert_same(model, plain)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.head.weight is model.embed.weight
    model.embed(torch.zeros(1, dtype=torch.int64))


def reset_inner_first(model: nn.Module) -> None:
    for child in model.children():
        reset_inner_first(child)
    reset = getattr(model, "reset_parameters", getattr(model, "_reset_parameters", None))
    if reset is not None and (model._parameters or model._buffers):
        reset()


@multirank(1, 2, 4)
def test_module_by_module(rank: int, world_size: int) -> None:
    def build() -> nn.Module:
        attention = nn.MultiheadAttention(8, 2)
        return nn.ModuleDict(
            {
                "conv": nn.Conv1d(3, 5, 2),
                "norm": nn.BatchNorm1d(5),
                "lstm": nn.LSTM(3, 4),
                "attention": attention,
            }
        )

    plain = initialised(build, 2, reset_inner_first)
    model: Any = on_meta(build)
    for child in model.children():
        sw.fully_shard(child, layout="ragged")
    torch.manual_seed(2)
    with pytest.warns(UserWarning, match=r"more than once; the last values count: 'attention.out_proj.bias'"):
        sw.materialize(model)
    assert_same(model, plain)


class Counted(nn.Linear):
    calls = 0

    def reset_parameters(self) -> None:
        Counted.calls += 1
        super().reset_parameters()


@multirank(2)
def test_each_module_is_initialised_exactly_once(rank: int, world_size: int) -> None:
    model: Any = on_meta(lambda: nn.Sequential(Counted(3, 3), nn.Sequential(Counted(3, 3))))
    model.append(model[0])  # shared
    shard(model[1], "ragged")
    sw.fully_shard(model)
    Counted.calls = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sw.materialize(model)
        assert Counted.calls == 2
        sw.materialize(model)  # nothing is left to do
    assert Counted.calls == 2


@multirank(2)
def test_what_is_initialised_twice_is_reported(rank: int, world_size: int) -> None:
    tied: Any = on_meta(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, bias=False)))
    tied[1].weight = tied[0].weight
    with pytest.warns(UserWarning, match=r"more than once; the last values count: '0.weight', '1.weight'\."):
        sw.materialize(sw.fully_shard(tied))

    def init(model: Any) -> None:
        model.bias.zero_()
        nn.init.orthogonal_(model.weight)
        nn.init.normal_(model.weight)

    plain = initialised(lambda: nn.Linear(3, 3), 0, init)
    model = sw.fully_shard(on_meta(lambda: nn.Linear(3, 3)))
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match=r"more than once; the last values count: 'weight'\."):
        sw.materialize(model, init=lambda: init(model))
    assert_same(model, plain)


class Forgotten(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("steps", torch.arange(3), persistent=False)


@multirank(2)
def test_what_nobody_initialises_is_named_and_nothing_is_done(rank: int, world_size: int) -> None:
    for sharded in (True, False):
        model = on_meta(lambda: nn.Sequential(nn.Linear(3, 3), Forgotten()))
        if sharded:
            shard(model, "per_parameter")
        before, state = tensors_of(model), torch.get_rng_state()
        with pytest.raises(ValueError, match=r"Forgotten: '1.scale', '1.steps'.*Nothing was changed"):
            sw.materialize(model)
        assert torch.equal(torch.get_rng_state(), state)
        after = tensors_of(model)
        assert all(after[name] is tensor for name, tensor in before.items())
        if sharded:
            with pytest.raises(RuntimeError, match=r"hold no values yet"):
                model[0](torch.ones(1, 3))


def test_an_initialiser_that_raises_leaves_the_model() -> None:
    model: Any = on_meta(lambda: nn.Linear(3, 3))
    weight, state = model.weight, torch.get_rng_state()

    def init() -> None:
        nn.init.normal_(model.weight)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        sw.materialize(model, init=init)
    assert model.weight is weight and weight.is_meta
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(ValueError, match=r"Linear: 'bias'"):
        sw.materialize(model, init=lambda: nn.init.normal_(model.weight))
    sw.materialize(model)
    with pytest.raises(ValueError, match=r"got init, but every parameter"):
        sw.materialize(model, init=init)


@multirank(2)
@pytest.mark.parametrize("layout", ["per_parameter", "ragged"])
def test_to_empty_and_the_users_own_values(rank: int, world_size: int, layout: str) -> None:
    model: Any = on_meta(lambda: nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5)))
    shard(model, layout)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for number, p in enumerate(model.parameters()):
            p.fill_(number)
    model[1].reset_running_stats()
    model(torch.ones(2, 3)).sum().backward()
    sw.materialize(model)  # has nothing to do
    assert [full(p).unique().tolist() for p in model.parameters()] == [[0.0], [1.0], [2.0], [3.0]]


@multirank(2, 3)
def test_to_empty_and_the_users_own_random_numbers(rank: int, world_size: int) -> None:
    if not subclasses_dispatch:
        pytest.skip("in torch 2.11 operations on DTensors go past their subclasses")

    def init(model: Any) -> None:
        nn.init.kaiming_uniform_(model.weight)
        nn.init.normal_(model.bias.data)

    plain = initialised(lambda: nn.Linear(3, 5), 0, init)
    model: Any = sw.fully_shard(on_meta(lambda: nn.Linear(3, 5)))
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        init(model)
    assert_same(model, plain)
    model = sw.fully_shard(on_meta(lambda: nn.Linear(3, 5)), layout="ragged")
    model.to_empty(device="cpu")
    with pytest.raises(NotImplementedError, match=r"normal_.* is not supported on a ragged tensor"):
        nn.init.normal_(model.weight)


@multirank(2)
def test_loaded_parameters_are_not_initialised(rank: int, world_size: int) -> None:
    loaded = nn.Linear(3, 5)
    with torch.no_grad():
        loaded.weight.fill_(7)
    model: Any = on_meta(lambda: nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)))
    shard(model, "per_parameter")
    model.load_state_dict({"0.weight": loaded.weight}, strict=False)
    torch.manual_seed(0)
    sw.materialize(model)
    assert (full(model[0].weight) == 7).all()
    assert full(model[0].bias).abs().sum() > 0


def test_an_initialiser_that_reads_what_is_there_already() -> None:
    model: Any = on_meta(lambda: nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)))
    model[0] = nn.Linear(3, 3, bias=False)
    with pytest.raises(ValueError, match=r"reads '0.weight', which have values already"):
        sw.materialize(model, init=lambda: model[1].weight.copy_(model[0].weight))


@multirank(2)
def test_a_part_of_a_unit(rank: int, world_size: int) -> None:
    with sw.deferred_init():
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    sw.fully_shard(model)
    sw.materialize(model[0])
    assert full(model[0].weight).abs().sum() > 0
    with pytest.raises(RuntimeError, match=r"Parameters '1.weight', '1.bias' of unit"):
        model(torch.ones(1, 3))
    sw.materialize(model[1])
    model(torch.ones(1, 3))


@multirank(1)
def test_devices_that_cannot_be(rank: int, world_size: int) -> None:
    with pytest.raises(ValueError, match=r"sharded over a mesh on 'cpu' and cannot be materialized on meta"):
        sw.materialize(sw.fully_shard(nn.Linear(2, 2, device="meta")), device="meta")


def doubled(model: Any) -> None:
    model.bias.fill_(0)
    model.weight.mul_(2)


def one_row(model: Any) -> None:
    model.bias.fill_(0)
    model.weight[0].fill_(2)


def too_early(model: Any) -> None:
    model.bias.copy_(model.weight.sum(1))
    nn.init.normal_(model.weight)


@multirank(1)
@pytest.mark.parametrize("init", [doubled, one_row, too_early])
def test_values_that_are_not_there_are_not_read(
    rank: int, world_size: int, init: Callable[[Any], None]
) -> None:
    model = sw.fully_shard(on_meta(lambda: nn.Linear(4, 4)))
    with pytest.raises(ValueError, match=r"The initialiser reads 'weight' before .*Nothing was changed"):
        sw.materialize(model, init=lambda: init(model))


def test_a_tensor_may_be_filled_in_parts() -> None:
    def init(model: Any) -> None:
        for part in model.weight.chunk(3):
            nn.init.xavier_uniform_(part)
        torch.mul(torch.arange(6.0), 3, out=model.bias)
        model.bias.mul_(2)

    plain = initialised(lambda: nn.Linear(4, 6), 0, init)
    model = on_meta(lambda: nn.Linear(4, 6))
    torch.manual_seed(0)
    assert_same(sw.materialize(model, init=lambda: init(model)), plain)


@multirank(2)
@pytest.mark.parametrize("layout", ["per_parameter", "ragged"])
def test_channels_last_weights_draw_in_their_own_order(rank: int, world_size: int, layout: str) -> None:
    def build() -> nn.Module:
        return nn.Conv2d(8, 8, 3, bias=False).to(memory_format=torch.channels_last)

    plain = initialised(build, 0, lambda model: nn.init.normal_(model.weight))
    model: Any = sw.fully_shard(on_meta(build), layout=layout)
    torch.manual_seed(0)
    assert_same(sw.materialize(model, init=lambda: nn.init.normal_(model.weight)), plain)


@multirank(2)
@pytest.mark.parametrize("way", ["by is_meta", "materialize", "unconditionally"])
def test_sharded_on_meta_is_not_found_by_is_meta(rank: int, world_size: int, way: str) -> None:
    """The loop that frameworks have for FSDP2 finds nothing, which ends in an error; both ways out work."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))

    def reset(model: nn.Module) -> None:
        for m in model:  # type: ignore[attr-defined]
            m.reset_parameters()

    model: Any = shard(on_meta(build), "per_parameter")
    assert not any(p.is_meta for p in model.parameters())
    if way == "by is_meta":
        for m in model.modules():
            if any(p.is_meta for p in m.parameters(recurse=False)):
                m.to_empty(device="cpu", recurse=False)
                m.reset_parameters()
        with pytest.raises(
            RuntimeError, match=r"'weight', 'bias' of unit '0' hold no values yet.*materialize"
        ):
            model(torch.ones(2, 4))
        return
    torch.manual_seed(5)
    if way == "materialize":
        sw.materialize(model)
    else:
        for m in model:
            m.to_empty(device="cpu", recurse=False)
            m.reset_parameters()
    if way == "materialize" or subclasses_dispatch:  # else each rank draws the same numbers for its own part
        for p, q in zip(model.parameters(), initialised(build, 5, reset).parameters(), strict=True):
            assert torch.equal(full(p), q)
    model(torch.ones(2, 4)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
