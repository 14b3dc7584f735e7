"""Deferred models equal the plain build bit by bit, on any ranks, layout and strategy."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard

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


@pytest.mark.extensive("architectures of transformers")
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
    with pytest.raises(RuntimeError, match=r"shape \(4, 3\) was changed after the constructor"):
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
    with pytest.raises(RuntimeError, match=r"no values to copy yet"):
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
