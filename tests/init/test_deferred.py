"""Deferred models equal the plain build bit by bit: values, ties, generators, on any ranks, layout and strategy."""

from __future__ import annotations

import contextlib
import copy
import gc
import re
import weakref
from collections.abc import Callable
from concurrent import futures
from functools import partial
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard
from torch.utils._python_dispatch import TorchDispatchMode

import shardwright as sw
from tests.init.models import MODELS, Recurrent, Ties, assert_built_alike, assert_same
from tests.support import multirank, world_mesh


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("seed", [0, 1, 2**40])
def test_unsharded_models_equal_the_plain_build(name: str, seed: int) -> None:
    assert_built_alike(MODELS[name], seed)


def test_every_initialiser_of_torch_is_among_them(monkeypatch: pytest.MonkeyPatch) -> None:
    public = [name for name in dir(nn.init) if name.endswith("_") and not name.startswith("_")]
    called = set()
    for name in public:
        original = getattr(nn.init, name)
        monkeypatch.setattr(
            nn.init, name, lambda *a, name=name, original=original, **k: called.add(name) or original(*a, **k)
        )
    MODELS["initialisers"]()
    assert called == set(public) and len(public) >= 14


#: What ``fully_shard`` is told, by the number of mesh dimensions.
HOW: dict[int, list[dict[str, Any]]] = {
    1: [
        {},
        {"layout": "ragged", "strategy": "zero1"},
        {"layout": sw.Ragged(32)},
        {"layout": sw.Ragged("element"), "strategy": "zero2"},
        {"strategy": "ddp"},
        {"shard_placement_fn": lambda p: Shard(p.ndim - 1) if p.ndim else None},
    ],
    2: [{"strategy": "hsdp"}, {"strategy": "hfsdp"}, {"strategy": "hsdp", "layout": "ragged"}],
}


def shard(model: nn.Module, **options: Any) -> None:
    """Every child that may be a unit, then the model."""
    for child in model.children():
        if not isinstance(child, (nn.ModuleList, nn.ModuleDict, nn.ParameterList)):
            sw.fully_shard(child, **options)
    sw.fully_shard(model, **options)


@multirank(1, 2, 3, 4)
def test_sharded_models_equal_the_plain_build(rank: int, world_size: int) -> None:
    for number, (name, build) in enumerate(MODELS.items()):
        hows = [(world_mesh(world_size), how) for how in HOW[1]]
        if world_size == 4:
            hows += [(world_mesh(2, 2), how) for how in HOW[2]]
        mesh, how = hows[(number + world_size) % len(hows)]
        try:
            assert_built_alike(build, number, partial(shard, mesh=mesh, **how))
        except BaseException as error:
            raise AssertionError(f"{name} with {how}") from error


def hugging_face(name: str) -> Callable[[], nn.Module]:
    transformers = pytest.importorskip("transformers", reason="needs transformers, of the extra dev")
    if name == "gpt2":
        config = transformers.GPT2Config(
            n_layer=2, n_embd=16, n_head=2, vocab_size=60, n_positions=16, bos_token_id=0, eos_token_id=1
        )
        return lambda: transformers.GPT2LMHeadModel(config)
    config = transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=16, intermediate_size=24, num_attention_heads=2, vocab_size=60
    )
    return lambda: transformers.LlamaForCausalLM(config)


@multirank(2, timeout=180)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_hugging_face_models_are_built_unmodified(rank: int, world_size: int, name: str) -> None:
    build = hugging_face(name)
    assert_built_alike(build, 0)
    model = assert_built_alike(build, 1, lambda m: sw.fully_shard(m, layout="ragged"))
    model(torch.zeros(1, 4, dtype=torch.int64)).logits.sum().backward()


def test_building_allocates_nothing() -> None:
    with sw.deferred_init():
        model = nn.Linear(2**20, 2**20)  # 4 TiB
    assert model.weight.shape == (2**20, 2**20) and model.weight.device == torch.device("cpu")
    assert isinstance(model.weight, nn.Parameter)


def test_ties_and_aliases_stay() -> None:
    model: Any = assert_built_alike(Ties, 0)
    assert model.head.weight is model.embed.weight and model.again is model.block
    assert model.aliases[0] is model.frozen and model.aliases[1]["embed"] is model.embed.weight
    assert model.bias is None


def test_parameters_that_are_referred_to_weakly_are_replaced() -> None:
    model: Any = assert_built_alike(Recurrent, 0)
    assert all(a is b for a, b in zip(model.lstm.parameters(), model.lstm._flat_weights, strict=True))
    model.lstm(torch.ones(3, 2, 4))[0].sum().backward()


def test_storage_aliases_stay() -> None:
    def build() -> nn.Module:
        model = nn.Linear(4, 4)
        model.register_buffer("row", model.weight.detach()[1])
        return model

    model: Any = assert_built_alike(build, 0)
    with torch.no_grad():
        model.weight.fill_(3)
    assert model.row.tolist() == [3.0] * 4


class LearntBuffers(nn.Module):
    """Buffers that require gradients, as prompts and images are that somebody optimises beside a frozen model."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("drawn", torch.randn(3, requires_grad=True))
        self.register_buffer("marked", torch.ones(3).requires_grad_(), persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.drawn)
        nn.init.ones_(self.marked)
        self.count.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.drawn + self.marked  # type: ignore[no-any-return]


@multirank(1)
@pytest.mark.parametrize("begin", ["deferred", "meta", "real"])
@pytest.mark.parametrize("change", ["none", "dtype", "to_empty"])
def test_buffers_that_require_gradients_go_on_doing_so(
    rank: int, world_size: int, begin: str, change: str
) -> None:
    plain = LearntBuffers()
    wanted = {name: (b.requires_grad, b.is_leaf) for name, b in plain.named_buffers()}
    with {"deferred": sw.deferred_init(), "meta": torch.device("meta")}.get(begin, contextlib.nullcontext()):
        model = LearntBuffers()
    sw.fully_shard(model)
    if change == "dtype":
        model.to(torch.float64)
    elif change == "to_empty" and begin != "deferred":
        model.to_empty(device="cpu")
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.fill_(1)
    sw.materialize(model)
    assert {name: (b.requires_grad, b.is_leaf) for name, b in model.named_buffers()} == wanted
    model(torch.ones(2, 3, dtype=model.drawn.dtype)).sum().backward()
    assert all(b.grad is not None for b in (model.drawn, model.marked))


def test_buffers_that_are_part_of_a_graph_are_refused() -> None:
    with sw.deferred_init():
        model = nn.Sequential(nn.Linear(3, 3))
        model[0].register_buffer("scaled", model[0].weight * 2)
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match=r"Buffer '0.scaled' was computed .*MulBackward0.*torch.no_grad\(\)"):
        sw.materialize(model)
    assert torch.equal(torch.get_rng_state(), state)
    model[0].scaled = model[0].scaled.detach()
    sw.materialize(model)
    assert torch.equal(model[0].scaled, model[0].weight * 2)


def test_gradients_from_before_there_were_values_are_refused() -> None:
    with sw.deferred_init():
        model = nn.Linear(3, 3)
    model(torch.ones(1, 3)).sum().backward()
    with pytest.raises(ValueError, match="'weight' has a gradient from a backward before it had values"):
        sw.materialize(model)
    model.zero_grad()
    sw.materialize(model)


def test_changes_after_the_context_are_recorded() -> None:
    def build(context: Any) -> nn.Module:
        torch.manual_seed(3)
        with context():
            model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 6))
        model.to(torch.bfloat16)
        nn.init.trunc_normal_(model[0].weight, std=0.1)
        with torch.no_grad():
            model[1].weight.copy_(torch.arange(30).view(6, 5))
        model[1].bias = nn.Parameter(model[0].weight[0].detach().repeat(2)[:6])
        return model

    plain = build(torch.no_grad)
    after = torch.get_rng_state()
    model = sw.materialize(build(sw.deferred_init))
    assert_same(model, plain)
    assert torch.equal(torch.get_rng_state(), after)


def test_tensors_from_outside_are_read_as_they_were() -> None:
    given = torch.randn(4, 3)

    def build() -> nn.Module:
        model = nn.Linear(3, 4)
        model.weight.data.copy_(given)
        return model

    assert_built_alike(build, 0)
    with sw.deferred_init():
        model = build()
    given.mul_(2)
    with pytest.raises(RuntimeError, match=r"shape \(4, 3\) that the construction .* was changed afterwards"):
        sw.materialize(model)


def test_data_may_be_a_tensor_from_outside() -> None:
    given = torch.randn(4, 3)

    def build() -> nn.Module:
        model = nn.Linear(3, 4)
        model.weight.data = given
        model.bias.data = given[:, 0] * 2
        return model

    assert_built_alike(build, 0)


def test_real_tensors_are_filled_at_once_and_in_order() -> None:
    outside = torch.zeros(5)

    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 4))
        outside.normal_()
        model.append(nn.Linear(4, 3))
        return model

    torch.manual_seed(0)
    build()
    wanted = outside.clone()
    assert_built_alike(build, 0)
    assert torch.equal(outside, wanted)


def test_default_dtype_is_that_of_the_constructor() -> None:
    def build() -> nn.Module:
        torch.set_default_dtype(torch.float64)
        try:
            model = nn.Linear(3, 4)
            model.register_buffer("root", torch.arange(4).sqrt())
        finally:
            torch.set_default_dtype(torch.float32)
        return model

    assert_built_alike(build, 0)


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
    with pytest.raises(RuntimeError, match=r"drawn from the cpu generator after deferred_init"):
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
    old = model.weight_ih_l0
    sw.materialize(model)
    assert model.weight_ih_l0 is not old  # LSTM refers to its weights weakly
    with pytest.raises(RuntimeError, match=r"was used after its model was materialized"):
        old.sum()


def test_a_deferred_model_cannot_be_saved() -> None:
    with sw.deferred_init():
        model = nn.Linear(3, 3)
    with pytest.raises(TypeError, match=r"holds no values that could be saved"):
        torch.save(model.state_dict(), "/dev/null")


# -- sharded -----------------------------------------------------------------------------------------------------------


@multirank(2)
def test_ranks_do_not_communicate(rank: int, world_size: int) -> None:
    with sw.deferred_init():
        model = MODELS["llama"]()
    sw.fully_shard(model, layout="ragged")
    if rank == 0:
        sw.materialize(model)
    dist.barrier()  # rank 0 gets here only if it did not wait for rank 1
    if rank == 1:
        sw.materialize(model)


@multirank(2)
def test_nothing_runs_without_values(rank: int, world_size: int) -> None:
    with sw.deferred_init():
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))
    sw.fully_shard(model)
    with pytest.raises(RuntimeError, match=r"Parameters '0.weight', .* hold no values yet.*materialize"):
        model(torch.ones(2, 3))
    with pytest.raises(RuntimeError, match=r"no values yet that could be copied"):
        copy.deepcopy(model)
    sw.materialize(model)
    model(torch.ones(2, 3))


@multirank(2)
def test_converted_after_sharding(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(3, 5).to(torch.bfloat16)
    torch.manual_seed(0)
    with sw.deferred_init():
        model = nn.Linear(3, 5)
    sw.fully_shard(model)
    model.to(torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"hold no values yet"):
        model(torch.ones(2, 3, dtype=torch.bfloat16))
    assert_same(sw.materialize(model), plain)


@multirank(2)
def test_loaded_parameters_stay(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    plain, other = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)), nn.Linear(3, 5)
    torch.manual_seed(0)
    with sw.deferred_init():
        model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    sw.fully_shard(model)
    state = {f"0.{name}": value for name, value in other.state_dict().items()}
    model.load_state_dict(state, strict=False)
    sw.materialize(model)
    plain[0] = other
    assert_same(model, plain)


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


def test_what_numpy_would_write_into_a_deferred_tensor_is_refused() -> None:
    with sw.deferred_init():
        weight = nn.Linear(2, 2).weight.detach()
        for array in (weight.numpy(), numpy.asarray(weight)):
            with pytest.raises(ValueError, match="read-only"):
                array[:] = 7
        assert numpy.array(weight).sum() == weight.sum().item()


def test_memory_of_numpy_that_is_written_again_is_noticed() -> None:
    given = numpy.zeros((2, 2), dtype=numpy.float32)

    def build() -> nn.Module:
        model = nn.Linear(2, 2)
        model.weight.data.copy_(torch.from_numpy(given))
        return model

    assert_built_alike(build, 0)
    with sw.deferred_init():
        model = build()
    given[:] = 1
    with pytest.raises(RuntimeError, match=r"shape \(2, 2\) .* was changed afterwards"):
        sw.materialize(model)


@pytest.mark.parametrize("form", ["torch", "mapped", "legacy", "safetensors"])
def test_files_that_a_constructor_reads(tmp_path: Any, form: str) -> None:
    stored = {"weight": torch.randn(3, 2).t(), "mean": torch.arange(2)}
    file = tmp_path / "stored"
    if form == "safetensors":
        safetensors = pytest.importorskip("safetensors.torch")
        safetensors.save_file({key: value.contiguous() for key, value in stored.items()}, file)
    else:
        torch.save(stored, file, _use_new_zipfile_serialization=form != "legacy")

    def build() -> nn.Module:
        found = (
            safetensors.load_file(file) if form == "safetensors" else torch.load(file, mmap=form == "mapped")
        )
        model = nn.Linear(3, 2)
        model.load_state_dict({"weight": found["weight"], "bias": found["mean"].float()})
        model.register_buffer("mean", found["mean"])
        model.register_buffer("first", model.mean[:1])
        return model

    assert_built_alike(build, 0)


def test_memory_that_is_given_to_a_tensor() -> None:
    given = torch.ones(2, 2)

    def build() -> nn.Module:
        model = nn.Linear(2, 2)
        model.register_buffer("taken", torch.empty(0).set_(given))
        model.register_buffer("shared", torch.empty(0).set_(model.weight.detach()))
        return model

    assert_built_alike(build, 0)


def test_copies_of_buffers_keep_their_geometry() -> None:
    def build() -> nn.Module:
        model = nn.Linear(4, 4)
        rows = torch.rand(3, 4)
        model.register_buffer("rows", rows)
        model.register_buffer("row", rows[1])
        model.register_buffer("wide", torch.rand(1, 3).expand(4, 3))
        return copy.deepcopy(model)

    model: Any = assert_built_alike(build, 0)
    model.rows.fill_(3)
    assert model.row.tolist() == [3.0] * 4


def test_autocast_and_inference_mode_do_not_change_what_was_recorded() -> None:
    def build() -> nn.Module:
        model = nn.Linear(4, 4)
        model.register_buffer("product", torch.randn(5, 5) @ torch.randn(5, 5))
        return model

    torch.manual_seed(0)
    plain = build()
    torch.manual_seed(0)
    with sw.deferred_init():
        model = build()
    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        sw.materialize(model)
    assert_same(model, plain)


def test_containers_that_hold_themselves() -> None:
    def build() -> nn.Module:
        model: Any = nn.LSTM(2, 2)
        model.cache = {"weight": model.weight_ih_l0, "all": []}
        model.cache["all"].append(model.cache)
        return model

    model: Any = assert_built_alike(build, 0)
    assert model.cache["weight"] is model.weight_ih_l0 and model.cache["all"][0] is model.cache


def test_lazy_modules_wait_for_their_first_forward() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))

    torch.manual_seed(0)
    plain = build()
    plain(torch.ones(1, 3))
    torch.manual_seed(0)
    with sw.deferred_init():
        model = build()
    sw.materialize(model)(torch.ones(1, 3))
    assert_same(model, plain)


class Marked(nn.Parameter):
    pass


class Named(torch.Tensor):
    """As libraries have them that keep units or names of dimensions with tensors."""


class Made(torch.Tensor):
    @staticmethod
    def __new__(cls, data: torch.Tensor) -> Any:
        return torch.Tensor._make_subclass(cls, data)


class Halves(torch.Tensor):
    """A wrapper of two tensors, as quantised weights are."""

    @staticmethod
    def __new__(cls, data: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=data.dtype)

    def __init__(self, data: torch.Tensor) -> None:
        self.low, self.high = data.chunk(2)

    def __tensor_flatten__(self) -> Any:
        return ["low", "high"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is torch.ops.aten.detach.default
        return cls(torch.cat([args[0].low, args[0].high]))


OF_OTHER_CLASSES: dict[str, tuple[Callable[[], Any], str]] = {
    "as_subclass": (
        lambda: torch.rand(2).as_subclass(Named),
        "a Named, in Holder at 'self.scale = nn.Parameter",
    ),
    "_make_subclass": (lambda: Made(torch.rand(2)), "a Made, in Holder at 'self.scale = nn.Parameter"),
    "constructor": (lambda: Named([1.0, 2.0]), "a Named, in Holder at 'self.scale = nn.Parameter"),
    "like": (lambda: torch.zeros_like(GIVEN), "a Named, in Holder at 'self.scale = nn.Parameter"),
    "wrapper": (lambda: Halves(torch.rand(4)), "'scale' of Holder, a Halves that holds deferred tensors"),
    "parameter": (lambda: Marked(torch.rand(2)), "a Marked, in Holder at 'self.scale = nn.Parameter"),
}
GIVEN = torch.ones(2).as_subclass(Named)


class Holder(nn.Module):
    def __init__(self, make: Callable[[], Any], buffer: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        if buffer:
            self.register_buffer("scale", make())
        else:
            self.scale = nn.Parameter(make())


@pytest.mark.parametrize("buffer", [False, True])
@pytest.mark.parametrize("kind", OF_OTHER_CLASSES)
def test_tensors_of_other_classes_are_refused_by_name(kind: str, buffer: bool) -> None:
    make, said = OF_OTHER_CLASSES[kind]
    new = nn.Parameter.__dict__["__new__"]
    said = re.escape(f"cannot build {said}").replace("self\\.scale\\ =\\ nn\\.Parameter", "self.*scale.*")
    with pytest.raises(NotImplementedError, match=f"{said}.*outside"), sw.deferred_init():
        Holder(make, buffer)
    assert nn.Parameter.__dict__["__new__"] is new
    if kind != "parameter":
        Holder(make, buffer)  # the context has left nothing behind
    assert_built_alike(lambda: Holder(lambda: torch.ones(2), buffer), 0)


def test_tensors_of_other_classes_from_outside_stay() -> None:
    given = Halves(torch.arange(4.0))
    with sw.deferred_init():
        model = nn.ParameterList([nn.Parameter(GIVEN, requires_grad=False)])
        model.register_buffer("halves", given)
    sw.materialize(model)
    assert type(model[0]) is Named and model[0].data_ptr() == GIVEN.data_ptr()
    assert model.halves is given


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        ("sparse_coo", lambda: torch.eye(3).to_sparse()),
        ("sparse_coo", lambda: torch.sparse_coo_tensor([[0, 1]], [1.0, 2.0], (3,))),
        ("nested", lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_tensors_that_are_not_dense_are_refused(kind: str, make: Callable[[], Any]) -> None:
    with (
        pytest.raises(NotImplementedError, match=f"a {kind} one came up. Build .* outside"),
        sw.deferred_init(),
    ):
        Holder(make, True)


def test_a_context_in_another_thread_is_refused() -> None:
    def build() -> str:
        try:
            with sw.deferred_init():
                return "built for real"
        except RuntimeError as error:
            return str(error)

    with sw.deferred_init(), futures.ThreadPoolExecutor(1) as threads:
        assert "active in another thread" in threads.submit(build).result()
    with futures.ThreadPoolExecutor(1) as threads:
        assert threads.submit(build).result() == "built for real"


def test_what_was_read_is_let_go_once_nothing_is_deferred() -> None:
    given = torch.ones(3, 3)
    there = weakref.ref(given)
    with sw.deferred_init():
        model = nn.Linear(3, 3)
        model.weight.data.copy_(given)
    sw.materialize(model)
    del given
    gc.collect()
    assert there() is None


@multirank(1)
def test_nothing_is_done_inside_the_context(rank: int, world_size: int, tmp_path: Any) -> None:
    with sw.deferred_init():
        model = nn.Linear(3, 3)
        for action in (sw.materialize, sw.fully_shard, lambda m: sw.load_pretrained(m, tmp_path)):
            with pytest.raises(RuntimeError, match="was called inside deferred_init"):
                action(model)
    sw.materialize(sw.fully_shard(model))


@multirank(2)
@pytest.mark.parametrize("layout", ["per_parameter", "ragged", sw.Ragged("element")])
def test_loading_one_parameter_leaves_the_others_to_be_initialised(
    rank: int, world_size: int, layout: Any
) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    torch.manual_seed(0)
    plain: Any = build()
    torch.manual_seed(0)
    with sw.deferred_init():
        model = build()
    sw.fully_shard(model, layout=layout)
    model.load_state_dict({"1.weight": torch.ones(4, 4)}, strict=False)
    sw.materialize(model)
    nn.init.ones_(plain[1].weight)
    assert_same(model, plain)
